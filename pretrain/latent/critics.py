r"""The critics f(x, z) and g(z), and what they are trained on.

``dual`` maximises :math:`E_q f - E_p e^f` (Eq. 3). ``circle`` minimises the "improved dual function" (section 3.3) in
one of its forms, with :math:`p_i = f(z_{p,i})` and :math:`q_i = f(z_{q,i})` over the batch:

========== ==================================================================================
code        :math:`\log(1 + \sum_i e^{e^{p_i}}) + \log(1 + \sum_i e^{-q_i})`, as released
single_exp  :math:`\log(1 + \sum_i e^{p_i}) + \log(1 + \sum_i e^{-q_i})`
mean_inside :math:`\log(1 + e^{\overline{e^{p}}}) + \log(1 + e^{-\overline q})`, Eq. 13
sum_inside  :math:`\log(1 + e^{\sum_i e^{p_i}}) + \log(1 + e^{-\sum_i q_i})`, Eq. 18
========== ==================================================================================

The circle loss is no divergence and falls as the KL grows; it is called a critic loss everywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.latent.across import log1p_sum_exp, sum_over_ranks
from pretrain.latent.config import CriticSection
from pretrain.latent.mlp import LeakyMLP


class Values(NamedTuple):
    """f, and g where it is trained, at ``n`` draws of the posteriors (``q``) and as many of the prior (``p``)."""

    f_q: Float[Tensor, " n"]
    f_p: Float[Tensor, " n"]
    g_q: Float[Tensor, " n"] | None
    g_p: Float[Tensor, " n"] | None


class Critics(nn.Module):
    """f on ``[z; h(x)]`` and g on ``z``."""

    def __init__(self, latent: int, representation: int, section: CriticSection) -> None:
        super().__init__()
        hidden = [section.hidden] * section.layers
        self.f = LeakyMLP(latent + representation, *hidden, 1)
        self.g = LeakyMLP(latent, *hidden, 1) if section.trained == "both" else None

    def forward(self, z: Float[Tensor, "n d"], h: Float[Tensor, "n k"], prior: Float[Tensor, "n d"]) -> Values:
        """Both critics at the posterior's and the prior's draws, the latter beside the same x."""
        both = torch.cat([z, prior])
        f_q, f_p = self.f(torch.cat([both, h.repeat(2, 1)], dim=1)).squeeze(1).float().chunk(2)
        g_q, g_p = self.g(both).squeeze(1).float().chunk(2) if self.g is not None else (None, None)
        return Values(f_q, f_p, g_q, g_p)


def critic_loss(
    values: Values, views: int, counted: int, total: int, section: CriticSection
) -> tuple[Float[Tensor, ""], Tensor]:
    """What f and g minimise, summed over both and over the views, for the ``total`` rows of all ranks.

    Args:
        values: rows view by view; of each view only the first ``counted`` rows count.
        views: 1 or 2.
        counted: of this rank.
        total: of all ranks.
        section: the ``critic`` section.

    Returns:
        The loss, and how many values on this rank were cut at ``critic.clamp``.
    """
    loss, clamped = values.f_q.new_zeros(()), torch.zeros((), dtype=torch.int64, device=values.f_q.device)
    for q, p in ((values.f_q, values.f_p), (values.g_q, values.g_p)):
        if q is None or p is None:
            continue
        q_rows, p_rows = q.view(views, -1)[:, :counted], p.view(views, -1)[:, :counted]
        clamped = clamped + (p_rows > section.clamp).sum()
        loss = loss + _one(q_rows, p_rows.clamp(max=section.clamp), total, section).sum()
    if section.squared != "none":
        parts = [values.g_q] if section.squared == "posterior" else [values.g_q, values.g_p]
        loss = loss + sum(squared_difference(part, counted) for part in parts if part is not None)
    return loss, clamped


def _one(q: Float[Tensor, "v n"], p: Float[Tensor, "v n"], total: int, section: CriticSection) -> Float[Tensor, " v"]:
    if section.loss == "dual":
        return sum_over_ranks(p.exp().sum(1) - q.sum(1)) / total
    if section.circle == "code":
        return log1p_sum_exp(p.exp()) + log1p_sum_exp(-q)
    if section.circle == "single_exp":
        return log1p_sum_exp(p) + log1p_sum_exp(-q)
    share = 1 / total if section.circle == "mean_inside" else 1.0
    return F.softplus(sum_over_ranks(p.exp().sum(1)) * share) + F.softplus(-sum_over_ranks(q.sum(1)) * share)


def squared_difference(g: Float[Tensor, " n"], counted: int) -> Float[Tensor, ""]:
    r"""L_SQ (Eq. 17, squared): :math:`\sum_i (g(z_i) - g(z_i^+))^2` over the rows of all ranks."""
    first, second = g.chunk(2)
    return sum_over_ranks((first[:counted] - second[:counted]).square().sum())


def frozen(module: nn.Module, *args: Any) -> Tensor:
    """The module's output for ``args``, through which gradients reach ``args`` but not its weights."""
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    out: Tensor = torch.func.functional_call(module, weights, args)
    return out
