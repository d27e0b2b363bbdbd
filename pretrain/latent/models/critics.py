"""The critics f(x, z) and g(z): small networks that tell draws of the posterior from draws of the prior."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pretrain.latent.config import CriticSection
from pretrain.latent.models.mlp import LeakyMLP
from pretrain.latent.objectives.critic import CriticLoss


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
    updates, (n, latent) = len(priors) // len(z), z.shape
    beside_x = torch.cat([z, h], dim=1).expand(updates, 2, -1, -1).contiguous()
    beside_x[:, 1, :, :latent] = priors.view(updates, n, latent)
    rows = beside_x.view(updates, 2 * n, -1)
    return [Rows(of_g, of_f) for of_g, of_f in zip(rows[..., :latent], rows, strict=True)]


class Trained(NamedTuple):
    """What a pass of training found: ``gradients`` of the ``parameters()``, and the values that they came from."""

    gradients: list[Tensor]
    f: Float[Tensor, "m 1"]
    g: Float[Tensor, "m 1"] | None


class Critics(nn.Module):
    """f on ``[z; h(x)]`` and g on ``z``."""

    def __init__(self, latent: int, representation: int, section: CriticSection) -> None:
        super().__init__()
        hidden = [section.hidden] * section.layers
        self.f = LeakyMLP(latent + representation, *hidden, 1)
        self.g = LeakyMLP(latent, *hidden, 1) if section.trained == "both" else None

    def forward(self, rows: Rows, of_f: CriticLoss, of_g: CriticLoss | None) -> Trained:
        """Both at ``rows``, with the gradients of what they minimise, which are found without autograd."""
        gradients, f = self.f.trained_on(of_f.gradient, rows.beside_x)
        if self.g is None or of_g is None:
            return Trained(gradients, f, None)
        more, g = self.g.trained_on(of_g.gradient, rows.both)
        return Trained(gradients + more, f, g)

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
