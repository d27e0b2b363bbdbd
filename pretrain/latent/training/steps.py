"""One training step: critics, then decoder, then encoder, each an engine of its own.

The graph is cut at z: the decoder's backward pass leaves the gradient of the reconstruction loss by z, which the
encoder's backward pass continues. So each engine averages its own gradients over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import RunFailedError
from capt.pretrain.contrast import ShardedQueue
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import StepMetrics
from capt.pretrain.latent.config import LatentJob, ObjectiveSection
from capt.pretrain.latent.data.sampled_batch import SampledBatch
from capt.pretrain.latent.models.posterior import Critics, CriticValues, EncoderOutput, frozen, with_gradient
from capt.pretrain.latent.objectives.losses import Forward, clamped, critics_loss, objective_of
from capt.pretrain.latent.training.semi_amortized import train_decoder_at_refined_posteriors

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
    return min(section.beta_end, section.beta_start + step / (section.anneal_epochs * steps_per_epoch))


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
        rec = frozen(decoder, encoded.z, batch.decoder_tokens, batch.valid, batch.decoder_dropout)
        loss = rec + beta * (encoded.density.kl() * batch.valid).sum()
        encoder.backward(loss * batch.loss_scale)
        encoder.step()
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
    """The critics have run away: nothing that is made of their values means anything. Raised on all ranks alike."""

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
    loss = objective_of(job)(Forward(job, batch, encoded, rec, kl, trained, beta, queue))
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
    difference = values.f_q.detach() - values.f_p.detach().clamp(max=job.critic.clamp).exp()
    return {
        "kl_dual": 1 + (difference * batch.valid).sum() * batch.loss_scale / batch.views,
        "critic/loss": loss.detach(),
        "critic/clamped": float(all_clamped),
        "critic/grad_norm": norm,
    }


def over_ranks(number: Tensor) -> int:
    """The sum of the ranks' numbers, for the host to read."""
    return int(distributed.all_reduce_sum(number))
