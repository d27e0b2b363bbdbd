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
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pretrain.engine import distributed
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
        f_q, f_p = self.f(torch.cat([both, torch.cat([h, h])], dim=1)).view(2, -1).float().unbind()
        g_q, g_p = self.g(both).view(2, -1).float().unbind() if self.g is not None else (None, None)
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
    pairs = [(values.f_q, values.f_p), (values.g_q, values.g_p)]
    parts = [_one(q, p, views, counted, total, section) for q, p in pairs if q is not None and p is not None]
    loss, clamped = (sum(part[1:], part[0]) for part in zip(*parts, strict=True))
    if section.squared != "none":
        squared = [values.g_q] if section.squared == "posterior" else [values.g_q, values.g_p]
        loss = loss + sum(squared_difference(part, counted) for part in squared if part is not None)
    return loss, clamped


def _one(
    q: Float[Tensor, " m"], p: Float[Tensor, " m"], views: int, counted: int, total: int, section: CriticSection
) -> tuple[Float[Tensor, ""], Tensor]:
    if section.loss == "circle" and section.circle in ("code", "single_exp"):
        both: tuple[Tensor, Tensor] = _Circle.apply(q, p, views, counted, section.clamp, section.circle == "code")
        return both
    q, p = (rows.view(views, -1)[:, :counted] for rows in (q, p))
    clamped = (p > section.clamp).sum()
    p = p.clamp(max=section.clamp)
    if section.loss == "dual":
        return sum_over_ranks(p.exp().sum() - q.sum()) / total, clamped
    share = 1 / total if section.circle == "mean_inside" else 1.0
    logs = F.softplus(sum_over_ranks(p.exp().sum(1)) * share) + F.softplus(-sum_over_ranks(q.sum(1)) * share)
    return logs.sum(), clamped


class _Circle(torch.autograd.Function):
    """The forms with the sums outside the exponentials, of one critic.

    One node, whose ``forward`` finds the gradient as well: autograd's fifteen take half as long as a small critic.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, p: Tensor, views: int, counted: int, clamp: float, twice: bool
    ) -> tuple[Tensor, Tensor]:
        q, p = (rows.view(views, -1) for rows in (q, p))
        uncounted = q.shape[1] - counted
        if uncounted:
            q, p = q[:, :counted], p[:, :counted]
        above = p > clamp
        raised = p.clamp(max=clamp)
        if twice:
            raised = raised.exp()
        exponents = torch.cat([-q, raised])
        logs = log1p_sum_exp(exponents)
        gradient = torch.sub(exponents, logs[:, None]).exp_()  # of the logs with respect to the exponents
        d_q, d_p = gradient.split(views)
        d_q.neg_()
        if twice:
            d_p.mul_(raised)
        d_p.masked_fill_(above, 0.0)
        ctx.save_for_backward(F.pad(gradient, (0, uncounted)) if uncounted else gradient)
        clamped = above.sum()
        ctx.mark_non_differentiable(clamped)
        return logs.sum(), clamped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        outer = grads[0] if distributed.world_size() == 1 else distributed.all_reduce_sum(grads[0])
        d_q, d_p = (ctx.saved_tensors[0] * outer).view(2, -1)
        return d_q, d_p, None, None, None, None


def squared_difference(g: Float[Tensor, " n"], counted: int) -> Float[Tensor, ""]:
    r"""L_SQ (Eq. 17, squared): :math:`\sum_i (g(z_i) - g(z_i^+))^2` over the rows of all ranks."""
    first, second = g.chunk(2)
    return sum_over_ranks((first[:counted] - second[:counted]).square().sum())


def frozen(module: nn.Module, *args: Any) -> Tensor:
    """The module's output for ``args``, through which gradients reach ``args`` but not its weights."""
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in weights:
        parameter.requires_grad_(False)
    try:
        out: Tensor = module(*args)
    finally:
        for parameter in weights:
            parameter.requires_grad_(True)
    return out
