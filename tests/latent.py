"""Shared parts of latent tests: a small text, a small job, and a step without the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.config.load import load_job
from capt.pretrain.engine.task import to_float
from capt.pretrain.latent.config import LatentJob

ROOT = Path(__file__).parents[1]
PTB = ROOT / "capt" / "configs" / "pretrain" / "latent" / "ptb"
PRESETS = (
    "vae", "beta_vae", "cyc_vae", "sa_vae", "lag_vae", "ae", "lstm_lm", "ivae", "ivae_mi", "clvae", "clvae_mi",
    "clvae_plus", "clvae_plus_mi", "clvae_plus_paper", "clvae_plus_mi_paper",
)  # fmt: skip
PAPER = ("ivae_paper", "ivae_mi_paper", "clvae_paper", "clvae_mi_paper", "clvae_plus_paper", "clvae_plus_mi_paper")
"""The implicit rows as the paper writes them."""

WORDS = ["the", "a", "cat", "dog", "bird", "sees", "likes", "finds", "big", "small", "red", "old", "today", "again"]


def write_text(folder: Path, sentences: int = 60, seed: int = 0) -> Path:
    """Train, valid and test files of random sentences of 2 to 6 words."""
    generator = np.random.default_rng(seed)
    for split, share in (("train", 1.0), ("valid", 0.3), ("test", 0.3)):
        lines = [
            " ".join(generator.choice(WORDS, size=generator.integers(2, 7))) for _ in range(round(sentences * share))
        ]
        (folder / f"toy.{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def small_job(preset: str, folder: Path, run_dir: Path, *more: str, batch: int = 8, micro: int = 8) -> LatentJob:
    """A preset on the text in ``folder``, in small."""
    overrides = [
        f"data.path={folder}", f"run.dir={run_dir}", "model.embedding=12", "model.hidden=16", "model.latent=4",
        "model.noise=4", "critic.hidden=16", "critic.updates=2", "run.tensorboard=false", "run.log_every=1",
        "schedule.epochs=null", "schedule.max_steps=6", "validate.per_epoch=null", "validate.every=3",
        "checkpoint.best=null", "engine.precision=fp32", f"batch.global={batch}", f"batch.micro={micro}",
        "run.threads=1", *more,
    ]  # fmt: skip
    job = load_job(PTB / f"{preset}.yaml", overrides)
    assert isinstance(job, LatentJob)
    return job


def plain(value: Any) -> Any:
    """Figures as floats."""
    return {name: to_float(figure) for name, figure in value.items()}
