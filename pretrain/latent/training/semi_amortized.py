r"""Semi-amortised inference (Kim et al. 2018): gradient steps on each posterior, and the gradient through them.

Let :math:`\lambda_0 = (\mu, \log\sigma^2)` be what the encoder says, :math:`L_k(\lambda) = \mathrm{rec} + \beta\,
\mathrm{KL}` of the whole batch at step k's draws :math:`\mu + \sigma \epsilon_k`, and :math:`c_k` the factors (of the
means, of the log variances) that cut its gradient to a norm. Then

.. math::
    v_{k+1} = m v_k - \eta c_k \nabla L_k(\lambda_k), \qquad \lambda_{k+1} = \lambda_k + v_{k+1}

The backward pass needs products of second derivatives with vectors; as in the authors' release they are differences of
gradients, here with a step fitted to float32, and what is handed back from one step to the one before is cut to the
same norm: where the descent overshoots, it would grow by a factor a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.engine import distributed
from pretrain.engine.engines.base import Engine
from pretrain.latent.config import LatentJob, ObjectiveSection
from pretrain.latent.data.inputs import Inputs
from pretrain.latent.data.noise import StepNoise
from pretrain.latent.evaluation.bounds import Normal
from pretrain.latent.models.critics import frozen
from pretrain.latent.models.posterior import Encoded

_RELATIVE_STEP = 1e-3


class _Visited(NamedTuple):
    """A point of the descent: ``[mean, log variance]`` side by side; its noise, gradient, factors of clipping."""

    at: Tensor
    eps: Tensor
    gradient: Tensor
    clip: Tensor


Loss = Callable[[Tensor, Tensor], Tensor]
"""-ELBO summed over this rank's rows, of ``[mean, log variance]`` and the noise of the draw."""


def _norms(x: Tensor, parts: int = 1, shared: bool = True) -> Tensor:
    """Of each of ``parts`` blocks of columns, over all rows."""
    squares = x.double().square().view(len(x), parts, -1).sum((0, 2))
    return (distributed.all_reduce_sum(squares) if shared else squares).sqrt()


def _clip(x: Tensor, limit: float, parts: int = 1, shared: bool = True) -> Tensor:
    """A factor for each column, at most 1, that cuts each block's norm to ``limit``."""
    factors = (limit / (_norms(x, parts, shared) + 1e-6)).clamp(max=1.0).to(x.dtype)
    return factors.repeat_interleave(x.shape[1] // parts)


def descend(
    loss: Loss, start: Tensor, total: int, noise: StepNoise, section: ObjectiveSection, *, shared: bool
) -> tuple[Tensor, list[_Visited]]:
    """``objective.svi_steps`` steps on the mean of ``loss`` over ``total`` rows; the end, and the way.

    Every step has fresh ``noise``: with the same one all along, the descent would fit that draw and no other.

    ``shared``: the rows are spread over the ranks, which then clip by one norm.
    """
    at, velocity = start.detach(), torch.zeros_like(start)
    visited = []
    for _ in range(section.svi_steps):
        leaf, eps = at.requires_grad_(), noise.normal(1, start.shape[1] // 2)
        (gradient,) = torch.autograd.grad(loss(leaf, eps) / total, leaf)
        clip = _clip(gradient, section.svi_clip, 2, shared)
        visited.append(_Visited(at.detach(), eps, gradient, clip))
        velocity = section.svi_momentum * velocity - section.svi_lr * clip * gradient
        at = (at + velocity).detach()
    return at, visited


def frozen_loss(decoder: torch.nn.Module, inputs: Inputs, beta: float) -> Loss:
    """-ELBO as a function of the posterior alone."""

    def loss(posterior: Tensor, eps: Tensor) -> Tensor:
        z, kl = _draw(posterior, eps, inputs)
        return frozen(decoder, z, inputs.written, inputs.counted, inputs.decoder_keep) + beta * kl

    return loss


def _draw(posterior: Tensor, eps: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    mean, log_variance = posterior.chunk(2, dim=-1)
    kl = (Normal(mean, log_variance=log_variance).kl() * inputs.counted).sum()
    return mean + (0.5 * log_variance).exp() * eps, kl


def refined_density(
    decoder: torch.nn.Module, encoded: Encoded, inputs: Inputs, noise: StepNoise, beta: float, section: ObjectiveSection
) -> Normal:
    """The posteriors after the descent, for evaluation."""
    assert encoded.density is not None
    assert encoded.density.log_variance is not None
    start = torch.cat([encoded.density.mean, encoded.density.log_variance], dim=-1)
    training = decoder.training
    decoder.train()  # cuDNN differentiates an LSTM in training mode only; dropout comes with `inputs`, which have none
    with torch.enable_grad():
        end, _ = descend(frozen_loss(decoder, inputs, beta), start, len(start), noise, section, shared=False)
    decoder.train(training)
    mean, log_variance = end.chunk(2, dim=-1)
    return Normal(mean, log_variance=log_variance)


def refine(
    job: LatentJob, decoder: Engine, encoded: Encoded, inputs: Inputs, noise: StepNoise, share: float, beta: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Descend, update the decoder at the end, and give back what the encoder is to minimise.

    Returns:
        The reconstruction loss, a term whose gradient is that of the whole loss through the descent, and the KL.
    """
    section = job.objective
    assert encoded.density is not None
    assert encoded.density.log_variance is not None
    start = torch.cat([encoded.density.mean, encoded.density.log_variance], dim=-1)
    total = round(distributed.world_size() / share)
    end, visited = descend(frozen_loss(decoder.module, inputs, beta), start, total, noise, section, shared=True)

    def through_engine(at: Tensor, eps: Tensor, scale: float, last: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Backward pass of ``scale`` times -ELBO into the decoder; also the gradient at ``at``."""
        leaf = at.detach().requires_grad_()
        z, kl = _draw(leaf, eps, inputs)
        rec = decoder(z, inputs.written, inputs.counted, inputs.decoder_keep)
        decoder.backward((rec + beta * kl) * scale, last=last)
        assert leaf.grad is not None
        return rec.detach(), kl.detach(), leaf.grad

    rec, kl, adjoint = through_engine(end, inputs.eps, share, last=not visited)
    velocity = torch.zeros_like(adjoint)
    for left, (at, eps, gradient, clip) in zip(range(len(visited))[::-1], reversed(visited), strict=True):
        velocity = velocity + adjoint
        direction = -section.svi_lr * clip * velocity
        step = _RELATIVE_STEP * (1 + float(_norms(at))) / max(float(_norms(direction)), 1e-12)
        _, _, ahead = through_engine(at + step * direction, eps, 1 / (step * total))
        through_engine(at, eps, -1 / (step * total), last=not left)
        adjoint = adjoint + ahead - gradient / step
        adjoint = adjoint * _clip(adjoint, section.svi_clip)
        velocity = section.svi_momentum * velocity
    decoder.step()
    return rec * share, (start * adjoint).sum(), {"kl_refined": kl * share, "loss/reg": beta * kl * share}
