"""Encoder and decoder of the synthetic clusters (section 4.4 of the paper, and its released toy)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.latent.config import ModelSection
from pretrain.latent.models.mlp import mlp
from pretrain.latent.models.posterior import EncoderOutput, GaussianHead


class ClusterEncoder(nn.Module):
    """Three hidden layers from ``[x; noise]`` to z (LeakyReLU), or from x to the parameters of a Gaussian (ELU)."""

    one_hot: Tensor

    def __init__(self, classes: int, section: ModelSection) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("one_hot", torch.eye(classes), persistent=False)
        hidden = [section.hidden] * 3
        self.head = GaussianHead(section.hidden, section.latent) if section.posterior == "gaussian" else None
        self.layers = (
            mlp(classes + section.noise, *hidden, section.latent)
            if self.head is None
            else nn.Sequential(*mlp(classes, *hidden, activation=nn.ELU), nn.ELU())
        )

    def forward(self, tokens: Int[Tensor, "n 1"], eps: Float[Tensor, "n e"], dropout: None = None) -> EncoderOutput:
        """Encode class numbers; the representation ``h``, which f reads, is the one-hot vector itself."""
        x = F.embedding(tokens[:, 0], self.one_hot)
        if self.head is not None:
            z, _, density = self.head(self.layers(x), eps)
            return EncoderOutput(z, x, density)
        return EncoderOutput(self.layers(torch.cat([x, eps], dim=1)), x, None)


class ClusterDecoder(nn.Module):
    """K independent class probabilities given z; -log p(x | z) is their binary cross entropy, summed over classes."""

    one_hot: Tensor

    def __init__(self, classes: int, section: ModelSection) -> None:
        super().__init__()
        self.register_buffer("one_hot", torch.eye(classes), persistent=False)
        activation = nn.ELU if section.posterior == "gaussian" else nn.LeakyReLU
        self.layers = mlp(section.latent, *[section.hidden] * 3, classes, activation=activation)

    def forward(
        self, z: Float[Tensor, "n d"], tokens: Int[Tensor, "n 1"], valid: Bool[Tensor, " n"],
        dropout: tuple[None, None] = (None, None),
    ) -> Float[Tensor, ""]:  # fmt: skip
        """The sum of -log p(x | z) over the valid rows."""
        return self._cross_entropy(z, tokens, weight=valid[:, None].float(), reduction="sum")

    def log_likelihood(self, z: Float[Tensor, "n d"], tokens: Int[Tensor, "n 1"]) -> Float[Tensor, " n"]:
        """Compute log p(x | z) of each row."""
        return -self._cross_entropy(z, tokens, reduction="none").sum(1)

    def _cross_entropy(self, z: Tensor, tokens: Tensor, **options: Any) -> Tensor:
        x = F.embedding(tokens[:, 0], self.one_hot)
        return F.binary_cross_entropy_with_logits(self.layers(z), x, **options)
