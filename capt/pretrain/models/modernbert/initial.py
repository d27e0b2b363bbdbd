"""Initial weights of ModernBERT."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from capt.pretrain.models.heads import MLMHead, WordEmbedding


class ResidualOutput(nn.Linear):
    """A matrix without bias whose output is added to the residual stream."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows, bias=False)


_CUT = 2.0
"""Standard deviations beyond which no weight begins."""


@torch.no_grad()
def initialise_weights(module: nn.Module, std: float, layers: int) -> None:
    """ModernBERT's initialisation in transformers, in place: normal, cut at two standard deviations.

    Matrices whose output is added to the residual stream, and that of the language-model head, have the deviation
    ``std`` / sqrt(2 ``layers``), others ``std``. The row of padding and biases are 0.
    """
    narrow = std / math.sqrt(2.0 * layers)
    heads = {part.dense for part in module.modules() if isinstance(part, MLMHead)}
    for part in module.modules():
        if isinstance(part, nn.Linear):
            _draw(part.weight, narrow if isinstance(part, ResidualOutput) or part in heads else std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, WordEmbedding):
            _draw(part.weight[: part.classes], std)
            nn.init.zeros_(part.weight[part.classes :])
            nn.init.zeros_(part.weight[part.padding_idx])


def _draw(weight: Tensor, std: float) -> None:
    """Invert the distribution function: torch's own ``trunc_normal_`` reads values, which a plan does not have."""
    bound = math.erf(_CUT / math.sqrt(2.0))
    weight.uniform_(-bound, bound).erfinv_().mul_(math.sqrt(2.0) * std).clamp_(-_CUT * std, _CUT * std)
