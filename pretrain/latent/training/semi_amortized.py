r"""Semi-amortised inference (SaVAE; Kim et al. 2018): gradient steps on each posterior, and the gradient through them.

Let :math:`\lambda_0 = (\mu, \log\sigma^2)` be the encoder's output, :math:`L_k(\lambda) = \mathrm{rec} + \beta\,
\mathrm{KL}` the loss of the whole batch at step k's draws :math:`\mu + \sigma \epsilon_k`, and :math:`c_k` the factors
(one for the means, one for the log variances) that clip its gradient to a norm. Then

.. math::
    v_{k+1} = m v_k - \eta c_k \nabla L_k(\lambda_k), \qquad \lambda_{k+1} = \lambda_k + v_{k+1}

The backward pass needs products of second derivatives with vectors. As in the authors' release they are differences of
gradients, here with a step that suits float32. The gradient that goes back from one step to the one before is clipped
to the same norm: otherwise, where the descent overshoots, it would grow by a factor in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.latent.config import LatentJob, ObjectiveSection
from capt.pretrain.latent.data.sampled_batch import SampledBatch, StepNoise
from capt.pretrain.latent.models.posterior import EncoderOutput, Normal, frozen, with_gradient

_RELATIVE_STEP = 1e-3

Parameters = Float[Tensor, "n two_d"]
"""Means and log variances of the posteriors, side by side."""


class _Visited(NamedTuple):
    """One step of the descent: where it began, its noise, its gradient and the factors that clip the gradient."""

    at: Parameters
    eps: Tensor
    gradient: Parameters
    clip: Tensor


NegativeElbo = Callable[[Tensor, Tensor], Tensor]
"""-ELBO summed over this rank's rows, as a function of the posteriors' parameters and the noise of the draw."""


def _norms(x: Tensor, parts: int = 1, shared: bool = True) -> Float[Tensor, " parts"]:
    """The norm of each of ``parts`` blocks of columns, over all rows."""
    squares = x.double().square().view(len(x), parts, -1).sum((0, 2))
    return (distributed.all_reduce_sum(squares) if shared else squares).sqrt()


def _clip(x: Tensor, limit: float, parts: int = 1, shared: bool = True) -> Tensor:
    """One factor per column, at most 1, that clips the norm of each block to ``limit``."""
    factors = (limit / (_norms(x, parts, shared) + 1e-6)).clamp(max=1.0).to(x.dtype)
    return factors.repeat_interleave(x.shape[1] // parts)


def _descend(
    loss: NegativeElbo, start: Parameters, total: int, noise: StepNoise, section: ObjectiveSection, *, shared: bool
) -> tuple[Parameters, list[_Visited]]:
    """Take ``objective.svi_steps`` steps on the mean of ``loss`` over ``total`` rows; returns the end and the steps.

    Every step has fresh ``noise``, since with the same noise the descent would fit that one draw. With ``shared`` the
    rows are spread over the ranks, which clip by one norm.
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


def _parameters(encoded: EncoderOutput) -> Parameters:
    assert encoded.density is not None
    assert encoded.density.log_variance is not None
    return torch.cat([encoded.density.mean, encoded.density.log_variance], dim=-1)


def _draw(posterior: Parameters, eps: Tensor, batch: SampledBatch) -> tuple[Float[Tensor, "n d"], Float[Tensor, ""]]:
    """One draw of each posterior, and the sum of the valid rows' KL."""
    mean, log_variance = posterior.chunk(2, dim=-1)
    kl = (Normal(mean, log_variance=log_variance).kl() * batch.valid).sum()
    return mean + (0.5 * log_variance).exp() * eps, kl


def _negative_elbo(decoder: nn.Module, batch: SampledBatch, beta: float) -> NegativeElbo:
    def loss(posterior: Tensor, eps: Tensor) -> Tensor:
        z, kl = _draw(posterior, eps, batch)
        return frozen(decoder, z, batch.decoder_tokens, batch.valid, batch.decoder_dropout) + beta * kl

    return loss


def refined_density(
    decoder: nn.Module, encoded: EncoderOutput, batch: SampledBatch, beta: float, section: ObjectiveSection
) -> Normal:
    """The posteriors after the descent, for evaluation."""
    start = _parameters(encoded)
    training = decoder.training
    decoder.train()  # cuDNN differentiates an LSTM in training mode only; the batch brings its own dropout, here none
    with torch.enable_grad():
        loss = _negative_elbo(decoder, batch, beta)
        end, _ = _descend(loss, start, len(start), batch.noise, section, shared=False)
    decoder.train(training)
    mean, log_variance = end.chunk(2, dim=-1)
    return Normal(mean, log_variance=log_variance)


def train_decoder_at_refined_posteriors(
    job: LatentJob, decoder: Engine, encoded: EncoderOutput, batch: SampledBatch, beta: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Descend on each posterior, and update the decoder at the end.

    Returns:
        The reconstruction loss, whose gradient by the encoder's output is that of the whole loss through the descent;
        and the KL of the refined posteriors, without a gradient.
    """
    section, total = job.objective, batch.total
    start = _parameters(encoded)
    loss = _negative_elbo(decoder.module, batch, beta)
    end, visited = _descend(loss, start, total, batch.noise, section, shared=True)

    def backward(at: Tensor, eps: Tensor, scale: float, last: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Pass ``scale`` times -ELBO back into the decoder; returns rec, KL and the gradient at ``at``."""
        leaf = at.detach().requires_grad_()
        z, kl = _draw(leaf, eps, batch)
        rec = decoder(z, batch.decoder_tokens, batch.valid, batch.decoder_dropout)
        decoder.backward((rec + beta * kl) * scale, last=last)
        assert leaf.grad is not None
        return rec.detach(), kl.detach(), leaf.grad

    # Reverse-mode through the descent, step by step backwards: the momentum has an adjoint of its own (velocity).
    rec, kl, adjoint = backward(end, batch.eps, batch.loss_scale, last=not visited)
    velocity = torch.zeros_like(adjoint)
    for left, (at, eps, gradient, clip) in zip(range(len(visited))[::-1], reversed(visited), strict=True):
        velocity = velocity + adjoint
        direction = -section.svi_lr * clip * velocity
        # A Hessian-vector product is the difference of two gradients along the direction, over its length.
        step = _RELATIVE_STEP * (1 + float(_norms(at))) / max(float(_norms(direction)), 1e-12)
        _, _, ahead = backward(at + step * direction, eps, 1 / (step * total))
        backward(at, eps, -1 / (step * total), last=not left)
        adjoint = adjoint + ahead - gradient / step
        adjoint = adjoint * _clip(adjoint, section.svi_clip)
        velocity = section.svi_momentum * velocity
    decoder.step()
    return with_gradient(rec * batch.loss_scale, start, adjoint), kl * batch.loss_scale
