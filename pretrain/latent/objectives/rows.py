r"""What the encoder minimises: one function per row of the paper's tables.

All terms are means over the N sentences of the batch, on all ranks, and sums over the V views:
:math:`\frac1N \sum_{v,i} -\log p(x_i | z_{v,i})` is ``rec``. What the paper maximises is negated and minimised here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from pretrain.contrast import ShardedQueue
from pretrain.latent.config import LatentJob
from pretrain.latent.data.sampled_batch import SampledBatch
from pretrain.latent.models.critics import Critics
from pretrain.latent.models.gradients import frozen
from pretrain.latent.models.posterior import EncoderOutput
from pretrain.latent.objectives.contrast import contrast_loss
from pretrain.latent.objectives.critics import squared_difference, valid_rows


@dataclass(frozen=True)
class Forward:
    """What a training step has computed when it comes to the encoder's objective.

    Attributes:
        job: the job.
        batch: the batch and its random numbers.
        encoded: the encoder's output; for a language model z = 0.
        rec: -log p(x | z); its gradient reaches the encoder.
        kl: the exact KL(q(z | x) || p), where the posterior has a density.
        critics: the trained critics, where the posterior is implicit.
        beta: weight of the regulariser.
        queue: negatives of earlier batches.
    """

    job: LatentJob
    batch: SampledBatch
    encoded: EncoderOutput
    rec: Float[Tensor, ""]
    kl: Float[Tensor, ""] | None
    critics: Critics | None
    beta: float
    queue: ShardedQueue | None


@dataclass(frozen=True)
class Loss:
    """The terms of an objective: reconstruction, regulariser with its weight beta, and contrast without its weight."""

    rec: Float[Tensor, ""]
    reg: Float[Tensor, ""] | None = None
    contrast: Float[Tensor, ""] | None = None
    contrast_weight: float = 0.0

    def total(self) -> Float[Tensor, ""]:
        """The loss."""
        loss = self.rec
        if self.reg is not None:
            loss = loss + self.reg
        return loss if self.contrast is None else loss + self.contrast_weight * self.contrast

    def metrics(self) -> dict[str, Tensor]:
        """The loss and its terms under their names in metrics.jsonl."""
        terms = {"loss": self.total(), "loss/rec": self.rec, "loss/reg": self.reg, "loss/contrast": self.contrast}
        return {name: term.detach() for name, term in terms.items() if term is not None}


Objective = Callable[[Forward], Loss]


def reconstruction(x: Forward) -> Loss:
    r"""AE, and the LSTM language model: :math:`-\log p(x|z)`."""
    return Loss(x.rec)


def vae(x: Forward) -> Loss:
    r"""VAE, beta VAE, CycVAE and LagVAE (Eq. 1 and 5): :math:`-\log p(x|z) + \beta\, \mathrm{KL}(q(z|x) \| p)`."""
    assert x.kl is not None
    return Loss(x.rec, x.beta * x.kl)


def sa_vae(x: Forward) -> Loss:
    """SaVAE: the loss of a VAE at the posteriors that SVI steps have refined.

    ``rec`` brings the gradient of the whole loss through these steps (``training.semi_amortized``), so ``kl`` has none.
    """
    return vae(x)


def ivae(x: Forward) -> Loss:
    r"""iVAE (Eq. 4 and 6): :math:`-\log p(x|z) + \beta f(x, z)`; the dual's other term has no gradient by z."""
    return Loss(x.rec, critic_term(x, f_values(x)))


def ivae_mi(x: Forward) -> Loss:
    r"""iVAE_MI (Eq. 7): :math:`-\log p(x|z) + \beta g(z)`, from the dual of KL(q(z) || p) with the aggregated q(z)."""
    return Loss(x.rec, critic_term(x, g_values(x)))


def clvae(x: Forward) -> Loss:
    r"""clVAE (Eq. 11): :math:`L_\mathrm{iVAE} + w L_\mathrm{CL}`."""
    return with_contrast(ivae(x), x)


def clvae_mi(x: Forward) -> Loss:
    r"""clVAE_MI (Eq. 12): :math:`L_\mathrm{iVAE\_MI} + w L_\mathrm{CL}`."""
    return with_contrast(ivae_mi(x), x)


def clvae_plus(x: Forward) -> Loss:
    r"""clVAE+ (Eq. 15, 19): :math:`-\log p(x|z) + \beta f(x, z) + w L_\mathrm{CL}`, where f minimises the circle loss.

    As released; Eq. 19 has :math:`\log(1 + e^{-\sum f})` in the place of f, whose gradient has the other sign.
    """
    return with_contrast(Loss(x.rec, critic_term(x, f_values(x))), x)


def clvae_plus_mi(x: Forward) -> Loss:
    r"""clVAE+_MI (Eq. 16, 19): :math:`-\log p(x|z) + \beta [g(z) + L_\mathrm{SQ}(g)] + w L_\mathrm{CL}`.

    g minimises the circle loss and L_SQ (Eq. 18). As released; in Eq. 16 and 19 the encoder has no L_SQ
    (``critic.squared_in_encoder``), and :math:`\log(1 + e^{-\sum g})` takes the place of g.
    """
    return with_contrast(Loss(x.rec, critic_term(x, g_values(x))), x)


def f_values(x: Forward) -> Float[Tensor, " vn"]:
    """f(x, z) at the posteriors' draws, whose gradient reaches z alone: neither h(x) nor the critic."""
    assert x.critics is not None
    return frozen(x.critics.f, torch.cat([x.encoded.z, x.encoded.h.detach()], dim=1)).squeeze(1)


def g_values(x: Forward) -> Float[Tensor, " vn"]:
    """g(z) at the posteriors' draws, whose gradient reaches z but not the critic."""
    assert x.critics is not None
    assert x.critics.g is not None
    return frozen(x.critics.g, x.encoded.z).squeeze(1)


def critic_term(x: Forward, values: Float[Tensor, " vn"]) -> Float[Tensor, ""]:
    """beta times the mean of a critic's values, to which ``critic.squared_in_encoder`` adds L_SQ (Eq. 17)."""
    term = (values * (x.batch.valid * (x.beta * x.batch.loss_scale))).sum()
    if x.job.critic.squared_in_encoder:
        term = term + x.beta * squared_difference(*valid_rows(values, x.batch))
    return term


def with_contrast(loss: Loss, x: Forward) -> Loss:
    r"""Add :math:`w L_\mathrm{CL}` (Eq. 10) with w = ``contrast.weight``.

    A batch of one sentence has no negatives and no contrast: what is left of Eq. 10 is 0, or log 2 with
    ``contrast.mean_pair``, where the sentence is its own negative.
    """
    if x.batch.total == 1:
        return loss
    section = x.job.contrast
    contrast = contrast_loss(x.encoded, x.batch, section, x.queue)
    return replace(loss, contrast=contrast, contrast_weight=section.weight)


def objective_of(job: LatentJob) -> Objective:
    """The function of a job's row; the contrast can also be added to rows that the paper has without it."""
    regularizer, circle = job.objective.regularizer, job.critic.loss == "circle"
    base: Objective = {"none": reconstruction, "exact": vae, "f": ivae, "g": ivae_mi}[regularizer]
    if job.objective.svi_steps:
        base = sa_vae
    if job.contrast.weight == 0:
        return base
    if regularizer == "f":
        return clvae_plus if circle else clvae
    if regularizer == "g":
        return clvae_plus_mi if circle else clvae_mi
    return lambda x: with_contrast(base(x), x)
