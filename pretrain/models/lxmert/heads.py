"""The heads on LXMERT: the pooler, those of the regions, and that of the answers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from capt.pretrain.models.lxmert.config import LxmertConfig


class Pooler(nn.Module):
    """tanh(W h + b) of the first word's final state, which the matching and the answer head read."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, first: Float[Tensor, "n h"]) -> Float[Tensor, "n h"]:
        """The pooled state of each pair."""
        return torch.tanh(self.dense(first))


class AnswerHead(nn.Module):
    """Logits of answers from pooled states: Linear, GELU, LayerNorm, Linear, the inner width being twice the encoder's.

    Args:
        hidden_size: width of the encoder, ``h``.
        answers: number of logits.
        inputs: columns of the input; ``2 h`` for NLVR2, whose input is the pooled states of two pairs.
        eps: of the LayerNorm.
    """

    def __init__(self, hidden_size: int, answers: int, *, inputs: int | None = None, eps: float = 1e-12) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size if inputs is None else inputs, 2 * hidden_size)
        self.norm = nn.LayerNorm(2 * hidden_size, eps=eps)
        self.outer = nn.Linear(2 * hidden_size, answers)

    def forward(self, pooled: Float[Tensor, "n i"]) -> Float[Tensor, "n answers"]:
        """One row of logits for each row of ``pooled``."""
        return self.outer(self.norm(F.gelu(self.inner(pooled))))  # type: ignore[no-any-return]


class RegionPredictions(NamedTuple):
    """What is predicted of each region; None for classes that the data do not have."""

    objects: Float[Tensor, "*rows objects"] | None
    attributes: Float[Tensor, "*rows attributes"] | None
    features: Float[Tensor, "*regressed f"]


class RegionHeads(nn.Module):
    """Object class, attribute class and feature of each region: one dense + GELU + LayerNorm, three linear maps."""

    def __init__(self, config: LxmertConfig) -> None:
        super().__init__()
        h, objects, attributes = config.hidden, config.known("object_classes"), config.known("attribute_classes")
        self.dense = nn.Linear(h, h)
        self.norm = nn.LayerNorm(h, eps=config.layer_norm_eps)
        self.objects = nn.Linear(h, objects) if objects else None
        self.attributes = nn.Linear(h, attributes) if attributes else None
        self.features = nn.Linear(h, config.known("feature_size"))

    def forward(self, hidden: Float[Tensor, "n R h"], regressed: Tensor | None = None) -> RegionPredictions:
        """Predictions for every region.

        Args:
            hidden: final states of the regions.
            regressed: flat positions (m) of the regions whose features are predicted, (m, f); None = all, (n, R, f).
        """
        x = self.norm(F.gelu(self.dense(hidden)))
        return RegionPredictions(
            None if self.objects is None else self.objects(x),
            None if self.attributes is None else self.attributes(x),
            self.features(x if regressed is None else x.flatten(0, -2)[regressed]),
        )
