"""Checksums of the bits of tensors: whether two ranks hold the same, in eight bytes a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE = 1 << 20
"""Words that are multiplied at once: 4 MiB, whatever the size of the tensor."""


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    r"""One number for each tensor, of its bits: two zeros of different signs differ, a NaN equals itself.

    A tensor is read as words $w_i$ of 32 bits, those of narrower types one by one, in pieces of $2^{20}$. Piece $p$ has
    the sum $S_p = \sum_i ((2i+1)\,w_i \bmod 2^{32})$, and the checksum is $\sum_p (2p+1)\,S_p \bmod 2^{64}$. The
    weights are odd, so any change within one word changes the checksum; that two elements change places does too,
    unless the product of their distance and of the difference of their words is a multiple of $2^{31}$.

    The host waits for the device once. All tensors lie on one device.
    """
    if not tensors:
        return []
    largest = max(_words(tensor).numel() for tensor in tensors)
    weights = torch.arange(1, 2 * min(largest, _PIECE), 2, dtype=torch.int32, device=tensors[0].device)
    return [int(number) for number in torch.stack([_checksum(tensor, weights) for tensor in tensors]).tolist()]


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    return flat.view(torch.int32 if size >= 4 else torch.int16 if size == 2 else torch.int8)


def _checksum(tensor: Tensor, weights: Tensor) -> Tensor:
    pieces = _words(tensor).split(_PIECE)
    sums = [(piece.to(torch.int32) * weights[: len(piece)]).sum() for piece in pieces]
    total: Tensor = (torch.stack(sums) * torch.arange(1, 2 * len(sums), 2, device=tensor.device)).sum()
    return total
