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

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from pretrain.engine import distributed
from pretrain.latent.across import log1p_sum_exp, sum_over_ranks
from pretrain.latent.config import CriticSection


@dataclass(frozen=True)
class CriticLoss:
    """The loss of one step's batch, summed over the views.

    Args:
        section: the ``critic`` section.
        views: 1 or 2.
        counted: rows of this rank that count, the first of each view.
        total: rows of all ranks that count.
    """

    section: CriticSection
    views: int
    counted: int
    total: int

    def of_f(self, values: Float[Tensor, "m 1"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss of f.

        Args:
            values: f at this rank's draws of the posteriors, row by row of each view, and then at those of the prior.

        Returns:
            Its gradient ``(m, 1)``, the values of posterior and prior ``(2, m / 2)``, the loss, and how many values on
            this rank were cut at ``critic.clamp``. The loss is that of all ranks' rows, equal on all of them; the
            gradient is of the sum of the ranks' losses, so that its average over the ranks, which the engine takes,
            is the gradient of the one loss.
        """
        return self._of(values, squared=False)

    def of_g(self, values: Float[Tensor, "m 1"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same of g, with its ``critic.squared``."""
        return self._of(values, squared=self.section.squared != "none")

    def _of(self, values: Tensor, *, squared: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gradient = torch.zeros_like(values)
        rows, slopes = (part.view(2, self.views, -1).narrow(2, 0, self.counted) for part in (values, gradient))
        (q, p), (d_q, d_p) = rows.unbind(), slopes.unbind()
        above = p > self.section.clamp
        if self.section.loss == "dual":
            loss = self._dual(q, p, d_q, d_p)
        elif self.section.circle in ("code", "single_exp"):
            loss = self._circle_of_sums(q, p, d_q, d_p)
        else:
            loss = self._circle_of_means(q, p, d_q, d_p)
        d_p.masked_fill_(above, 0.0)
        if squared:
            loss = loss + self._squared(rows, slopes)
        if distributed.world_size() > 1:
            gradient *= distributed.world_size()
        return gradient, values.view(2, -1), loss, above.sum()

    def _dual(self, q: Tensor, p: Tensor, d_q: Tensor, d_p: Tensor) -> Tensor:
        raised = p.clamp(max=self.section.clamp).exp_()
        d_q.fill_(-1 / self.total)
        d_p.copy_(raised / self.total)
        return sum_over_ranks(raised.sum() - q.sum()) / self.total

    def _circle_of_sums(self, q: Tensor, p: Tensor, d_q: Tensor, d_p: Tensor) -> Tensor:
        """The sums stand outside the exponentials."""
        padded = q.new_zeros(2 * self.views, self.counted + 1)
        of_q, of_p = padded[:, 1:].chunk(2)
        torch.neg(q, out=of_q)
        torch.clamp(p, max=self.section.clamp, out=of_p)
        if self.section.circle == "code":
            of_p.exp_()
        logs, shares = log1p_sum_exp(padded)
        share_q, share_p = shares.chunk(2)
        torch.neg(share_q, out=d_q)
        if self.section.circle == "code":
            torch.mul(share_p, of_p, out=d_p)
        else:
            d_p.copy_(share_p)
        return logs.sum()

    def _circle_of_means(self, q: Tensor, p: Tensor, d_q: Tensor, d_p: Tensor) -> Tensor:
        """Means or sums inside the exponentials."""
        share = 1 / self.total if self.section.circle == "mean_inside" else 1.0
        raised = p.clamp(max=self.section.clamp).exp_()
        sums = sum_over_ranks(torch.stack([-q.sum(1), raised.sum(1)])) * share
        rise_q, rise_p = (torch.sigmoid(sums)[:, :, None] * share).unbind()
        d_q.copy_(-rise_q)
        torch.mul(rise_p, raised, out=d_p)
        return F.softplus(sums).sum()

    def _squared(self, rows: Tensor, slopes: Tensor) -> Tensor:
        kinds = 1 if self.section.squared == "posterior" else 2
        difference = rows[:kinds, 0] - rows[:kinds, 1]
        slopes[:kinds, 0] += 2 * difference
        slopes[:kinds, 1] -= 2 * difference
        return sum_over_ranks(difference.square().sum())


def squared_difference(g: Float[Tensor, " n"], counted: int) -> Float[Tensor, ""]:
    r"""L_SQ (Eq. 17, squared): :math:`\sum_i (g(z_i) - g(z_i^+))^2` over the rows of all ranks."""
    first, second = g.chunk(2)
    return sum_over_ranks((first[:counted] - second[:counted]).square().sum())
