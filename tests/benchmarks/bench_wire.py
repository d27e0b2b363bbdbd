"""Bytes that a training step sends, and in which types, for every shipped pretraining job of the language task.

How often each gradient and weight travels, and in which type, is counted on two gloo ranks running the job in small
(``tests/wire.py``; `tests/distributed/test_wire.py` holds every shipped job to it). That times the parameters of the
job in full, which are counted on torch's meta device, are the bytes of a rank's gradients and weights. The contrast's
bytes follow from its shapes (`docs/contrast.md`), which `tests/distributed/test_contrast_wire.py` verifies.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from capt.pretrain.config.load import load_job, load_mapping
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.module import LanguageModule
from tests.language import write_corpus
from tests.support import run_ranks
from tests.wire import Traffic, ranks_of, small_job, traffic

_CONFIGS = Path(__file__).parents[2] / "configs" / "pretrain"
_JOBS = [path for path in sorted(_CONFIGS.glob("*.yaml")) if load_mapping(path)["task"]["type"] == "capt_language"]


def _all_traffic(folder: Path) -> dict[str, Traffic]:
    return {path.stem: traffic(small_job(path, folder, 2)) for path in _JOBS}


def _parameters(job: LanguageJob) -> int:
    config = job.model.for_tokenizer(job.tokenizer.vocab_size, job.model.pad_id)
    with torch.device("meta"):
        return sum(p.numel() for p in LanguageModule(job, config).parameters())


def _contrast(job: LanguageJob, ranks: int, hidden: int) -> int:
    """Bytes that a rank receives for the contrast in a step: anchors, their sums, and their log-sums, each micro-batch;
    ids of the anchors, where duplicates are not negatives."""
    if not job.contrast.weight:
        return 0
    anchors = 2 * job.micro_batch(ranks)
    a_batch = anchors * (4 * hidden + 4 * (hidden + 1) + 4 + 8 * job.contrast.mask_duplicates)
    return job.accumulation(ranks) * (ranks - 1) * a_batch


def _row(path: Path, small: Traffic) -> dict[str, Any]:
    job, ranks = load_job(path), ranks_of(path)
    assert isinstance(job, LanguageJob)
    parameters = _parameters(job)
    updates = small.updates()
    gradients = [sent for sent in updates if sent.reduces and sent.elements > 64]
    gathered = sum(2 * sent.elements for sent in updates if not sent.reduces) > 64
    times = sum(sent.elements for sent in gradients) / small.parameters
    width = {"float32": 4, "bfloat16": 2}
    each = sum(sent.elements * width[sent.dtype] for sent in gradients) / small.parameters
    return {
        "name": path.stem,
        "ranks": ranks,
        "accumulation": job.accumulation(ranks),
        "ZeRO": job.engine.zero_stage,
        "parameters, M": round(parameters / 1e6, 1),
        "gradients reduced, times": round(times, 2),
        "types": ", ".join(sorted({sent.dtype for sent in gradients})),
        "gradients, GB": round(each * parameters / 1e9, 3),
        "weights gathered, GB": round(4 * parameters / 1e9, 3) if gathered else 0,
        "contrast, GB": round(_contrast(job, ranks, job.model.hidden) / 1e9, 3),
        "ok": round(times, 2) <= 1.0,
    }


def main() -> int:
    """Count, print, and say whether each gradient travels once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "text.txt")
        found = run_ranks(_all_traffic, 2, folder, timeout=300)[0]
    rows = [_row(path, found[path.stem]) for path in _JOBS]
    sys.stdout.write(json.dumps({"rows": rows}) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
