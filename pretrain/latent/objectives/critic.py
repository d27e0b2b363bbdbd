r"""What a critic is trained on, with its gradient in closed form, for the rows of all ranks.

Write :math:`q_i` and :math:`p_i` for the critic's values at draws of the posteriors and of the prior, over a batch of N
rows in one view. ``dual`` maximises :math:`E_q f - E_p e^f` (Eq. 3). ``circle`` minimises the "improved dual function"
(section 3.3) in one of its forms:

========== ==================================================================================
code        :math:`\log(1 + \sum_i e^{e^{p_i}}) + \log(1 + \sum_i e^{-q_i})`, as released
single_exp  :math:`\log(1 + \sum_i e^{p_i}) + \log(1 + \sum_i e^{-q_i})`
mean_inside :math:`\log(1 + e^{\overline{e^{p}}}) + \log(1 + e^{-\overline q})`, Eq. 13
sum_inside  :math:`\log(1 + e^{\sum_i e^{p_i}}) + \log(1 + e^{-\sum_i q_i})`, Eq. 18
========== ==================================================================================

The circle loss is no divergence and falls as the KL grows; it is called a critic loss everywhere. To g's loss
``critic.squared`` adds L_SQ (Eq. 17, squared), :math:`\sum_i (g(z_i) - g(z_i^+))^2` over the posterior's draws and, as
released, over the prior's.

A critic is small, and autograd's fifteen nodes for such a loss would take as long as the critic itself.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from pretrain.engine import distributed
from pretrain.engine.autograd_collectives import log1p_sum_exp, shares_of_sum_exp, sum_over_ranks
from pretrain.latent.config import CriticSection


def _rows(values: Tensor, views: int, counted: int) -> Tensor:
    """``(m, 1)`` as ``(2, views, counted)``: of posterior and prior, without the rows that do not count."""
    return values.view(2, views, -1).narrow(2, 0, counted)


class CriticLoss:
    """The loss of one critic in one step, summed over the views.

    Critic values come as ``(m, 1)``: at this rank's draws of the posteriors, row by row of each view, and then at those
    of the prior.

    Args:
        section: the ``critic`` section.
        views: 1 or 2.
        counted: rows of this rank that count, the first of each view.
        total: rows of all ranks that count.
        squared: L_SQ joins the loss, over the draws that it names.
    """

    def __init__(self, section: CriticSection, views: int, counted: int, total: int, squared: str = "none") -> None:
        self._section = section
        self._views, self._counted = views, counted
        self._sums_outside = section.loss == "circle" and section.circle in ("code", "single_exp")
        self._share = 1 / total if section.loss == "dual" or section.circle == "mean_inside" else 1.0
        self._squared = {"none": 0, "posterior": 1, "all": 2}[squared]  # halves of the values
        self._world = distributed.world_size()

    def value(self, values: Float[Tensor, "m 1"]) -> Float[Tensor, ""]:
        """The loss of the rows of all ranks, the same on each."""
        q, p = self._of_batch(values)
        if self._sums_outside:
            loss = log1p_sum_exp(self._exponents(q, p)).sum()
        elif self._section.loss == "dual":
            loss = sum_over_ranks(self._raised(p).sum() - q.sum()) * self._share
        else:
            loss = F.softplus(self._means(q, self._raised(p))).sum()
        for half in values.chunk(2)[: self._squared]:
            loss = loss + squared_difference(half, self._counted)
        return loss

    def gradient(self, values: Float[Tensor, "m 1"]) -> Float[Tensor, "m 1"]:
        """That of :meth:`value` on this rank's values.

        It is of the sum of the ranks' losses, so that its average over the ranks, which the engine takes, is the
        gradient of the one loss.
        """
        q, p = self._of_batch(values)
        raised = self._raised(p)
        if self._sums_outside:  # each row has its share of the sum
            rise_q, rise_p = shares_of_sum_exp(self._exponents(q, p)).view(2, self._views, -1).unbind()
            if self._section.circle == "single_exp":
                raised = torch.ones_like(p)
        elif self._section.loss == "dual":
            rise_q = rise_p = torch.full_like(p, self._share)
        else:
            rise_q, rise_p = torch.sigmoid(self._means(q, raised))[:, :, None] * self._share
        d_q, d_p = -rise_q.expand_as(q), (rise_p * raised).masked_fill(p > self._section.clamp, 0.0)
        uncounted = len(values) // (2 * self._views) - self._counted
        gradient = F.pad(torch.stack([d_q, d_p]) * self._world, (0, uncounted)).view_as(values)
        if self._squared:
            squared = [squared_slopes(half, self._counted) for half in values.chunk(2)[: self._squared]]
            gradient = gradient + F.pad(torch.cat(squared), (0, 0, 0, len(values) - sum(map(len, squared))))
        return gradient

    def clamped(self, values: list[Tensor]) -> Tensor:
        """How many of this rank's values, ``(m, 1)`` of each update, were cut at ``critic.clamp``."""
        p = torch.stack(values).view(len(values), 2, self._views, -1)[:, 1, :, : self._counted]
        return (p > self._section.clamp).sum()

    def _of_batch(self, values: Tensor) -> tuple[Tensor, Tensor]:
        q, p = _rows(values, self._views, self._counted).unbind()
        return q, p

    def _exponents(self, q: Tensor, p: Tensor) -> Tensor:
        """What is raised where the sums stand outside: a row for q and one for p of each view, behind a 0."""
        of_p = self._raised(p) if self._section.circle == "code" else p.clamp(max=self._section.clamp)
        return F.pad(torch.cat([-q, of_p]), (1, 0))

    def _raised(self, p: Tensor) -> Tensor:
        return p.clamp(max=self._section.clamp).exp()

    def _means(self, q: Tensor, raised: Tensor) -> Tensor:
        r"""What stands inside the exponentials, :math:`-\overline q` and :math:`\overline{e^p}` of each view."""
        return sum_over_ranks(torch.stack([-q.sum(1), raised.sum(1)])) * self._share


def squared_difference(g: Float[Tensor, "n *"], counted: int) -> Float[Tensor, ""]:
    r"""L_SQ (Eq. 17, squared): :math:`\sum_i (g(z_i) - g(z_i^+))^2` over the rows of all ranks."""
    first, second = g.chunk(2)
    return sum_over_ranks((first[:counted] - second[:counted]).square().sum())


def squared_slopes(g: Float[Tensor, "n *"], counted: int) -> Float[Tensor, "n *"]:
    """The gradient of :func:`squared_difference` on this rank's rows, of the sum of the ranks' losses."""
    slopes = torch.zeros_like(g)
    (first, second), (d_first, d_second) = g.chunk(2), slopes.chunk(2)
    torch.sub(first[:counted], second[:counted], out=d_first[:counted]).mul_(2 * distributed.world_size())
    d_second[:counted] = -d_first[:counted]
    return slopes
