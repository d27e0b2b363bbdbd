r"""Semi-amortised inference (Kim et al. 2018): gradient steps on each posterior, and the gradient through them.

From the encoder's :math:`\lambda_0 = (\mu, \log\sigma^2)`, with :math:`L(\lambda) = \mathrm{rec} + \beta\,\mathrm{KL}`
of the whole batch and gradients clipped by a factor :math:`c_k`:

.. math::
    v_{k+1} = m v_k - \eta c_k \nabla L(\lambda_k), \qquad \lambda_{k+1} = \lambda_k + v_{k+1}

The backward pass needs products of second derivatives with vectors; as in the authors' release they are differences of
gradients, here with a step fitted to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.engine import distributed
from pretrain.engine.engines import Engine
from pretrain.engine.task import Report
from pretrain.latent.bounds import Normal
from pretrain.latent.config import LatentJob, ObjectiveSection
from pretrain.latent.critics import frozen
from pretrain.latent.inputs import Inputs
from pretrain.latent.posterior import Encoded

_RELATIVE_STEP = 1e-3


class _Visited(NamedTuple):
    """A point of the descent: ``[mean, log variance]`` side by side, its gradient, and the factor of the clipping."""

    at: Tensor
    gradient: Tensor
    clip: float


Loss = Callable[[Tensor], Tensor]
"""-ELBO summed over this rank's rows, of ``[mean, log variance]``."""


def _norm(x: Tensor, shared: bool = True) -> float:
    squares = x.double().square().sum()
    return float((distributed.all_reduce_sum(squares) if shared else squares).sqrt())


def descend(
    loss: Loss, start: Tensor, total: int, section: ObjectiveSection, *, shared: bool
) -> tuple[Tensor, list[_Visited]]:
    """``objective.svi_steps`` steps on the mean of ``loss`` over ``total`` rows; the end, and the way.

    ``shared``: the rows are spread over the ranks, which then clip by one norm.
    """
    at, velocity = start.detach(), torch.zeros_like(start)
    visited = []
    for _ in range(section.svi_steps):
        leaf = at.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf) / total, leaf)
        clip = min(1.0, section.svi_clip / (_norm(gradient, shared) + 1e-6))
        visited.append(_Visited(at.detach(), gradient, clip))
        velocity = section.svi_momentum * velocity - section.svi_lr * clip * gradient
        at = (at + velocity).detach()
    return at, visited


def frozen_loss(decoder: torch.nn.Module, inputs: Inputs, beta: float) -> Loss:
    """-ELBO as a function of the posterior alone."""

    def loss(posterior: Tensor) -> Tensor:
        z, kl = _draw(posterior, inputs)
        return frozen(decoder, z, inputs.written, inputs.counted, inputs.decoder_keep) + beta * kl

    return loss


def _draw(posterior: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    mean, log_variance = posterior.chunk(2, dim=-1)
    kl = (Normal(mean, log_variance=log_variance).kl() * inputs.counted).sum()
    return mean + (0.5 * log_variance).exp() * inputs.eps, kl


def refined_density(
    decoder: torch.nn.Module, encoded: Encoded, inputs: Inputs, beta: float, section: ObjectiveSection
) -> Normal:
    """The posteriors after the descent, for evaluation."""
    assert encoded.density is not None
    assert encoded.density.log_variance is not None
    start = torch.cat([encoded.density.mean, encoded.density.log_variance], dim=-1)
    training = decoder.training
    decoder.train()  # cuDNN differentiates an LSTM in training mode only; dropout comes with `inputs`, which have none
    with torch.enable_grad():
        end, _ = descend(frozen_loss(decoder, inputs, beta), start, len(start), section, shared=False)
    decoder.train(training)
    mean, log_variance = end.chunk(2, dim=-1)
    return Normal(mean, log_variance=log_variance)


def refine(
    job: LatentJob, decoder: Engine, encoded: Encoded, inputs: Inputs, share: float, beta: float
) -> tuple[Tensor, Tensor, Report]:
    """Descend, update the decoder at the end, and give back what the encoder is to minimise.

    Returns:
        The reconstruction loss, a term whose gradient is that of the whole loss through the descent, and the KL.
    """
    section = job.objective
    assert encoded.density is not None
    assert encoded.density.log_variance is not None
    start = torch.cat([encoded.density.mean, encoded.density.log_variance], dim=-1)
    total = round(distributed.world_size() / share)
    end, visited = descend(frozen_loss(decoder.module, inputs, beta), start, total, section, shared=True)

    def through_engine(at: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Backward pass of ``scale`` times -ELBO into the decoder; also the gradient at ``at``."""
        leaf = at.detach().requires_grad_()
        z, kl = _draw(leaf, inputs)
        rec = decoder(z, inputs.written, inputs.counted, inputs.decoder_keep)
        decoder.backward((rec + beta * kl) * scale)
        assert leaf.grad is not None
        return rec.detach(), kl.detach(), leaf.grad

    rec, kl, adjoint = through_engine(end, share)
    velocity = torch.zeros_like(adjoint)
    for at, gradient, clip in reversed(visited):
        velocity = velocity + adjoint
        direction = -section.svi_lr * clip * velocity
        step = _RELATIVE_STEP * (1 + _norm(at)) / max(_norm(direction), 1e-12)
        _, _, ahead = through_engine(at + step * direction, 1 / (step * total))
        through_engine(at, -1 / (step * total))
        adjoint = adjoint + ahead - gradient / step
        velocity = section.svi_momentum * velocity
    decoder.step()
    report: Report = {"kl_refined": kl * share, "loss/reg": beta * kl * share}
    return rec * share, (start * adjoint).sum(), report
