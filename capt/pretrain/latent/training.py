"""A training step: critics, then decoder, then encoder, each an engine of its own.

The graph is cut at z: the decoder's backward pass leaves the gradient of the reconstruction loss by z, which the
encoder's backward pass continues. So each engine averages its own gradients over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import RunFailedError
from capt.pretrain.base.traits import traits
from capt.pretrain.contrast import ShardedQueue
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import StepMetrics
from capt.pretrain.latent.batches import SampledBatch, StepNoise
from capt.pretrain.latent.config import LatentJob, ObjectiveSection
from capt.pretrain.latent.objectives import LatentForward, clamped, critics_loss, objective_of
from capt.pretrain.latent.posterior import Critics, CriticValues, EncoderOutput, Normal, frozen, with_gradient

_RELATIVE_STEP = 1e-3
BETA_START = 0.1
"""Beta at the start of training, or of a cycle, as released."""
SVI_MOMENTUM = 0.5
"""Momentum of the gradient steps on each posterior (SaVAE, Kim et al. 2018, as released)."""

Parameters = Float[Tensor, "n two_d"]
"""Means and log variances of the posteriors, side by side."""


class _Visited(NamedTuple):
    """A step of the descent: where it began, its noise, its gradient and the factors that clip the gradient."""

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
    """Return a factor per column, at most 1, that clips the norm of each block to ``limit``."""
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
        velocity = SVI_MOMENTUM * velocity - section.svi_lr * clip * gradient
        at = (at + velocity).detach()
    return at, visited


def _parameters(encoded: EncoderOutput) -> Parameters:
    assert encoded.density is not None
    assert encoded.density.log_variance is not None
    return torch.cat([encoded.density.mean, encoded.density.log_variance], dim=-1)


def _draw(posterior: Parameters, eps: Tensor, batch: SampledBatch) -> tuple[Float[Tensor, "n d"], Float[Tensor, ""]]:
    """Draw once from each posterior; return the draws, and the sum of the valid rows' KL."""
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
        # What both passes leave in the decoder's gradients is the mixed second derivative along the direction.
        _, _, ahead = backward(at + step * direction, eps, 1 / (step * total))
        backward(at, eps, -1 / (step * total), last=not left)
        # ``gradient`` was kept from the descent; ``ahead`` has the step in its scale already.
        adjoint = adjoint + ahead - gradient / step
        adjoint = adjoint * _clip(adjoint, section.svi_clip)
        velocity = SVI_MOMENTUM * velocity
    decoder.step()
    return with_gradient(rec * batch.loss_scale, start, adjoint), kl * batch.loss_scale


# Semi-amortised inference (SaVAE; Kim et al. 2018): gradient steps on each posterior, and the gradient through them.
#
# Let :math:`\lambda_0 = (\mu, \log\sigma^2)` be the encoder's output, :math:`L_k(\lambda) = \mathrm{rec} + \beta\,
# \mathrm{KL}` the loss of the whole batch at step k's draws :math:`\mu + \sigma \epsilon_k`, and :math:`c_k` the
# factors (one for the means, one for the log variances) that clip its gradient to a norm. Then
#
# .. math::
#     v_{k+1} = m v_k - \eta c_k \nabla L_k(\lambda_k), \qquad \lambda_{k+1} = \lambda_k + v_{k+1}
#
# The backward pass needs products of second derivatives with vectors. As in the authors' release they are differences
# of gradients, here with a step that suits float32. The gradient that goes back from one step to the one before is
# clipped to the same norm: otherwise, where the descent overshoots, it would grow by a factor in every step.


# The weight of the regulariser over training.


def beta_at(step: int, steps_per_epoch: int, section: ObjectiveSection) -> float:
    r"""The weight beta in update ``step`` (0-based).

    ``anneal``: :math:`\min(\beta_1, \beta_0 + t / (a n))` with ``a`` epochs of ``n`` steps; as released, beta goes from
    0.1 to 1 within 9 epochs of 10. ``cyclical`` (Fu et al. 2019): the same, where :math:`t` begins again in each cycle.
    """
    if section.beta == "constant":
        return section.beta_end
    if section.beta == "cyclical":
        step %= max(1, round(section.cycle_epochs * steps_per_epoch))
    return min(section.beta_end, BETA_START + step / (section.anneal_epochs * steps_per_epoch))


# LagVAE (He et al. 2019): before each step the encoder alone is trained until it has caught up with the decoder.


_CHECK_EVERY = 15


def train_encoder_aggressively(
    job: LatentJob, engines: Mapping[str, Engine], random_batch: Callable[[int], SampledBatch], beta: float
) -> int:
    """Update the encoder on random batches, at most ``objective.aggressive_updates`` times; returns how often.

    Every 15 updates the mean loss per word is compared with that of the 15 updates before; once it has risen, the
    encoder has caught up. ``random_batch(i)`` is the batch of the i-th update.
    """
    encoder, decoder = engines["encoder"], engines["decoder"].module
    previous_mean, losses, words = math.inf, 0.0, 0
    for number in range(1, job.objective.aggressive_updates + 1):
        batch = random_batch(number - 1)
        encoded: EncoderOutput = encoder(batch.encoder_tokens, batch.eps, batch.encoder_dropout)
        assert encoded.density is not None
        # The frozen decoder passes the gradient on to z and gathers none itself.
        rec = frozen(decoder, encoded.z, batch.decoder_tokens, batch.valid, batch.decoder_dropout)
        loss = rec + beta * (encoded.density.kl() * batch.valid).sum()
        encoder.backward(loss * batch.loss_scale)
        encoder.step()
        # Over all ranks, which must stop after the same update.
        losses += float(distributed.all_reduce_sum(loss))
        words += batch.scored * batch.views
        if number % _CHECK_EVERY == 0:
            mean = losses / words
            if mean > previous_mean:
                return number
            previous_mean, losses, words = mean, 0.0, 0
    return job.objective.aggressive_updates


MOST_CLAMPED = 0.1
"""The share of a step's values at draws of the prior that may be above ``critic.clamp``.

The optimum :math:`f = \\log q/p` has :math:`E_p e^f = 1`: at draws of the prior less than one value in
:math:`e^{20}` is above 20. Values that are cut have no gradient, so a critic does not come back from there.
"""


class CriticDivergedError(RunFailedError):
    """The critics have diverged, so that nothing computed from their values means anything. Raised on all ranks."""

    def __init__(self, what: str, lr: float) -> None:
        super().__init__(
            f"the critics have diverged: {what}; their learning rate critic.lr={lr:g} is too high (the recipe has "
            "1e-5): start again with a lower one, or resume from an earlier checkpoint with a lower critic.lr"
        )


def train_step(
    job: LatentJob, engines: Mapping[str, Engine], batch: SampledBatch, beta: float, queue: ShardedQueue | None = None,
    *, encoder_is_trained: bool = True,
) -> StepMetrics:  # fmt: skip
    """Update every module on a batch, the critics ``critic.updates`` times; returns the step's metrics.

    Args:
        job: the job.
        engines: ``decoder``, ``encoder`` unless the job is a language model, ``critics`` for an implicit posterior.
        batch: this rank's rows and their random numbers.
        beta: weight of the regulariser.
        queue: negatives of earlier batches.
        encoder_is_trained: False leaves the encoder as it is (LagVAE, whose encoder was trained before the step).

    Raises:
        CriticDivergedError: the critics' gradient is no longer a number, or too many of their values are clamped.
    """
    decoder, encoder, critics = (engines.get(name) for name in ("decoder", "encoder", "critics"))
    assert decoder is not None
    encoded = _no_encoder(job, batch)
    if encoder is not None:
        encoded = encoder(batch.encoder_tokens, batch.eps, batch.encoder_dropout)
    # The critics first: they are trained on z without a graph, and judge it below.
    report: StepMetrics = {}
    if critics is not None:
        report |= train_critics(job, critics, encoded, batch)
    kl = None
    if encoded.density is not None:
        kl = (encoded.density.kl() * batch.valid).sum() * batch.loss_scale
        report["kl"] = kl.detach() / batch.views
    if job.objective.svi_steps:
        rec, kl = train_decoder_at_refined_posteriors(job, decoder, encoded, batch, beta)
        report["kl_refined"] = kl
    else:
        rec = train_decoder(decoder, encoded.z, batch)
    # The encoder last: the decoder has left the gradient of its loss with respect to z.
    trained = critics.module if critics is not None else None
    assert trained is None or isinstance(trained, Critics)
    loss = objective_of(job)(LatentForward(job, batch, encoded, rec, kl, trained, beta, queue))
    norms = [decoder.gradient_norm()]
    if encoder is not None and encoder_is_trained:
        encoder.backward(loss.total())
        encoder.step()
        norms.append(encoder.gradient_norm())
    if encoder is not None and job.objective.regularizer != "none":
        report["beta"] = beta
    return report | loss.metrics() | {"grad_norm": math.hypot(*map(float, norms))}


def _no_encoder(job: LatentJob, batch: SampledBatch) -> EncoderOutput:
    """z = 0: the decoder is a language model."""
    z = batch.eps.new_zeros(len(batch.decoder_tokens), job.model.latent)
    return EncoderOutput(z, z, None)


def train_decoder(decoder: Engine, z: Float[Tensor, "vn d"], batch: SampledBatch) -> Float[Tensor, ""]:
    """Update the decoder; returns its loss -log p(x | z), whose gradient reaches z but not the decoder."""
    leaf = z.detach().requires_grad_()
    rec = decoder(leaf, batch.decoder_tokens, batch.valid, batch.decoder_dropout) * batch.loss_scale
    decoder.backward(rec)
    decoder.step()
    assert leaf.grad is not None
    return with_gradient(rec, z, leaf.grad)


def train_critics(job: LatentJob, critics: Engine, encoded: EncoderOutput, batch: SampledBatch) -> StepMetrics:
    """Update f and g ``critic.updates`` times on the same draws of the posteriors and fresh draws of the prior.

    Raises:
        CriticDivergedError: their gradient is no longer a number, or more than :data:`MOST_CLAMPED` of their values at
            the prior's draws are above ``critic.clamp``.
    """
    assert batch.priors is not None
    z, h = encoded.z.detach(), encoded.h.detach()  # the critics alone learn here
    number_clamped = torch.zeros((), dtype=torch.int64, device=z.device)
    for prior in batch.priors:
        values: CriticValues = critics(z, h, prior)
        loss = critics_loss(values, batch, job.critic)
        critics.backward(loss)
        critics.step()
        number_clamped += clamped(values, batch, job.critic)
    norm = float(critics.gradient_norm())
    if not math.isfinite(norm):
        raise CriticDivergedError("their gradient is no longer a number", job.critic.lr)
    # Where the exponential at a draw of the prior is clamped it has no gradient: with many of them the dual is no bound
    all_clamped = over_ranks(number_clamped)
    share = all_clamped / (len(batch.priors) * batch.views * batch.total * (1 if values.g_p is None else 2))
    if share > MOST_CLAMPED:
        raise CriticDivergedError(
            f"{share:.0%} of their values at draws of the prior are above critic.clamp={job.critic.clamp:g}, where "
            "they no longer learn", job.critic.lr,
        )  # fmt: skip
    # Eq. 3 by the values before the last update; the 1 makes it 0 where f is 0.
    difference = values.f_q.detach() - values.f_p.detach().clamp(max=job.critic.clamp).exp()
    return {
        "kl_dual": 1 + (difference * batch.valid).sum() * batch.loss_scale / batch.views,
        "critic/loss": loss.detach(),
        "critic/clamped": float(all_clamped),
        "critic/grad_norm": norm,
    }


def over_ranks(number: Tensor) -> int:
    """Return the sum of the ranks' numbers, for the host to read; 0 where tensors have no values."""
    total = distributed.all_reduce_sum(number)
    return int(total) if traits().has_values else 0
