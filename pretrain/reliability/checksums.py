"""Checksums of the bits of tensors: whether two ranks hold the same, in eight bytes a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 512
"""Words of a row. The words of a tensor are summed by rows and by columns, which reads memory at its full speed."""
_WORD = 8


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    r"""One number for each tensor, of its bits: two zeros of different signs differ, a NaN equals itself.

    A tensor is read as words $w_i$ of 64 bits; up to seven bytes that are left at its end are words of their own. The
    checksum is $\sum_i (2i+1)\,w_i \bmod 2^{64}$. The weights are odd, so any change within one word changes the
    checksum; that two words change places does too, unless the product of their distance and of their difference is a
    multiple of $2^{63}$.

    The host waits for the device once. All tensors lie on one device.
    """
    if not tensors:
        return []
    weights = torch.arange(1, 2 * (_ROW + _WORD), 2, dtype=torch.int64, device=tensors[0].device)
    return [int(number) for number in torch.stack([_checksum(tensor, weights) for tensor in tensors]).tolist()]


def _checksum(tensor: Tensor, weights: Tensor) -> Tensor:
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.storage_offset() % _WORD:  # words of 64 bits begin at multiples of eight bytes
        data = data.clone()
    whole = len(data) // _WORD
    words = data[: _WORD * whole].view(torch.int64)
    count = whole // _ROW
    rest = torch.cat([words[_ROW * count :], data[_WORD * whole :].to(torch.int64)])
    total = (rest * (weights[: len(rest)] + 2 * _ROW * count)).sum()
    if count:  # word j of row r has the weight 2 j + 1 + 2 * 512 r
        rows = words[: _ROW * count].view(count, _ROW)
        numbers = torch.arange(count, device=data.device)
        total = total + (rows.sum(0) * weights[:_ROW]).sum() + 2 * _ROW * (rows.sum(1) * numbers).sum()
    return total
