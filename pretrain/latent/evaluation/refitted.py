r"""A proposal that is refitted to the decoder, sentence by sentence: stochastic variational inference.

The encoder's Gaussian may be far from the decoder's posterior :math:`p(z|x)`, and then every bound that it proposes for
is loose. Here the ELBO of a frozen decoder is ascended over the mean and the log variances of a diagonal Gaussian of
each sentence. The result is a proposal like any other: the bound is valid wherever the ascent ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pretrain.latent.data.batches import Batch
from pretrain.latent.evaluation.model import log_likelihood_gradients, log_likelihoods
from pretrain.latent.models.build import TextModel
from pretrain.latent.models.normal import Normal

STEPS = 30
"""The steps of the ascent by default."""

_LEARNING_RATE = 0.1
_BETAS = (0.9, 0.99)
_START_DRAWS = 8
"""The draws that choose the start of each sentence."""


def diagonal(normal: Normal) -> Normal:
    """The Gaussians with the same means and the same variances of each dimension, without correlations."""
    if normal.log_variance is not None:
        return normal
    assert normal.factor is not None
    log_variance = normal.factor.square().sum(1).clamp_min(1e-12).log()
    return Normal(normal.mean, log_variance=log_variance.expand_as(normal.mean))


@torch.no_grad()
def negative_elbo(
    model: TextModel, batch: Batch, density: Normal, draws: int, generator: torch.Generator
) -> Float[Tensor, " n"]:
    r"""Estimate :math:`-E_q \log p(x|z) + \mathrm{KL}(q \| p)` of each sentence with ``draws`` draws."""
    z = density.sample(draws, generator)
    return density.kl() - log_likelihoods(model.decoder, z, batch.tokens).mean(0)


def best_start(model: TextModel, batch: Batch, starts: Sequence[Normal], generator: torch.Generator) -> Normal:
    """Choose for each sentence the diagonal Gaussian of the highest ELBO, by draws that are used for nothing else."""
    starts = [diagonal(start) for start in starts]
    losses = torch.stack([negative_elbo(model, batch, start, _START_DRAWS, generator) for start in starts])
    losses = losses.where(losses.isfinite(), losses.new_tensor(math.inf))
    chosen, rows = losses.argmin(0), torch.arange(batch.total, device=losses.device)
    means, log_variances = (
        torch.stack([getattr(start, name) for start in starts])[chosen, rows] for name in ("mean", "log_variance")
    )
    return Normal(means, log_variance=log_variances)


def refitted_proposal(
    model: TextModel, batch: Batch, starts: Sequence[Normal], generator: torch.Generator, *, steps: int = STEPS
) -> Normal:
    r"""Ascend the ELBO of each sentence from the best of ``starts``, with Adam and a rate that falls to 0.

    With :math:`z = \mu + \sigma \epsilon`, a fresh :math:`\epsilon` in every step and :math:`g = \nabla_z \log p(x|z)`

    .. math::
        \nabla_\mu = \mu - g, \qquad \nabla_{\log \sigma^2} = \tfrac12 (\sigma^2 - 1 - g\, \sigma \epsilon)

    are the gradients of -ELBO. The sentences of a batch are moved together, each by its own gradient alone: Adam works
    elementwise, and nothing is averaged or clipped over the batch.

    Args:
        model: the model, whose parameters are not changed.
        batch: the sentences.
        starts: where the ascent may begin, such as the encoder's Gaussian and the prior.
        generator: the source of the draws, on the CPU.
        steps: the number of steps.
    """
    start = best_start(model, batch, starts, generator)
    assert start.log_variance is not None
    mean, log_variance = start.mean.detach().clone(), start.log_variance.detach().clone()
    optimizer = torch.optim.Adam([mean, log_variance], betas=_BETAS)
    for step in range(steps):
        eps = torch.randn(mean.shape, generator=generator).to(mean)
        deviation = (0.5 * log_variance).exp()
        gradient = log_likelihood_gradients(model.decoder, (mean + deviation * eps)[None], batch.tokens)[0]
        mean.grad = mean - gradient
        log_variance.grad = 0.5 * (deviation.square() - 1 - gradient * deviation * eps)
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.step()
    return Normal(mean, log_variance=log_variance)
