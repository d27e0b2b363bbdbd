"""The critics f(x, z) and g(z): small networks that tell draws of the posterior from draws of the prior."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pretrain.latent.config import CriticSection
from pretrain.latent.models.mlp import mlp


class CriticValues(NamedTuple):
    """Values of the critics, in float32 at least, at n draws of the posteriors (``q``) and of the prior (``p``).

    ``g_q`` and ``g_p`` are None where g is not trained.
    """

    f_q: Float[Tensor, " n"]
    f_p: Float[Tensor, " n"]
    g_q: Float[Tensor, " n"] | None
    g_p: Float[Tensor, " n"] | None


class Critics(nn.Module):
    """f on ``[z; h(x)]`` and g on ``z``."""

    def __init__(self, latent: int, representation: int, section: CriticSection) -> None:
        super().__init__()
        hidden = [section.hidden] * section.layers
        self.f = mlp(latent + representation, *hidden, 1)
        self.g = mlp(latent, *hidden, 1) if section.trained == "both" else None

    def forward(self, z: Float[Tensor, "n d"], h: Float[Tensor, "n k"], prior: Float[Tensor, "n d"]) -> CriticValues:
        """Evaluate both critics at draws of the posteriors and of the prior, each beside the ``h`` of its x."""
        draws = torch.cat([z, prior])
        f_q, f_p = _at_least_fp32(self.f(torch.cat([draws, h.repeat(2, 1)], dim=1))).view(2, -1).unbind()
        if self.g is None:
            return CriticValues(f_q, f_p, None, None)
        g_q, g_p = _at_least_fp32(self.g(draws)).view(2, -1).unbind()
        return CriticValues(f_q, f_p, g_q, g_p)


def _at_least_fp32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
