"""A trained model of sentences as the evaluation uses it: draws of its posterior and likelihoods, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from capt.pretrain.latent.batches import LatentBatch, StepNoise, sample_batch
from capt.pretrain.latent.config import LatentJob
from capt.pretrain.latent.models import LatentTextModel, TextDecoder
from capt.pretrain.latent.posterior import Normal, frozen
from capt.pretrain.latent.training import refined_density

ROWS_PER_PASS = 512
"""The number of sequences, at most, in one pass of the decoder."""

_TOKENS_PER_PASS = 1 << 15
"""The number of tokens, at most, in one pass of the decoder: 135 MB of its states in Yahoo's size. Where gradients are
taken it is an eighth of that, whose logits take 330 MB there."""


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
def sample_posterior(
    job: LatentJob, model: LatentTextModel, batch: LatentBatch, noise: StepNoise, number: int
) -> PosteriorSamples:
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
    r"""Compute :math:`\log p(x_i | z_{si})`, many sentences and draws in one pass of the decoder."""
    parts = [decoder.log_likelihood(part, own) for part, own in passes(z, tokens)]
    return torch.cat(parts).view(z.shape[:2])


def log_likelihood_gradients(
    decoder: TextDecoder, z: Float[Tensor, "s n d"], tokens: Int[Tensor, "n length"]
) -> Float[Tensor, "s n d"]:
    r"""Compute :math:`\nabla_z \log p(x_i | z_{si})`, many sentences and draws in one pass of the decoder."""
    training = decoder.training
    decoder.train()  # cuDNN differentiates an LSTM in training mode only; no dropout is given
    parts = []
    for part, own in passes(z, tokens, _TOKENS_PER_PASS // 8):
        leaf = part.detach().clone().requires_grad_()
        valid = torch.ones(len(own), dtype=torch.bool, device=own.device)
        with torch.enable_grad():
            nll = frozen(decoder, leaf, own, valid)
        parts.append(-torch.autograd.grad(nll, leaf)[0])
    decoder.train(training)
    return torch.cat(parts).view(z.shape)


def passes(
    z: Float[Tensor, "s n d"], tokens: Int[Tensor, "n length"], tokens_at_once: int = _TOKENS_PER_PASS
) -> Iterator[tuple[Float[Tensor, "m d"], Int[Tensor, "m length"]]]:
    """Cut all pairs of a draw and its sentence into passes of bounded size."""
    n, length = tokens.shape
    at_once = max(1, min(ROWS_PER_PASS, tokens_at_once // length))
    rows = torch.arange(z.shape[0] * n, device=tokens.device)
    for part, own in zip(z.flatten(0, 1).split(at_once), rows.split(at_once), strict=True):
        yield part, tokens[own % n]
