"""Multi-head self-attention, for all positions or for the few that are read."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pretrain.models.config import RobertaConfig


def attend(
    q: Float[Tensor, "b heads r e"],
    k: Float[Tensor, "b heads L e"],
    v: Float[Tensor, "b heads L e"],
    mask: Bool[Tensor, "b 1 q L"] | None,
    dropout: float,
) -> Float[Tensor, "b heads r e"]:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)

class SelfAttention(nn.Module):
    def __init__(self, config: RobertaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key_value = nn.Linear(config.hidden, 2 * config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)

    def forward(self, x, rows_x, mask):
        b, length, h = x.shape
        q = self.query(rows_x).view(b, -1, self.heads, h // self.heads).transpose(1, 2)
        k, v = self.key_value(x).view(b, length, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0)
        return self.output(y.transpose(1, 2).reshape(b, -1, h))
