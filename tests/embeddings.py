"""Shared parts of word-embedding tests: a small text with a little structure, and small jobs on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from capt.pretrain.config.load import load_job
from capt.pretrain.embeddings.config import EmbeddingJob

ROOT = Path(__file__).parents[1]
ACE = ROOT / "capt" / "configs" / "pretrain" / "ace"


def write_text(path: Path, words: int = 3000, seed: int = 0, largest: int = 12) -> Path:
    """Sentences of 1 to 12 words, Zipf distributed, whose neighbours are often of the same of three topics."""
    generator = np.random.default_rng(seed)
    lines = []
    while words > 0:
        topic, length = generator.integers(3), int(generator.integers(1, 13))
        ranks = np.minimum(generator.zipf(1.3, length), largest)
        lines.append(" ".join(f"w{topic}x{r}" if r > 3 else f"the{r}" for r in ranks))
        words -= length
    path.write_text("\n".join(lines) + "\n")
    return path


def small_job(folder: Path, run_dir: Path, *more: str, preset: str = "skipgram") -> EmbeddingJob:
    """A preset on the text in ``folder/text.txt``, in small."""
    if not (folder / "text.txt").exists():
        write_text(folder / "text.txt")
    overrides = [
        f"data.files={folder / 'text.txt'}", f"data.cache={folder / 'cache'}", f"run.dir={run_dir}", "data.min_count=2",
        "data.subsample=0.01", "data.window=3", "data.workers=1", "model.dim=12", "negatives.block=8",
        "negatives.shared=16", "run.tensorboard=false", "run.log_every=1", "run.threads=1", "batch.global=1024",
        "schedule.epochs=null", "schedule.max_steps=6", *more,
    ]  # fmt: skip
    job = load_job(ACE / f"{preset}.yaml", overrides)
    assert isinstance(job, EmbeddingJob)
    return job
