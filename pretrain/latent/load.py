"""Loading a trained model from a checkpoint, to evaluate it or to write sentences with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.engine.checkpoint import find_best, load_module, open_checkpoint, read_metadata
from capt.pretrain.latent.config import LatentJob
from capt.pretrain.latent.data.corpus import VOCABULARY, Vocabulary
from capt.pretrain.latent.models.build import TextModel, build


@dataclass(frozen=True)
class LoadedModel:
    """The modules of a checkpoint in evaluation mode, its vocabulary (None for clusters) and its job.

    ``unknown_in_training`` is the number of unknown words in the training text; None where the checkpoint does not say.
    """

    checkpoint: Path
    modules: dict[str, nn.Module]
    vocabulary: Vocabulary | None
    job: LatentJob
    unknown_in_training: int | None = None

    @property
    def text(self) -> tuple[TextModel, Vocabulary]:
        """The modules and the vocabulary of a model of text.

        Raises:
            CheckpointError: it is a model of clusters.
        """
        if self.vocabulary is None:
            raise CheckpointError(f"{self.checkpoint}: a model of synthetic clusters, not of text")
        return TextModel.of(self.modules), self.vocabulary

    @property
    def draws_text(self) -> bool:
        """Whether the model draws sentences from a prior: it is neither one of clusters nor a language model."""
        return self.vocabulary is not None and self.job.model.posterior != "none"


def load_model(path: Path) -> LoadedModel:
    """Load a checkpoint, or a run's best one (its newest where none is kept), after verifying every file.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is that of another kind of job.
    """
    checkpoint = find_best(path)
    job = open_checkpoint(checkpoint, LatentJob, "latent")
    vocabulary = Vocabulary.load(checkpoint / VOCABULARY) if job.data.clusters is None else None
    words = len(vocabulary) if vocabulary is not None else 0
    with torch.device("meta"):
        names = tuple(build(job, words))
    modules = {name: load_module(checkpoint, name, lambda name=name: build(job, words)[name]) for name in names}  # type: ignore[misc]
    for module in modules.values():
        module.eval()
    unknown = read_metadata(checkpoint).task.get("unknown_in_training")
    return LoadedModel(checkpoint, modules, vocabulary, job, unknown if isinstance(unknown, int) else None)
