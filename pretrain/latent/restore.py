"""A trained model back from a checkpoint, for evaluation and for its uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from pretrain.base.errors import CheckpointError
from pretrain.engine.checkpoint import find_best, open_checkpoint, restored
from pretrain.latent.config import LatentJob
from pretrain.latent.data.vocabulary import Vocabulary
from pretrain.latent.evaluation.measure import Modules
from pretrain.latent.models.build import build
from pretrain.latent.task import VOCABULARY


@dataclass(frozen=True)
class Restored:
    """A checkpoint's modules in evaluation mode, its words (none for clusters) and its job."""

    checkpoint: Path
    modules: dict[str, nn.Module]
    vocabulary: Vocabulary | None
    job: LatentJob

    @property
    def text(self) -> tuple[Modules, Vocabulary]:
        """The modules and words of a model of text.

        Raises:
            CheckpointError: it is one of clusters.
        """
        if self.vocabulary is None:
            raise CheckpointError(f"{self.checkpoint}: a model of synthetic clusters, not of text")
        return Modules.of(self.modules), self.vocabulary


def load_model(path: Path) -> Restored:
    """Load a checkpoint, or a run's best one (its newest where none is kept), after verifying every file.

    Raises:
        CheckpointError: nothing there, damaged, or the checkpoint of another kind of job.
    """
    checkpoint = find_best(path)
    job = open_checkpoint(checkpoint, LatentJob, "latent")
    vocabulary = Vocabulary.load(checkpoint / VOCABULARY) if job.data.clusters is None else None
    words = len(vocabulary) if vocabulary is not None else 0
    with torch.device("meta"):
        names = tuple(build(job, words))
    modules = {name: restored(checkpoint, name, lambda name=name: build(job, words)[name]) for name in names}  # type: ignore[misc]
    for module in modules.values():
        module.eval()
    return Restored(checkpoint, modules, vocabulary, job)
