"""SIGKILL at random moments of an evaluation and of mining: started again they continue, and encode nothing twice.

``CAPT_RETRIEVAL_KILLS`` sets the number of kills of each.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.engine.task import Role
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RetrievalSettings
from tests.support import start_forked
from tests.unit.retrieval.toy import ToyEncoder, write_beir

KILLS = int(os.environ.get("CAPT_RETRIEVAL_KILLS", "3"))
DOCUMENTS = 600


class Slow(ToyEncoder):
    """An encoder that can be killed in the middle of its work."""

    def encode(self, texts: Sequence[str], role: Role) -> np.ndarray:
        time.sleep(0.01)
        return super().encode(texts, role)


def _evaluate(home: str, store: str) -> None:
    from capt.pretrain.retrieval import evaluate as room

    room.load_text_encoder = lambda *_: Slow()
    path = Path(home)
    room.evaluate(
        Path("toy"), [path / "beir"], EncodeOptions(str(path / store), tokens=60), EncoderOptions(),
        RetrievalSettings(dims="6"), out=path / f"{store}.json",
    )  # fmt: skip


def _mine(home: str, store: str) -> None:
    from capt.pretrain.retrieval import mine as room

    room.load_text_encoder = lambda *_: Slow()
    path = Path(home)
    room.mine(
        [path / "pairs.jsonl"], path / "beir", Path("toy"), path / f"{store}-mined",
        EncodeOptions(str(path / store), tokens=60), EncoderOptions(), room.Rules(number=3),
    )  # fmt: skip


def _result(home: Path, store: str) -> Any:
    if (home / f"{store}-mined").exists():
        return (home / f"{store}-mined" / "pairs.jsonl").read_bytes()
    return json.loads((home / f"{store}.json").read_text())["sections"]


def _stored(folder: Path) -> int:
    return sum(path.stat().st_size // 20 for path in folder.rglob("*.ids"))


@pytest.mark.parametrize("work", [_evaluate, _mine])
def test_killed_and_started_again(work: Any, tmp_path: Path) -> None:
    beir = write_beir(tmp_path / "beir", DOCUMENTS, 30)
    texts = [json.loads(line)["text"] for line in (beir / "corpus.jsonl").read_text().splitlines()]
    rows = [{"query": f"{text} asked", "pos": [texts[i + 1]]} for i, text in enumerate(texts[:60])]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = start_forked(work, str(tmp_path), "whole")
    whole.join(120)
    assert whole.exitcode == 0
    generator, kept, hits = random.Random(7), [0], 0
    for _ in range(KILLS):
        process = start_forked(work, str(tmp_path), "killed")
        aim = kept[-1] + generator.randint(1, 2 * DOCUMENTS // (KILLS + 1))
        while process.is_alive() and _stored(tmp_path / "killed") < aim:
            time.sleep(0.002)
        process.kill()
        process.join()
        hits += process.exitcode != 0
        kept.append(_stored(tmp_path / "killed"))
        assert kept[-1] >= kept[-2], "what was stored is lost"
    last = start_forked(work, str(tmp_path), "killed") if hits == KILLS else process
    last.join(120)
    assert last.exitcode == 0
    assert hits, f"the kills hit nothing: {kept}"
    assert _stored(tmp_path / "killed") == _stored(tmp_path / "whole"), "a text was encoded twice, or never"
    assert _result(tmp_path, "killed") == _result(tmp_path, "whole")
