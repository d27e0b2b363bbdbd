"""The modules of a job with their initial weights, and their optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from pretrain.engine.optim.settings import ModuleOptimizer
from pretrain.latent.config import LatentJob
from pretrain.latent.models.clusters import ClusterDecoder, ClusterEncoder
from pretrain.latent.models.critics import Critics
from pretrain.latent.models.text import TextDecoder, TextEncoder


def build(job: LatentJob, words: int) -> dict[str, nn.Module]:
    """Build ``decoder``, ``encoder`` unless the job is a language model, and ``critics`` for an implicit posterior.

    Args:
        job: its sections ``model`` and ``critic`` give the sizes.
        words: size of the vocabulary; not used for clusters.
    """
    model, classes = job.model, job.data.clusters
    modules: dict[str, nn.Module] = {}
    if classes is not None:
        modules = {"encoder": ClusterEncoder(classes, model), "decoder": ClusterDecoder(classes, model)}
    else:
        if model.posterior != "none":
            modules["encoder"] = TextEncoder(words, model)
        modules["decoder"] = TextDecoder(words, model)
    if job.has_critics:
        modules["critics"] = Critics(model.latent, model.hidden if classes is None else classes, job.critic)
    return modules


@dataclass(frozen=True)
class TextModel:
    """The modules of a model of sentences; a language model has no encoder, only an implicit posterior has critics."""

    encoder: TextEncoder | None
    decoder: TextDecoder
    critics: Critics | None

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> TextModel:
        """Make the model from a job's modules by name."""
        encoder, decoder, critics = (modules.get(name) for name in ("encoder", "decoder", "critics"))
        assert encoder is None or isinstance(encoder, TextEncoder)
        assert isinstance(decoder, TextDecoder)
        assert critics is None or isinstance(critics, Critics)
        return cls(encoder, decoder, critics)

    @property
    def device(self) -> torch.device:
        """The device that the parameters are on."""
        return next(self.decoder.parameters()).device


def optimizers(job: LatentJob) -> Mapping[str, ModuleOptimizer]:
    """The critics are never clipped and learn at the constant rate ``critic.lr``; the rest is ``job.optimizer``."""
    if not job.has_critics:
        return {}
    section = job.optimizer.model_copy(update={"lr": job.critic.lr, "clip": 0.0})
    return {"critics": ModuleOptimizer(section, schedule=False)}
