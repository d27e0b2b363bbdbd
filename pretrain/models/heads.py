"""What stands on the encoder: the masked-language-model head and CAPT's aggregation head."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pretrain.models.config import RobertaConfig
from pretrain.models.cross_entropy import masked_cross_entropy


class MLMOutput(NamedTuple):
    """Sums over the masked positions, so that they add up over micro-batches and ranks."""

    loss_sum: Tensor
    correct: Tensor
    used: Tensor


class MLMHead(nn.Module):
    """RoBERTa's language-model head: dense, GELU, LayerNorm, and the word embedding as the output matrix.

    The weight of ``word`` is registered here as well, the same Parameter: ZeRO-3 gathers the parameters of the
    module that runs, and the product with it runs here.
    """

    def __init__(self, config: RobertaConfig, word: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self.classes = config.classes
        self.weight = word.weight
        self.bias = nn.Parameter(torch.zeros(config.vocab_rows))

    def forward(self, hidden: Float[Tensor, "*rows h"], labels: Int[Tensor, "*rows"]) -> MLMOutput:
        """Cross entropy at the given positions only; a label of -100 marks a row that counts for nothing."""
        x = self._transform(hidden).flatten(0, -2)
        return MLMOutput(*masked_cross_entropy(x, self.weight, self.bias, labels.flatten(), self.classes))

    def logits(self, hidden: Float[Tensor, "*rows h"]) -> Float[Tensor, "*rows V"]:
        """Scores over the vocabulary, for whole (not ZeRO-3 partitioned) models."""
        return F.linear(self._transform(hidden), self.weight[: self.classes], self.bias[: self.classes])

    def _transform(self, hidden: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(hidden)))  # type: ignore[no-any-return]


class AggregationHead(nn.Module):
    r"""The aggregation layer of CAPT's Eq. 1, :math:`s(x) = A(h(x)) / \|A(h(x))\|`, with A = h -> ffn -> GELU -> h.

    Its input is the raw final hidden state of ``<s>`` (or the token mean), as in the paper's section 3.1 and Table 4.
    """

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.hidden, config.ffn)
        self.outer = nn.Linear(config.ffn, config.hidden)

    def forward(self, pooled: Float[Tensor, "n h"]) -> Float[Tensor, "n h"]:
        """Unit rows, normalised in fp32 because bf16 cannot tell similar directions apart at a temperature of .05."""
        y = self.outer(F.gelu(self.inner(pooled)))
        return F.normalize(y.to(torch.promote_types(y.dtype, torch.float32)), dim=-1, eps=1e-12)
