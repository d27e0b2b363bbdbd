"""Runs of word embeddings with tables and vocabulary as a test wants them, made without training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from capt.pretrain.config.load import load_job
from capt.pretrain.embeddings.corpus import VOCABULARY, WordVocabulary
from capt.pretrain.engine.checkpoint.save import partial_folder, write_weights_only

WORDS = ("the", "king", "queen", "man", "woman", "sword", "paris", "france")


class Tables(nn.Module):
    """Two tables, as a module of a checkpoint has them."""

    def __init__(self, matrix: np.ndarray, context: np.ndarray) -> None:
        super().__init__()
        self.input = nn.Parameter(torch.from_numpy(matrix.astype(np.float32)))
        self.context = nn.Parameter(torch.from_numpy(context.astype(np.float32)))


def tables(seed: int, words: int = len(WORDS), width: int = 4) -> Tables:
    rng = np.random.default_rng(seed)
    return Tables(rng.standard_normal((words, width)), rng.standard_normal((words, width)))


def make_run(
    run: Path, modules: Mapping[str, nn.Module], words: tuple[str, ...] = WORDS, overrides: tuple[str, ...] = ()
) -> Path:
    """A run folder with one checkpoint at step 0 and a few rows of metrics."""
    run.parent.mkdir(parents=True, exist_ok=True)
    (run.parent / "text.txt").write_text("the king\n")
    job = load_job(
        "ace/skipgram",
        [f"data.files={run.parent / 'text.txt'}", "model.dim=4", f"run.dir={run}", *overrides],
    )
    target = run / "checkpoints" / "step-00000000"
    partial = partial_folder(target)
    partial.mkdir(parents=True)
    WordVocabulary(words, np.arange(len(words), 0, -1)).save(partial / VOCABULARY)
    write_weights_only(target, job, dict(modules), {})
    (run / "config.yaml").write_bytes((target / "config.yaml").read_bytes())
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": 4.0 - step / 10, "penalty": -0.5, "words_per_second": 1000.0 * step}
        for step in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run
