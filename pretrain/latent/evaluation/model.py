"""A trained model of sentences as the evaluation uses it: draws of its posterior and likelihoods, without gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pretrain.latent.config import LatentJob
from pretrain.latent.data.batches import Batch
from pretrain.latent.data.noise import StepNoise
from pretrain.latent.data.sampled_batch import sample_batch
from pretrain.latent.models.critics import Critics
from pretrain.latent.models.normal import Normal
from pretrain.latent.models.text import TextDecoder, TextEncoder
from pretrain.latent.training.semi_amortized import refined_density

ROWS_PER_PASS = 512
"""The number of sequences in one pass of the decoder."""


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


class PosteriorSamples(NamedTuple):
    """``s`` draws of the posterior of each of ``n`` sentences.

    Attributes:
        h: the representations of the sentences.
        z: the draws.
        density: the posteriors' densities, where they are known.
    """

    h: Float[Tensor, "n k"]
    z: Float[Tensor, "s n d"]
    density: Normal | None


@torch.no_grad()
def sample_posterior(job: LatentJob, model: TextModel, batch: Batch, noise: StepNoise, number: int) -> PosteriorSamples:
    """Draw ``number`` times from each posterior; semi-amortised posteriors (SaVAE) are refined first."""
    assert model.encoder is not None
    head = model.encoder.head
    h = model.encoder.represent(batch.tokens)
    eps = noise.normal(number, head.noise)
    if not job.objective.svi_steps:
        z = head(h.repeat(number, 1), eps).z
        return PosteriorSamples(h, z.view(number, batch.total, -1), head(h, eps[: len(h)]).density)
    section = job.model.model_copy(update={"dropout": 0.0, "encoder_dropout": 0.0})
    sampled = sample_batch(job.model_copy(update={"model": section}), batch, noise)
    density = refined_density(model.decoder, head(h, sampled.eps), sampled, job.objective.beta_end, job.objective)
    assert density.log_variance is not None
    z = density.mean + (0.5 * density.log_variance).exp() * eps.view(number, batch.total, -1)
    return PosteriorSamples(h, z, density)


def log_likelihoods(
    decoder: TextDecoder, z: Float[Tensor, "s n d"], tokens: Int[Tensor, "n length"]
) -> Float[Tensor, "s n"]:
    r"""Compute :math:`\log p(x_i | z_{si})`, many draws in one pass of the decoder."""
    draws_per_pass = max(1, ROWS_PER_PASS // len(tokens))
    parts = [
        decoder.log_likelihood(part.flatten(0, 1), tokens.repeat(len(part), 1)).view(len(part), -1)
        for part in z.split(draws_per_pass)
    ]
    return torch.cat(parts)
