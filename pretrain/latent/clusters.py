"""The synthetic clusters (section 4.4 and the released toy): one-hot vectors of K classes, two latent dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.engine.seeding import derive
from pretrain.latent.batches import Batch
from pretrain.latent.config import LatentJob, ModelSection
from pretrain.latent.posterior import Encoded, GaussianHead


def _layers(widths: list[int], activation: type[nn.Module]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return layers


class ClusterEncoder(nn.Module):
    """``[x; noise]`` through three hidden layers to z (LeakyReLU); or x to a Gaussian's parameters (ELU)."""

    def __init__(self, classes: int, section: ModelSection) -> None:
        super().__init__()
        self.classes = classes
        gaussian = section.posterior == "gaussian"
        inputs = classes if gaussian else classes + section.noise
        widths = [inputs, *[section.hidden] * 3]
        self.layers = nn.Sequential(*_layers(widths, nn.ELU if gaussian else nn.LeakyReLU))
        self.head = (
            GaussianHead(section.hidden, section.latent) if gaussian else nn.Linear(section.hidden, section.latent)
        )

    def forward(self, tokens: Int[Tensor, "n 1"], eps: Float[Tensor, "n e"], keep: Tensor | None = None) -> Encoded:
        """Encode class numbers; ``h`` is the one-hot vector itself, which f sees."""
        x = F.one_hot(tokens[:, 0], self.classes).float()
        if isinstance(self.head, GaussianHead):
            z, _, density = self.head(self.layers(x), eps)
            return Encoded(z, x, density)
        return Encoded(self.head(self.layers(torch.cat([x, eps], dim=1))), x, None)


class ClusterDecoder(nn.Module):
    """K independent probabilities of z; -log p(x | z) is the binary cross entropy summed over them."""

    def __init__(self, classes: int, section: ModelSection) -> None:
        super().__init__()
        self.classes = classes
        activation = nn.ELU if section.posterior == "gaussian" else nn.LeakyReLU
        widths = [section.latent, *[section.hidden] * 3]
        self.layers = nn.Sequential(*_layers(widths, activation), nn.Linear(section.hidden, classes))

    def forward(
        self, z: Float[Tensor, "n d"], tokens: Int[Tensor, "n 1"], counted: Tensor,
        keep: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Float[Tensor, ""]:  # fmt: skip
        """Sum of -log p(x | z) over the rows that ``counted`` marks."""
        return -(self.log_likelihood(z, tokens) * counted).sum()

    def log_likelihood(self, z: Float[Tensor, "n d"], tokens: Int[Tensor, "n 1"]) -> Float[Tensor, " n"]:
        """log p(x | z) of each row."""
        x = F.one_hot(tokens[:, 0], self.classes).float()
        return -F.binary_cross_entropy_with_logits(self.layers(z), x, reduction="none").sum(1)


def cluster_batches(job: LatentJob, step: int, rank: int, world: int) -> Iterator[Batch]:
    """This rank's rows of the batch of each step from ``step`` on: K classes drawn with replacement, each repeated."""
    classes, repeats = job.data.clusters, job.data.repeats
    assert classes is not None
    total = classes * repeats
    rows = torch.arange(rank, total, world)
    while True:
        generator = torch.Generator().manual_seed(derive(job.run.seed, "clusters", step))
        drawn = torch.randint(0, classes, (classes,), generator=generator).repeat_interleave(repeats)
        yield Batch(drawn[rows, None], rows, len(rows), total)
        step += 1
