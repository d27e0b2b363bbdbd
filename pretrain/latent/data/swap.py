"""The swap augmentation of Table 7: adjacent words of the second view change places."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from pretrain.latent.data.padding import ends_of


def swapped(tokens: Int[Tensor, "n length"], swaps: Bool[Tensor, "n length"]) -> Int[Tensor, "n length"]:
    """Exchange the words at i and i + 1 where ``swaps[:, i]``, from left to right; a word moves at most once.

    ``<s>``, ``</s>`` and what follows it stay. The released code has no such augmentation; this follows section 4.7 of
    the paper.
    """
    out = tokens.clone()
    moved = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    ends = ends_of(tokens)
    for i in range(1, tokens.shape[1] - 2):
        now = swaps[:, i] & ~moved & (i + 1 < ends)
        left, right = out[:, i].clone(), out[:, i + 1].clone()
        out[:, i], out[:, i + 1] = torch.where(now, right, left), torch.where(now, left, right)
        moved = now
    return out
