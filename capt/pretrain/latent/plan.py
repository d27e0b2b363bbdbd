"""A ``latent`` job without its text, for ``capt plan``: its sizes, and a batch of its shapes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Progress, StepMetrics
from capt.pretrain.latent.batches import LatentBatch, SampledBatch, StepNoise, sample_batch
from capt.pretrain.latent.config import LatentJob
from capt.pretrain.latent.corpus import END, LatentVocabulary
from capt.pretrain.latent.task import LatentTask
from capt.pretrain.plan.rehearsal import Rehearsal, UnplannedError


class RehearsedTask(LatentTask):
    """The task over no text, on tensors without data."""

    def __init__(self, job: LatentJob, words: int, length: int) -> None:
        self.job, self.status, self.queue = job, "", None
        self.width = job.model.latent if job.contrast.over == "z" else job.model.hidden
        self.vocabulary: Any = range(words) if words else None
        self._scored = length - 1
        self._train: Any = SimpleNamespace(mean_tokens=job.batch.global_ * self._scored) if words else None
        self._batches_per_epoch, self._clamped, self._without_contrast, self._aggressive = 1, 0.0, 0, False

    def step(self, engines: Mapping[str, Engine], batch: Any, progress: Progress) -> StepMetrics:
        """Do a step of the one micro-batch in ``batch``."""
        (only,) = batch
        return super().step(engines, only, progress)

    def tokens(self, batch: list[SampledBatch], sentences: int) -> int:
        """Return the words that a step of ``sentences`` over all ranks predicts; 0 for clusters."""
        return 0 if self._train is None else sentences * self._scored


def rehearse(job: LatentJob, world: int) -> Rehearsal:
    """Return the task, and this rank's part of a batch in which every sentence is as long as it may be.

    Raises:
        UnplannedError: what a step does depends on values, as with LagVAE and SaVAE.
    """
    for key in ("svi_steps", "aggressive_updates"):
        if getattr(job.objective, key):
            raise UnplannedError(f"objective.{key}: what such a step computes depends on its values")
    # The largest share that a rank can have.
    rows = -(-job.batch.global_ // world)
    assumed: tuple[str, ...] = ()
    if job.data.clusters is not None:
        words, length = 0, 1
        tokens = torch.zeros(rows, 1, dtype=torch.int64)
    else:
        words, assumed = _words(job)
        length = job.data.max_words + 2  # <s> and </s>
        tokens = torch.full((rows, length), END)
        assumed = (*assumed, f"every sentence of {job.data.max_words} words, the most of data.max_words")
    batch = LatentBatch(tokens, torch.arange(rows), rows, job.batch.global_)
    noise = StepNoise(job.run.seed, ("plan",), batch.rows, job.batch.global_, tokens.device)
    sampled = sample_batch(job, batch, noise)
    if sampled.negatives is not None:  # which the ranks share
        sampled = sampled._replace(negatives=sampled.negatives[::world])
    return Rehearsal(RehearsedTask(job, words, length), sampled, assumed, longest=job.data.clusters is None)


def _words(job: LatentJob) -> tuple[int, tuple[str, ...]]:
    """Return the size of the vocabulary, and what was assumed of it."""
    path = job.data.vocabulary_file
    if path is not None and path.is_file():
        return len(LatentVocabulary.load(path)), ()
    return job.data.vocabulary, (f"a vocabulary of {job.data.vocabulary:,} words, the most of data.vocabulary",)
