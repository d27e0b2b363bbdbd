"""A teacher's vectors that hosts hold differently: every rank ends with one error, and its command runs as printed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.pairs.task import PairTask
from tests.pairs import every_text, pairs_mapping, taught_by, write_vectors
from tests.support import run_ranks


def _refusals(mapping: dict[str, Any], stores: list[Path]) -> list[str]:
    """The refusal of each store that rank 1, as if on a host of its own, has in the place of rank 0's."""
    os.environ["LOCAL_RANK"] = "0"
    found = []
    for store in stores:
        if distributed.rank():
            mapping["distillation"]["vectors"] = str(store)
            mapping["data"]["cache"] = str(store.parent / "cache of rank 1")
        job: Any = job_from_mapping(mapping, "test")
        try:
            PairTask(job, Path(job.run.dir))
        except DataError as error:
            found.append(str(error))
        else:
            found.append("no refusal")
    return found


def test_hosts_whose_vectors_differ_are_refused_on_all_ranks(tmp_path: Path) -> None:
    mapping = pairs_mapping(tmp_path, **taught_by(tmp_path / "store", {"cosine": 1.0}))
    texts = every_text(tmp_path / "pairs.jsonl")
    write_vectors(tmp_path / "store", texts, 5)
    write_vectors(tmp_path / "another", texts, 5, model="another teacher")
    write_vectors(tmp_path / "half", texts[:-3], 5)
    stores = [tmp_path / name for name in ("nowhere", "another", "half")]
    first, second = run_ranks(_refusals, 2, mapping, stores)
    assert first == second
    nowhere, another, half = first
    assert "rank 1: distillation.vectors=" in nowhere
    assert "hosts have vectors of other models" in another
    (path,) = re.findall(r"capt encode '(.+/cache of rank 1/.+\.jsonl)' ", half)
    assert {json.loads(line)["text"] for line in Path(path).read_text().splitlines()} == set(texts[-3:])
