r"""The objectives of the paper's tables (Contrastive Latent Variable Models for Neural Text Generation, UAI 2022).

Each row of the tables is one function, which the encoder minimises and whose reconstruction term the decoder minimises.
An implicit posterior also has critics f and g, with losses of their own. Equation numbers are the paper's.

============ ================================================ ============= ================== ======================
row          the encoder minimises                            equation      function           presets
============ ================================================ ============= ================== ======================
LSTM-LM      rec (z = 0)                                      .             reconstruction     lstm_lm
AE           rec                                              .             reconstruction     ae
VAE          rec + beta KL                                    1, 5          vae                vae
beta VAE     the same, beta up to 0.5                         1, 5          vae                beta_vae
CycVAE       the same, beta in cycles                         1, 5          vae                cyc_vae
LagVAE       the same, encoder trained ahead of the decoder   1, 5          vae                lag_vae
SaVAE        the same at posteriors refined by SVI            1, 5          sa_vae             sa_vae
iVAE         rec + beta f                                     4, 6          ivae               ivae
iVAE_MI      rec + beta g                                     7             ivae_mi            ivae_mi
clVAE        iVAE + L_CL                                      11            clvae              clvae
clVAE_MI     iVAE_MI + L_CL                                   12            clvae_mi           clvae_mi
clVAE+       rec + beta f + L_CL, circle critics              15, 18        clvae_plus         clvae_plus
clVAE+_MI    rec + beta (g + L_SQ) + L_CL, circle critics     16, 18        clvae_plus_mi      clvae_plus_mi
============ ================================================ ============= ================== ======================

rec is -log p(x | z), L_CL is InfoNCE (Eq. 10), and L_SQ is Eq. 17. The critics of iVAE, iVAE_MI, clVAE and clVAE_MI
minimise the negative dual (Eq. 3), those of clVAE+ and clVAE+_MI the circle loss and L_SQ (Eq. 18). Presets that end in
``_paper`` have the function of the preset that they are named after, with ``objective.critic_term`` and
``contrast.negatives`` of the equations; ``yahoo/clvae_plus_mi_code`` and ``yelp/clvae_plus_mi_code``, whose critics
minimise the dual, have ``clvae_mi``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from capt.pretrain.base import distributed
from capt.pretrain.contrast import ShardedQueue, info_nce
from capt.pretrain.latent.batches import SampledBatch
from capt.pretrain.latent.config import ContrastSection, CriticSection, LatentJob
from capt.pretrain.latent.posterior import Critics, CriticValues, EncoderOutput, frozen


def contrast_loss(
    encoded: EncoderOutput, batch: SampledBatch, section: ContrastSection, queue: ShardedQueue | None
) -> Float[Tensor, ""]:
    r"""InfoNCE (Eq. 8 to 10, negated) with cosine similarity; the negatives are the rows of all ranks.

    .. math::
        -\frac1N \sum_i \log \frac{e^{c(z_i, z_i^+) / \tau}}{e^{c(z_i, z_i^+) / \tau} + \sum_{j \neq i} e^{c(z_i, n_j) /
        \tau}}

    where :math:`n_j` is :math:`z_j`, as Eq. 10 writes (``contrast.negatives=own_view``), or :math:`z_j^+`, as released.
    ``contrast.over`` chooses z or h. As released, ``contrast.mean_pair`` adds the batch's mean z and mean z+ as one
    more pair (on rank 0), and ``contrast.prior_negatives`` adds draws of the prior as negatives. Afterwards the
    positives join the queue.
    """
    # Rows that only fill up this rank's share are no pairs.
    views = (encoded.z if section.over == "z" else encoded.h).unflatten(0, (2, -1))[:, : batch.valid_rows]
    if section.mean_pair:
        # Rank 0 alone adds the pair of the means: else it would count once for every rank.
        means = sum_over_ranks(views.sum(1)) / batch.total
        views = torch.cat([means[:, None][:, : int(distributed.rank() == 0)], views], dim=1)
    anchors, positives = F.normalize(views, dim=-1).unbind()
    own_view = section.negatives == "own_view"
    loss: Tensor = info_nce(
        anchors,
        positives,
        temperature=section.temperature,
        queue=queue,
        negatives=None if batch.negatives is None else F.normalize(batch.negatives, dim=-1),
        within_view=own_view,
        across_views=not own_view,
        ids=batch.ids,
        impl="chunked" if queue is not None else "dense",  # without a queue the logits are few: one pass over them all
    )
    if queue is not None:
        queue.enqueue((anchors if own_view else positives).detach(), ids=batch.ids)
    return loss


# What the critics f and g minimise.
#
# Write :math:`q_i` and :math:`p_i` for a critic's values at draws of the posteriors and of the prior, over the N rows
# of one view on all ranks. Values :math:`p_i` above ``critic.clamp`` are cut, so that their exponentials stay finite.
#
# The dual of the KL (Eq. 3), negated, is :math:`\overline{e^{p}} - \overline{q}`. The paper's improved dual function
# (section 3.3) is called the circle loss here, since it is no divergence: it falls as the KL grows. It has four forms:
#
# code:         \log(1 + \sum_i e^{e^{p_i}}) + \log(1 + \sum_i e^{-q_i}), as released
# single_exp:   \log(1 + \sum_i e^{p_i}) + \log(1 + \sum_i e^{-q_i})
# mean_inside:  \log(1 + e^{\overline{e^{p}}}) + \log(1 + e^{-\overline q}), Eq. 13 and 14
# sum_inside:   \log(1 + e^{\sum_i e^{p_i}}) + \log(1 + e^{-\sum_i q_i}), Eq. 18


def dual_loss(q: Float[Tensor, "v n"], p: Float[Tensor, "v n"], total: int) -> Float[Tensor, ""]:
    r"""The negative dual of the KL (Eq. 3), :math:`\overline{e^{p}} - \overline{q}`, summed over the views.

    Args:
        q: the critic's values at this rank's draws of the posteriors, one row per view.
        p: its values at this rank's draws of the prior.
        total: N, the number of columns over all ranks.
    """
    return sum_over_ranks(p.exp().sum() - q.sum()) / total


def circle_loss(q: Float[Tensor, "v n"], p: Float[Tensor, "v n"], total: int, form: str) -> Float[Tensor, ""]:
    """The circle loss in one of the four forms above, summed over the views; arguments as for ``dual_loss``."""
    if form == "code":
        return log1p_sum_exp(torch.cat([-q, p.exp()])).sum()
    if form == "single_exp":
        return log1p_sum_exp(torch.cat([-q, p])).sum()
    sums = sum_over_ranks(torch.stack([-q.sum(1), p.exp().sum(1)]))
    return F.softplus(sums / total if form == "mean_inside" else sums).sum()


def squared_difference(first: Float[Tensor, " n"], second: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    r"""L_SQ (Eq. 17, squared): :math:`\sum_i (f(x_i, z_i) - f(x_i, z_i^+))^2`, or of g, over the rows of all ranks."""
    return sum_over_ranks((first - second).square().sum())


def critic_loss(
    q: Float[Tensor, "v n"], p: Float[Tensor, "v n"], total: int, section: CriticSection
) -> Float[Tensor, ""]:
    """The loss of one critic that ``critic.loss`` and ``critic.circle`` name; arguments as for ``dual_loss``."""
    p = p.clamp(max=section.clamp)
    return dual_loss(q, p, total) if section.loss == "dual" else circle_loss(q, p, total, section.circle)


def critics_loss(values: CriticValues, batch: SampledBatch, section: CriticSection) -> Float[Tensor, ""]:
    """The losses of f and g (Eq. 18), and L_SQ on ``critic.squared_on`` over the draws of ``critic.squared``, summed.

    The loss is that of the rows of all ranks and the same on each; its gradient is exact once averaged over the ranks.
    """
    q, p = valid_rows(values.f_q, batch), valid_rows(values.f_p, batch)
    loss = critic_loss(q, p, batch.total, section)
    if values.g_q is not None and values.g_p is not None:
        at_g = valid_rows(values.g_q, batch), valid_rows(values.g_p, batch)
        loss = loss + critic_loss(*at_g, batch.total, section)
        if section.squared_on == "g":
            q, p = at_g
    if section.squared != "none":
        loss = loss + squared_difference(*q)
    if section.squared == "all":  # as released; Eq. 17 has the posterior's draws alone
        loss = loss + squared_difference(*p)
    return loss


def clamped(values: CriticValues, batch: SampledBatch, section: CriticSection) -> Int[Tensor, ""]:
    """Count this rank's values at draws of the prior that are above ``critic.clamp``."""
    at_prior = [valid_rows(p, batch) for p in (values.f_p, values.g_p) if p is not None]
    return (torch.stack(at_prior) > section.clamp).sum()


def valid_rows(values: Float[Tensor, " vn"], batch: SampledBatch) -> Float[Tensor, "v n"]:
    """Values of this rank's rows as one row per view, without the rows that have no weight."""
    return values.view(batch.views, -1)[:, : batch.valid_rows]


# What the encoder minimises: one function per row of the paper's tables.
#
# All terms are means over the N sentences of the batch, on all ranks, and sums over the V views: :math:`\frac1N
# \sum_{v,i} -\log p(x_i | z_{v,i})` is ``rec``. What the paper maximises is negated and minimised here.


@dataclass(frozen=True)
class LatentForward:
    """Results of a training step that the encoder's objective needs.

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
class LatentLoss:
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


LatentObjective = Callable[[LatentForward], LatentLoss]


def reconstruction(x: LatentForward) -> LatentLoss:
    r"""AE, and the LSTM language model: :math:`-\log p(x|z)`."""
    return LatentLoss(x.rec)


def vae(x: LatentForward) -> LatentLoss:
    r"""VAE, beta VAE, CycVAE and LagVAE (Eq. 1 and 5): :math:`-\log p(x|z) + \beta\, \mathrm{KL}(q(z|x) \| p)`."""
    assert x.kl is not None
    return LatentLoss(x.rec, x.beta * x.kl)


def sa_vae(x: LatentForward) -> LatentLoss:
    """SaVAE: the loss of a VAE at the posteriors that SVI steps have refined.

    ``rec`` brings the gradient of the whole loss through these steps (``training``), so ``kl`` has none.
    """
    return vae(x)


def ivae(x: LatentForward) -> LatentLoss:
    r"""iVAE (Eq. 4 and 6): :math:`-\log p(x|z) + \beta f(x, z)`; the dual's other term has no gradient by z."""
    return LatentLoss(x.rec, critic_term(x, f_values(x)))


def ivae_mi(x: LatentForward) -> LatentLoss:
    r"""iVAE_MI (Eq. 7): :math:`-\log p(x|z) + \beta g(z)`, from the dual of KL(q(z) || p) with the aggregated q(z)."""
    return LatentLoss(x.rec, critic_term(x, g_values(x)))


def clvae(x: LatentForward) -> LatentLoss:
    r"""clVAE (Eq. 11): :math:`L_\mathrm{iVAE} + w L_\mathrm{CL}`."""
    return with_contrast(ivae(x), x)


def clvae_mi(x: LatentForward) -> LatentLoss:
    r"""clVAE_MI (Eq. 12): :math:`L_\mathrm{iVAE\_MI} + w L_\mathrm{CL}`."""
    return with_contrast(ivae_mi(x), x)


def clvae_plus(x: LatentForward) -> LatentLoss:
    r"""clVAE+: :math:`-\log p(x|z) + \beta f(x, z) + w L_\mathrm{CL}`, where f minimises the circle loss.

    As released; Eq. 15 has :math:`\log(1 + e^{-f})` in the place of f (``objective.critic_term``).
    """
    return with_contrast(LatentLoss(x.rec, critic_term(x, f_values(x))), x)


def clvae_plus_mi(x: LatentForward) -> LatentLoss:
    r"""clVAE+_MI: :math:`-\log p(x|z) + \beta [g(z) + L_\mathrm{SQ}(g)] + w L_\mathrm{CL}`.

    g minimises the circle loss and L_SQ (Eq. 18). As released; in Eq. 16 the encoder has no L_SQ
    (``critic.squared_in_encoder``), and :math:`\log(1 + e^{-g})` takes the place of g (``objective.critic_term``).
    """
    return with_contrast(LatentLoss(x.rec, critic_term(x, g_values(x))), x)


def f_values(x: LatentForward) -> Float[Tensor, " vn"]:
    """f(x, z) at the posteriors' draws, whose gradient reaches z alone: neither h(x) nor the critic."""
    assert x.critics is not None
    return frozen(x.critics.f, torch.cat([x.encoded.z, x.encoded.h.detach()], dim=1)).squeeze(1)


def g_values(x: LatentForward) -> Float[Tensor, " vn"]:
    """g(z) at the posteriors' draws, whose gradient reaches z but not the critic."""
    assert x.critics is not None
    assert x.critics.g is not None
    return frozen(x.critics.g, x.encoded.z).squeeze(1)


def critic_term(x: LatentForward, values: Float[Tensor, " vn"]) -> Float[Tensor, ""]:
    r"""Return beta times what the encoder minimises of a critic, summed over the views.

    ``objective.critic_term`` is ``mean``, :math:`\overline f` (Eq. 4 and 7, and the released code everywhere), or the
    first term of the circle loss: ``mean_inside``, :math:`\log(1 + e^{-\overline f})` (Eq. 15 and 16), ``sum_inside``,
    :math:`\log(1 + e^{-\sum_i f_i})` (Eq. 19). These two fall as f grows, so they lead q(z|x) to where the critic tells
    it from the prior. ``critic.squared_in_encoder`` adds L_SQ (Eq. 17).
    """
    form = x.job.objective.critic_term
    if form == "mean":
        term = (values * (x.batch.valid * (x.beta * x.batch.loss_scale))).sum()
    else:
        sums = sum_over_ranks(valid_rows(values, x.batch).sum(1))
        term = x.beta * F.softplus(-sums / x.batch.total if form == "mean_inside" else -sums).sum()
    if x.job.critic.squared_in_encoder:
        term = term + x.beta * squared_difference(*valid_rows(values, x.batch))
    return term


def with_contrast(loss: LatentLoss, x: LatentForward) -> LatentLoss:
    r"""Add :math:`w L_\mathrm{CL}` (Eq. 10) with w = ``contrast.weight``.

    A batch of one sentence has no negatives and no contrast: what is left of Eq. 10 is 0, or log 2 with
    ``contrast.mean_pair``, where the sentence is its own negative.
    """
    if x.batch.total == 1:
        return loss
    section = x.job.contrast
    contrast = contrast_loss(x.encoded, x.batch, section, x.queue)
    return replace(loss, contrast=contrast, contrast_weight=section.weight)


def objective_of(job: LatentJob) -> LatentObjective:
    """The function of a job's row; the contrast can also be added to rows that the paper has without it."""
    regularizer, circle = job.objective.regularizer, job.critic.loss == "circle"
    base: LatentObjective = {"none": reconstruction, "exact": vae, "f": ivae, "g": ivae_mi}[regularizer]
    if job.objective.svi_steps:
        base = sa_vae
    if job.contrast.weight == 0:
        return base
    if regularizer == "f":
        return clvae_plus if circle else clvae
    if regularizer == "g":
        return clvae_plus_mi if circle else clvae_mi
    return lambda x: with_contrast(base(x), x)


# Sums over the ranks that autograd can differentiate.
#
# The engine averages the gradients of the ranks, and every rank holds the same loss of the whole batch. The backward
# pass here adds up what the ranks' copies of that loss ask for; the average is then the gradient of the one loss.


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return distributed.all_reduce_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return distributed.all_reduce_sum(grads[0])


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors, which have one shape, on every rank."""
    if distributed.world_size() == 1:
        return x
    summed: Tensor = _SumOverRanks.apply(x)
    return summed


class _Log1pSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        padded = F.pad(x, (1, 0))  # the 1 is the exponential of 0
        if distributed.world_size() == 1:
            ctx.save_for_backward(torch.softmax(padded, 1)[:, 1:])
            return -torch.log_softmax(padded, 1)[:, 0]
        running_max = distributed.all_reduce_max(padded.amax(1))
        weights = torch.exp(padded - running_max[:, None])  # beside a large log, fp32 does not hold the log of a sum
        total = distributed.all_reduce_sum(weights[:, 1:].sum(1)) + weights[:, 0]
        ctx.save_for_backward(weights[:, 1:] / total[:, None])
        return running_max + torch.log(total)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (softmax,) = ctx.saved_tensors
        summed: Tensor = distributed.all_reduce_sum(grads[0])[:, None] * softmax
        return summed


def log1p_sum_exp(x: Float[Tensor, "v n"]) -> Float[Tensor, " v"]:
    r"""Return :math:`\log(1 + \sum_i e^{x_{vi}})` over the columns of all ranks; a rank may hold any number of them."""
    summed: Tensor = _Log1pSumExp.apply(x)
    return summed
