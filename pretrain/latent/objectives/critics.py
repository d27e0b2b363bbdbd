r"""What the critics f and g minimise.

Write :math:`q_i` and :math:`p_i` for a critic's values at draws of the posteriors and of the prior, over the N rows of
one view on all ranks. Values :math:`p_i` above ``critic.clamp`` are cut, so that their exponentials stay finite.

The dual of the KL (Eq. 3), negated, is :math:`\overline{e^{p}} - \overline{q}`. The paper's improved dual function
(section 3.3) is called the circle loss here, since it is no divergence: it falls as the KL grows. It has four forms:

=========== =================================================================================
code        :math:`\log(1 + \sum_i e^{e^{p_i}}) + \log(1 + \sum_i e^{-q_i})`, as released
single_exp  :math:`\log(1 + \sum_i e^{p_i}) + \log(1 + \sum_i e^{-q_i})`
mean_inside :math:`\log(1 + e^{\overline{e^{p}}}) + \log(1 + e^{-\overline q})`, Eq. 13 and 14
sum_inside  :math:`\log(1 + e^{\sum_i e^{p_i}}) + \log(1 + e^{-\sum_i q_i})`, Eq. 18
=========== =================================================================================
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from pretrain.engine.autograd_collectives import log1p_sum_exp, sum_over_ranks
from pretrain.latent.config import CriticSection
from pretrain.latent.data.sampled_batch import SampledBatch
from pretrain.latent.models.critics import CriticValues


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
    r"""L_SQ (Eq. 17, squared): :math:`\sum_i (g(z_i) - g(z_i^+))^2` over the rows of all ranks."""
    return sum_over_ranks((first - second).square().sum())


def critic_loss(
    q: Float[Tensor, "v n"], p: Float[Tensor, "v n"], total: int, section: CriticSection
) -> Float[Tensor, ""]:
    """The loss of one critic that ``critic.loss`` and ``critic.circle`` name; arguments as for ``dual_loss``."""
    p = p.clamp(max=section.clamp)
    return dual_loss(q, p, total) if section.loss == "dual" else circle_loss(q, p, total, section.circle)


def critics_loss(values: CriticValues, batch: SampledBatch, section: CriticSection) -> Float[Tensor, ""]:
    """The sum of the losses of f and g; ``critic.squared`` adds L_SQ on g over the draws that it names (Eq. 18).

    The loss is that of the rows of all ranks and the same on each; its gradient is exact once averaged over the ranks.
    """
    loss = critic_loss(valid_rows(values.f_q, batch), valid_rows(values.f_p, batch), batch.total, section)
    if values.g_q is None or values.g_p is None:
        return loss
    q, p = valid_rows(values.g_q, batch), valid_rows(values.g_p, batch)
    loss = loss + critic_loss(q, p, batch.total, section)
    if section.squared != "none":
        loss = loss + squared_difference(*q)
    if section.squared == "all":  # as released; Eq. 17 has the posterior's draws alone
        loss = loss + squared_difference(*p)
    return loss


def clamped(values: CriticValues, batch: SampledBatch, section: CriticSection) -> Int[Tensor, ""]:
    """How many of this rank's values at draws of the prior are above ``critic.clamp``."""
    at_prior = [valid_rows(p, batch) for p in (values.f_p, values.g_p) if p is not None]
    return (torch.stack(at_prior) > section.clamp).sum()


def valid_rows(values: Float[Tensor, " vn"], batch: SampledBatch) -> Float[Tensor, "v n"]:
    """Values of this rank's rows as one row per view, without the rows that have no weight."""
    return values.view(batch.views, -1)[:, : batch.valid_rows]
