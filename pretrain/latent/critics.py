"""The critics f(x, z) and g(z): small networks that tell draws of the posterior from draws of the prior."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pretrain.latent.config import CriticSection
from pretrain.latent.critic_loss import CriticLoss
from pretrain.latent.mlp import LeakyMLP


class Values(NamedTuple):
    """f, and g where it is trained, at ``n`` draws of the posteriors (``q``) and as many of the prior (``p``)."""

    f_q: Float[Tensor, " n"]
    f_p: Float[Tensor, " n"]
    g_q: Float[Tensor, " n"] | None
    g_p: Float[Tensor, " n"] | None


class Rows(NamedTuple):
    """What g reads, draws of the posterior and then of the prior; and what f reads, each beside its x."""

    both: Float[Tensor, "m d"]
    beside_x: Float[Tensor, "m k"]


def rows_of(z: Float[Tensor, "n d"], h: Float[Tensor, "n k"], priors: Float[Tensor, "n_u d"]) -> list[Rows]:
    """Of u updates, put together at once: ``z`` and ``h`` are the same in all, each has n draws of the ``priors``."""
    updates = len(priors) // len(z)
    both = torch.cat([z.expand(updates, -1, -1), priors.view(updates, *z.shape)], dim=1)
    beside_x = torch.cat([both, h.repeat(2, 1).expand(updates, -1, -1)], dim=2)
    return [Rows(*pair) for pair in zip(both, beside_x, strict=True)]


class Trained(NamedTuple):
    """What a pass of training found: ``gradients`` of the ``parameters()``, ``clamped`` values on this rank."""

    loss: Float[Tensor, ""]
    clamped: Tensor
    gradients: list[Tensor]
    values: Values


class Critics(nn.Module):
    """f on ``[z; h(x)]`` and g on ``z``."""

    def __init__(self, latent: int, representation: int, section: CriticSection) -> None:
        super().__init__()
        hidden = [section.hidden] * section.layers
        self.f = LeakyMLP(latent + representation, *hidden, 1)
        self.g = LeakyMLP(latent, *hidden, 1) if section.trained == "both" else None

    def forward(self, rows: Rows, loss: CriticLoss) -> Trained:
        """What both minimise on ``rows``, with the gradients of their weights, which are found without autograd."""
        both, beside_x = rows
        gradients, (of_f, value, clamped) = self.f.trained_on(loss.of_f, beside_x)
        if self.g is None:
            return Trained(value, clamped, gradients, Values(of_f[0], of_f[1], None, None))
        more, (of_g, also, as_well) = self.g.trained_on(loss.of_g, both)
        values = Values(of_f[0], of_f[1], of_g[0], of_g[1])
        return Trained(value + also, clamped + as_well, gradients + more, values)

    def values(self, z: Float[Tensor, "n d"], h: Float[Tensor, "n k"], prior: Float[Tensor, "n d"]) -> Values:
        """Both critics at the posterior's and the prior's draws, the latter beside the same x."""
        ((both, beside_x),) = rows_of(z, h, prior)
        f_q, f_p = self.f(beside_x).view(2, -1).float().unbind()
        g_q, g_p = self.g(both).view(2, -1).float().unbind() if self.g is not None else (None, None)
        return Values(f_q, f_p, g_q, g_p)


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
