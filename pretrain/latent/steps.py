r"""One training step: critics, then decoder, then encoder, each an engine of its own.

The loss of a batch of N sentences in V views (all sums over all ranks):

.. math::
    \frac1N \sum_{v,i} \big[-\log p(x_i | z_{v,i}) + \beta R_{v,i}\big] + w\, L_{\mathrm{NCE}}

where R is the exact KL, the critic f(x, z) or the critic g(z) (the part of the Fenchel dual that depends on the
encoder). The graph is cut at z: the decoder's backward pass leaves :math:`\partial/\partial z`, which the encoder's
backward pass continues, so each engine averages its own gradients over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.contrast import ShardedQueue, info_nce
from pretrain.engine import distributed
from pretrain.engine.engines import Engine
from pretrain.engine.task import Report
from pretrain.latent.across import sum_over_ranks
from pretrain.latent.batches import Batch
from pretrain.latent.config import LatentJob
from pretrain.latent.critic_loss import CriticLoss, squared_difference, squared_slopes
from pretrain.latent.critics import Critics, Trained, rows_of
from pretrain.latent.inputs import Inputs, inputs_of
from pretrain.latent.noise import StepNoise
from pretrain.latent.posterior import Encoded
from pretrain.latent.semi_amortized import refine


class CriticDivergedError(RuntimeError):
    """The critics' gradient is no longer a number."""


def train_step(
    job: LatentJob, engines: Mapping[str, Engine], batch: Batch, noise: StepNoise, beta: float,
    queue: ShardedQueue | None = None, *, decoder_alone: bool = False,
) -> Report:  # fmt: skip
    """One update of every module on a batch (``critic.updates`` of the critics); the figures of the step.

    With ``decoder_alone`` the encoder stays as it is (LagVAE, whose encoder has had its updates before).
    """
    inputs = inputs_of(job, batch, noise)
    share = distributed.world_size() / batch.total  # the engine averages over ranks; this makes a mean over the batch
    if job.model.posterior == "none":
        return _language_model_step(engines["decoder"], job, inputs, share)
    encoder = engines["encoder"]
    encoded: Encoded = encoder(inputs.read, inputs.eps, inputs.encoder_keep)
    report: Report = {} if job.objective.regularizer == "none" else {"beta": beta}
    if job.has_critics:
        report |= _train_critics(job, engines["critics"], encoded, inputs.counted, batch, noise)
    at = encoded.z.detach().requires_grad_()
    refined: dict[str, Tensor] = {}
    if job.objective.svi_steps:
        rec, through, refined = refine(job, engines["decoder"], encoded, inputs, noise, share, beta)
    else:
        rec = engines["decoder"](at, inputs.written, inputs.counted, inputs.decoder_keep) * share
        engines["decoder"].backward(rec)
        engines["decoder"].step()
        assert at.grad is not None
        through = (encoded.z * at.grad).sum()
    extra, parts = encoder_terms(job, engines, encoded, inputs, batch, noise, share, beta, queue)
    if not decoder_alone:
        encoder.backward(through + extra)
        encoder.step()
    parts |= refined | {"loss/rec": rec.detach()}
    loss = parts["loss/rec"] + parts.get("loss/reg", 0.0) + job.contrast.weight * parts.get("loss/contrast", 0.0)
    report |= parts | {"loss": loss}
    norms = [engines["decoder"].gradient_norm()] + ([] if decoder_alone else [encoder.gradient_norm()])
    report["grad_norm"] = math.hypot(*norms)
    return report


def _language_model_step(decoder: Engine, job: LatentJob, inputs: Inputs, share: float) -> Report:
    z = inputs.eps.new_zeros(len(inputs.written), job.model.latent)
    rec = decoder(z, inputs.written, inputs.counted, inputs.decoder_keep) * share
    decoder.backward(rec)
    decoder.step()
    return {"loss": rec.detach(), "loss/rec": rec.detach(), "grad_norm": decoder.gradient_norm()}


def _train_critics(
    job: LatentJob, critics: Engine, encoded: Encoded, counted: Tensor, batch: Batch, noise: StepNoise
) -> Report:
    """``critic.updates`` updates of f and g on the same posterior draws and fresh prior draws."""
    section, views = job.critic, job.objective.views
    z, h = encoded.z.detach(), encoded.h.detach()
    critics.set_learning_rate(section.lr)
    rows = (views, batch.counted, batch.total)
    of_f = CriticLoss(section, *rows)
    of_g = CriticLoss(section, *rows, section.squared) if section.trained == "both" else None
    f: list[Tensor] = []
    g: list[Tensor] = []
    for read in rows_of(z, h, noise.normal(section.updates * views, z.shape[1])):
        trained: Trained = critics(read, of_f, of_g)
        critics.take_gradients(trained.gradients)
        critics.step()
        f.append(trained.f)
        if trained.g is not None:
            g.append(trained.g)
    if not math.isfinite(critics.gradient_norm()):
        raise CriticDivergedError(
            "the critics' gradient is no longer a number: exp(f) has run away; resume from the last checkpoint with a "
            "lower critic.lr or critic.clamp"
        )
    losses = [(of_f, f)] if of_g is None else [(of_f, f), (of_g, g)]

    def dual() -> Tensor:
        f_q, f_p = f[-1].view(2, -1)
        of_rows: Tensor = (f_q - f_p.clamp(max=section.clamp).exp()) * counted
        return 1 + of_rows.sum() * distributed.world_size() / (views * batch.total)

    return {
        "kl_dual": dual,
        "critic/loss": lambda: sum(loss.value(values[-1]) for loss, values in losses),
        # a mean over the ranks is taken of every figure
        "critic/clamped": sum(loss.clamped(values) for loss, values in losses) * distributed.world_size(),
        "critic/grad_norm": critics.gradient_norm(),
    }


def encoder_terms(
    job: LatentJob, engines: Mapping[str, Engine], encoded: Encoded, inputs: Inputs, batch: Batch, noise: StepNoise,
    share: float, beta: float, queue: ShardedQueue | None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """What the encoder minimises beside the reconstruction: the regulariser with its weight, and InfoNCE."""
    extra = encoded.z.new_zeros(())
    report: dict[str, Tensor] = {}
    if encoded.density is not None:
        kl = (encoded.density.kl() * inputs.counted).sum() * share
        report["kl"] = kl.detach() / job.objective.views
        if job.objective.regularizer == "exact" and not job.objective.svi_steps:
            extra = beta * kl
            report["loss/reg"] = extra.detach()
    if job.objective.regularizer in ("f", "g"):
        report["loss/reg"], of_z = _critic_term(job, engines["critics"].module, encoded, inputs, batch, share, beta)
        extra = (encoded.z * of_z).sum()
    if job.contrast.weight > 0:
        contrast = contrast_loss(job, encoded, batch, noise, queue)
        report["loss/contrast"] = contrast.detach()
        extra = extra + job.contrast.weight * contrast
    return extra, report


def _critic_term(
    job: LatentJob, critics: nn.Module, encoded: Encoded, inputs: Inputs, batch: Batch, share: float, beta: float
) -> tuple[Tensor, Tensor]:
    """Beta times the critic at the posterior's draws, with its L_SQ, and the gradient of that by z."""
    assert isinstance(critics, Critics)
    if job.objective.regularizer == "f":
        critic, seen = critics.f, torch.cat([encoded.z, encoded.h], dim=1).detach()
    else:
        assert critics.g is not None
        critic, seen = critics.g, encoded.z.detach()
    weights = (inputs.counted * (beta * share))[:, None]

    def slopes(values: Tensor) -> Tensor:
        return weights + beta * squared_slopes(values, batch.counted) if job.critic.squared_in_encoder else weights

    of_seen, values = critic.pulled_back(slopes, seen)
    term = (values * weights).sum()
    if job.critic.squared_in_encoder:
        term = term + beta * squared_difference(values, batch.counted)
    return term, of_seen[:, : encoded.z.shape[1]].clone()


def contrast_loss(
    job: LatentJob, encoded: Encoded, batch: Batch, noise: StepNoise, queue: ShardedQueue | None
) -> Tensor:
    """InfoNCE (Eq. 10, minimised) between the two views' z or h, cosine similarity, negatives of all ranks."""
    section = job.contrast
    rank, world = distributed.rank(), distributed.world_size()
    views = (encoded.z if section.over == "z" else encoded.h).unflatten(0, (2, -1))[:, : batch.counted]
    pairs = batch.total
    if section.mean_pair:
        pairs += 1
        means = sum_over_ranks(views.sum(1)) / batch.total
        views = torch.cat([means[:, None][:, : int(rank == 0)], views], dim=1)
    ids = _identities(batch, views.shape[1]) if section.mask_duplicates else None
    negatives = None
    if section.prior_negatives:
        drawn = noise.shared(section.prior_negatives * pairs, views.shape[2], rank, world)
        negatives = F.normalize(drawn, dim=-1)
    anchors, positives = F.normalize(views, dim=-1).unbind()
    loss: Tensor = info_nce(
        anchors,
        positives,
        temperature=section.temperature,
        queue=queue,
        negatives=negatives,
        ids=ids,
        impl="chunked" if queue is not None else "dense",  # a batch's logits are few: one pass over them all
    )
    if queue is not None:
        queue.enqueue(positives.detach(), ids=ids)
    return loss


def _identities(batch: Batch, rows: int) -> Tensor:
    """A number for each pair, the same for equal sentences (a linear hash modulo 2^64); the mean pair is -1."""
    tokens = batch.tokens[: batch.counted]
    ids = (tokens * _hash_factors(tokens.shape[1]).to(tokens.device)).sum(1)
    return ids if rows == len(ids) else torch.cat([ids.new_full((rows - len(ids),), -1), ids])


@cache
def _hash_factors(length: int) -> Tensor:
    return torch.randint(1 << 62, (length,), generator=torch.Generator().manual_seed(length))
