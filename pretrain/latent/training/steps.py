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
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.contrast import ShardedQueue, info_nce
from pretrain.engine import distributed
from pretrain.engine.autograd_collectives import sum_over_ranks
from pretrain.engine.engines.base import Engine
from pretrain.engine.engines.compiled import Trainable
from pretrain.engine.task import StepMetrics
from pretrain.latent.config import LatentJob
from pretrain.latent.data.inputs import Inputs
from pretrain.latent.data.noise import StepNoise
from pretrain.latent.models.critics import Critics, Trained, rows_of
from pretrain.latent.models.posterior import Encoded
from pretrain.latent.objectives.critic import CriticLoss, squared_difference, squared_slopes
from pretrain.latent.training.semi_amortized import refine


class CriticDivergedError(RuntimeError):
    """The critics' gradient is no longer a number."""


class CriticUpdates(NamedTuple):
    """What the updates of f and g leave: the values of the last, how many of all were cut, the last gradient's norm."""

    f: Tensor
    g: Tensor | None
    clamped: Tensor
    norm: Tensor | float


class Updates(NamedTuple):
    """What a step's updates leave: ``parts`` of the loss, and the norms of the decoder's and encoder's gradients."""

    parts: dict[str, Tensor]
    critics: CriticUpdates | None
    norms: list[Tensor | float]


Update = Callable[[LatentJob, Mapping[str, Engine], Inputs, float], Updates]
"""One update of every module on what has been drawn."""


def train_step(
    job: LatentJob, engines: Mapping[str, Engine], inputs: Inputs, beta: float, noise: StepNoise | None = None,
    queue: ShardedQueue | None = None, *, decoder_alone: bool = False, compiled: Update | None = None,
) -> StepMetrics:  # fmt: skip
    """One update of every module on a batch (``critic.updates`` of the critics); the figures of the step.

    ``noise`` is for SVI steps, which draw as they go. With ``decoder_alone`` the encoder stays as it is (LagVAE, whose
    encoder has had its updates before).
    """
    if compiled is None:
        done = update(job, engines, inputs, beta, noise, queue, decoder_alone=decoder_alone)
    else:
        done = compiled(job, engines, inputs, beta)
    parts = done.parts
    report: StepMetrics = {**parts}
    if "encoder" in engines and job.objective.regularizer != "none":
        report["beta"] = beta
    if done.critics is not None:
        report |= _critic_figures(job, inputs, done.critics)
    report["loss"] = sum(
        (weight * parts[name] for name, weight in (("loss/reg", 1.0), ("loss/contrast", job.contrast.weight))
         if name in parts), parts["loss/rec"],
    )  # fmt: skip
    report["grad_norm"] = math.hypot(*map(float, done.norms))
    return report


def update(
    job: LatentJob, engines: Mapping[str, Trainable], inputs: Inputs, beta: float | Tensor,
    noise: StepNoise | None = None, queue: ShardedQueue | None = None, *, decoder_alone: bool = False,
) -> Updates:  # fmt: skip
    """The updates of a step."""
    decoder = engines["decoder"]
    if job.model.posterior == "none":
        z = inputs.eps.new_zeros(len(inputs.written), job.model.latent)
        rec, _ = _update_decoder(decoder, z, inputs)
        return Updates({"loss/rec": rec}, None, [decoder.gradient_norm()])
    encoder = engines["encoder"]
    encoded: Encoded = encoder(inputs.read, inputs.eps, inputs.encoder_keep)
    critics = _update_critics(job, engines["critics"], encoded, inputs) if job.has_critics else None
    refined: dict[str, Tensor] = {}
    if job.objective.svi_steps:
        assert noise is not None
        assert isinstance(decoder, Engine)
        rec, through, refined = refine(job, decoder, encoded, inputs, noise, inputs.share, float(beta))
    else:
        rec, of_z = _update_decoder(decoder, encoded.z.detach().requires_grad_(), inputs)
        assert of_z is not None
        through = (encoded.z * of_z).sum()
    extra, parts = encoder_terms(job, engines, encoded, inputs, beta, queue)
    if not decoder_alone:
        encoder.backward(through + extra)
        encoder.step()
    norms = [decoder.gradient_norm()] + ([] if decoder_alone else [encoder.gradient_norm()])
    return Updates(parts | refined | {"loss/rec": rec}, critics, norms)


def _update_decoder(decoder: Trainable, z: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """The reconstruction loss, and its gradient by z where that is a leaf."""
    rec = decoder(z, inputs.written, inputs.counted, inputs.decoder_keep) * inputs.share
    of_z = decoder.backward(rec, z if z.requires_grad else None)
    decoder.step()
    return rec.detach(), of_z


def _update_critics(job: LatentJob, critics: Trainable, encoded: Encoded, inputs: Inputs) -> CriticUpdates:
    """``critic.updates`` updates of f and g on the same posterior draws and fresh prior draws."""
    assert inputs.priors is not None
    of_f, of_g = _critic_losses(job, inputs)
    values: list[Tensor] = []
    for read in rows_of(encoded.z.detach(), encoded.h.detach(), inputs.priors):
        trained: Trained = critics(read, of_f, of_g)
        critics.take_gradients(trained.gradients)
        critics.step()
        values += [trained.f] if trained.g is None else [trained.f, trained.g]
    return CriticUpdates(trained.f, trained.g, of_f.clamped(values), critics.gradient_norm())


def _critic_losses(job: LatentJob, inputs: Inputs) -> tuple[CriticLoss, CriticLoss | None]:
    section, rows = job.critic, (job.objective.views, inputs.rows, inputs.total)
    of_g = CriticLoss(section, *rows, section.squared) if section.trained == "both" else None
    return CriticLoss(section, *rows), of_g


def _critic_figures(job: LatentJob, inputs: Inputs, done: CriticUpdates) -> StepMetrics:
    if not math.isfinite(done.norm):
        raise CriticDivergedError(
            "the critics' gradient is no longer a number: exp(f) has run away; resume from the last checkpoint with a "
            "lower critic.lr or critic.clamp"
        )

    def dual() -> Tensor:
        f_q, f_p = done.f.view(2, -1)
        of_rows: Tensor = (f_q - f_p.clamp(max=job.critic.clamp).exp()) * inputs.counted
        return 1 + of_rows.sum() * inputs.share / job.objective.views

    def loss() -> Tensor:
        of_f, of_g = _critic_losses(job, inputs)
        value = of_f.value(done.f)
        return value if of_g is None or done.g is None else value + of_g.value(done.g)

    return {
        "kl_dual": dual,
        "critic/loss": loss,
        # a mean over the ranks is taken of every figure
        "critic/clamped": done.clamped * distributed.world_size(),
        "critic/grad_norm": float(done.norm),
    }


def encoder_terms(
    job: LatentJob, engines: Mapping[str, Trainable], encoded: Encoded, inputs: Inputs, beta: float | Tensor,
    queue: ShardedQueue | None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """What the encoder minimises beside the reconstruction: the regulariser with its weight, and InfoNCE."""
    extra = encoded.z.new_zeros(())
    report: dict[str, Tensor] = {}
    if encoded.density is not None:
        kl = (encoded.density.kl() * inputs.counted).sum() * inputs.share
        report["kl"] = kl.detach() / job.objective.views
        if job.objective.regularizer == "exact" and not job.objective.svi_steps:
            extra = beta * kl
            report["loss/reg"] = extra.detach()
    if job.objective.regularizer in ("f", "g"):
        report["loss/reg"], of_z = _critic_term(job, engines["critics"].module, encoded, inputs, beta)
        extra = (encoded.z * of_z).sum()
    if job.contrast.weight > 0:
        contrast = contrast_loss(job, encoded, inputs, queue)
        report["loss/contrast"] = contrast.detach()
        extra = extra + job.contrast.weight * contrast
    return extra, report


def _critic_term(
    job: LatentJob, critics: nn.Module, encoded: Encoded, inputs: Inputs, beta: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Beta times the critic at the posterior's draws, with its L_SQ, and the gradient of that by z."""
    assert isinstance(critics, Critics)
    if job.objective.regularizer == "f":
        critic, seen = critics.f, torch.cat([encoded.z, encoded.h], dim=1).detach()
    else:
        assert critics.g is not None
        critic, seen = critics.g, encoded.z.detach()
    weights = (inputs.counted * (beta * inputs.share))[:, None]

    def slopes(values: Tensor) -> Tensor:
        return weights + beta * squared_slopes(values, inputs.rows) if job.critic.squared_in_encoder else weights

    of_seen, values = critic.pulled_back(slopes, seen)
    term = (values * weights).sum()
    if job.critic.squared_in_encoder:
        term = term + beta * squared_difference(values, inputs.rows)
    return term, of_seen[:, : encoded.z.shape[1]]


def contrast_loss(job: LatentJob, encoded: Encoded, inputs: Inputs, queue: ShardedQueue | None) -> Tensor:
    """InfoNCE (Eq. 10, minimised) between the two views' z or h, cosine similarity, negatives of all ranks."""
    section = job.contrast
    views = (encoded.z if section.over == "z" else encoded.h).unflatten(0, (2, -1))[:, : inputs.rows]
    if section.mean_pair:
        means = sum_over_ranks(views.sum(1)) / inputs.total
        views = torch.cat([means[:, None][:, : int(distributed.rank() == 0)], views], dim=1)
    anchors, positives = F.normalize(views, dim=-1).unbind()
    loss: Tensor = info_nce(
        anchors,
        positives,
        temperature=section.temperature,
        queue=queue,
        negatives=None if inputs.negatives is None else F.normalize(inputs.negatives, dim=-1),
        ids=inputs.ids,
        impl="chunked" if queue is not None else "dense",  # a batch's logits are few: one pass over them all
    )
    if queue is not None:
        queue.enqueue(positives.detach(), ids=inputs.ids)
    return loss
