"""The synthetic clusters (section 4.4 and the released toy): one-hot vectors of K classes, two latent dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.engine.seeding import derive
from pretrain.latent.config import LatentJob, ModelSection
from pretrain.latent.data.batches import Batch
from pretrain.latent.models.mlp import LeakyMLP
from pretrain.latent.models.posterior import Encoded, GaussianHead


def _elu_layers(*widths: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ELU()]
    return layers


class ClusterEncoder(nn.Module):
    """``[x; noise]`` through three hidden layers to z (LeakyReLU); or x to a Gaussian's parameters (ELU)."""

    one_hot: Tensor

    def __init__(self, classes: int, section: ModelSection) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("one_hot", torch.eye(classes), persistent=False)
        hidden = [section.hidden] * 3
        self.head = GaussianHead(section.hidden, section.latent) if section.posterior == "gaussian" else None
        self.layers = (
            LeakyMLP(classes + section.noise, *hidden, section.latent)
            if self.head is None
            else nn.Sequential(*_elu_layers(classes, *hidden))
        )

    def forward(self, tokens: Int[Tensor, "n 1"], eps: Float[Tensor, "n e"], keep: Tensor | None = None) -> Encoded:
        """Encode class numbers; ``h`` is the one-hot vector itself, which f sees."""
        x = F.embedding(tokens[:, 0], self.one_hot)
        if self.head is not None:
            z, _, density = self.head(self.layers(x), eps)
            return Encoded(z, x, density)
        return Encoded(self.layers(torch.cat([x, eps], dim=1)), x, None)


class ClusterDecoder(nn.Module):
    """K independent probabilities of z; -log p(x | z) is the binary cross entropy summed over them."""

    one_hot: Tensor

    def __init__(self, classes: int, section: ModelSection) -> None:
        super().__init__()
        self.register_buffer("one_hot", torch.eye(classes), persistent=False)
        widths = [section.latent, *[section.hidden] * 3]
        self.layers = (
            nn.Sequential(*_elu_layers(*widths), nn.Linear(section.hidden, classes))
            if section.posterior == "gaussian"
            else LeakyMLP(*widths, classes)
        )

    def forward(
        self, z: Float[Tensor, "n d"], tokens: Int[Tensor, "n 1"], counted: Tensor,
        keep: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Float[Tensor, ""]:  # fmt: skip
        """Sum of -log p(x | z) over the rows that ``counted`` marks."""
        return self._cross_entropy(z, tokens, weight=counted[:, None].float(), reduction="sum")

    def log_likelihood(self, z: Float[Tensor, "n d"], tokens: Int[Tensor, "n 1"]) -> Float[Tensor, " n"]:
        """log p(x | z) of each row."""
        return -self._cross_entropy(z, tokens, reduction="none").sum(1)

    def _cross_entropy(self, z: Tensor, tokens: Tensor, **how: Any) -> Tensor:
        x = F.embedding(tokens[:, 0], self.one_hot)
        return F.binary_cross_entropy_with_logits(self.layers(z), x, **how)


def cluster_batches(job: LatentJob, step: int, rank: int, world: int) -> Iterator[Batch]:
    """This rank's rows of the batch of each step from ``step`` on: K classes drawn with replacement, each repeated."""
    classes, repeats = job.data.clusters, job.data.repeats
    assert classes is not None
    total = classes * repeats
    rows = torch.arange(rank, total, world)
    while True:
        generator = torch.Generator().manual_seed(derive(job.run.seed, "clusters", step))
        drawn = torch.randint(0, classes, (classes, 1), generator=generator).expand(-1, repeats).reshape(-1, 1)
        yield Batch(drawn[rank::world], rows, len(rows), total)
        step += 1
