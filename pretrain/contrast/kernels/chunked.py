"""The kernel in plain torch, block by block: two matrix products a block and no tensor larger than a workspace.

A block of logits is exponentiated where it lies and multiplied with the same keys while both are in cache, so that the
forward pass already holds the gradient: 4 N c d floating-point operations, where recomputing designs need 6.
On a GPU, bfloat16 operands are multiplied by the tensor cores into float32 logits and float32 sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pretrain.contrast.kernels.protocol import Ids

# Anchors a block and logits a block. On a CPU one block of logits (1 MB in fp32) fits the second-level cache of a core
# beside the panels of the matrix product; on a GPU a block must be large enough to fill the device (64 MB in fp32).
# Measured in docs/benchmarks/contrast.md.
_ROWS = {"cpu": 256, "cuda": 4096}
_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}


def _blocks(anchors: int, keys: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cut anchors x keys into blocks, keys outermost; a block never spans more than an eighth of the keys."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    rows = max(1, min(anchors, _ROWS[kind]))
    columns = max(1, min(_ELEMENTS[kind] // rows, math.ceil(keys / 8)))
    for k in range(0, keys, columns):
        for a in range(0, anchors, rows):
            yield slice(a, min(a + rows, anchors)), slice(k, min(k + columns, keys))


def _multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """``out = a b`` or ``out += a b``, accumulated in the dtype of ``out``."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _logits(workspace: Tensor, q: Tensor, keys: Tensor, ids: Ids, rows: slice, columns: slice) -> Tensor:
    block = workspace[: (rows.stop - rows.start) * len(keys)].view(-1, len(keys))
    _multiply(block, q[rows], keys.T, add=False)
    if ids is not None:
        block.masked_fill_(ids[0][rows, None] == ids[1][None, columns], -torch.inf)
    return block


def _workspace(q: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    largest = max(((r.stop - r.start) * (c.stop - c.start) for r, c in _blocks(len(q), len(keys), q.device)), default=0)
    return q.new_empty(largest, dtype=dtype)


def accumulate(sums: Tensor, reference: Tensor | None, q: Tensor, keys: Tensor, ids: Ids) -> None:
    """See :class:`~pretrain.contrast.kernels.protocol.Kernel`."""
    workspace = _workspace(q, keys, sums.dtype)
    for rows, columns in _blocks(len(q), len(keys), q.device):
        k = keys[columns].to(q.dtype)
        weights = _logits(workspace, q, k, ids, rows, columns)
        mean, normaliser = sums[rows, :-1], sums[rows, -1]
        if reference is not None:
            highest = torch.maximum(reference[rows], weights.amax(1))
            sums[rows] *= torch.exp(reference[rows] - highest)[:, None]
            reference[rows] = highest
            weights -= highest[:, None]
        weights.exp_()
        normaliser += weights.sum(1)
        if mean.shape[1]:
            _multiply(mean, weights.to(q.dtype), k, add=True)


def key_gradient(q: Tensor, keys: Tensor, lse: Tensor, ids: Ids) -> Tensor:
    """See :class:`~pretrain.contrast.kernels.protocol.Kernel`."""
    out = keys.new_zeros(keys.shape, dtype=lse.dtype)
    workspace = _workspace(q, keys, lse.dtype)
    for rows, columns in _blocks(len(q), len(keys), q.device):
        weights = _logits(workspace, q, keys[columns].to(q.dtype), ids, rows, columns)
        weights.sub_(lse[rows, None]).exp_()
        _multiply(out[columns], weights.T.to(q.dtype), q[rows], add=True)
    return out
