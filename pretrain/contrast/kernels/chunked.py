"""The kernel in plain torch, block by block: two matrix products a block and no tensor but of a block's size.

A block of logits is exponentiated where it lies and multiplied with the same keys while both are in cache, so that the
forward pass already holds the gradient: 4 N c d floating-point operations, where recomputing designs need 6.
On a GPU, bfloat16 operands are multiplied by the tensor cores into float32 logits and float32 sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pretrain.contrast.kernels.protocol import Ids, Sums, probabilities

# Anchors by keys of the largest block. Wider blocks make better matrix products, up to what these sizes give; on a CPU
# the logits (4 MB in fp32) should stay in cache between the two products, on a GPU a block must fill the device.
_LARGEST = {"cpu": (1024, 1024), "cuda": (4096, 8192)}


def _blocks(q: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut anchors x keys into blocks, keys outermost.

    However small the problem, a block has at most ``4 d`` anchors and an eighth of the keys: half the size of the keys.
    """
    largest = _LARGEST["cuda" if q.is_cuda else "cpu"]
    rows = max(1, min(len(q), largest[0], 4 * q.shape[1]))
    columns = max(1, min(largest[1], math.ceil(len(keys) / 8)))
    for k in range(0, len(keys), columns):
        for a in range(0, len(q), rows):
            yield slice(a, min(a + rows, len(q))), slice(k, min(k + columns, len(keys)))


def _multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """``out = a b`` or ``out += a b``, accumulated in the dtype of ``out``."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _logits(workspace: Tensor, q: Tensor, keys: Tensor) -> Tensor:
    block = workspace[: len(q) * len(keys)].view(-1, len(keys))
    _multiply(block, q, keys.T, add=False)
    return block


def _workspace(q: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = next(_blocks(q, keys), (slice(0, 0), slice(0, 0)))  # the first block is the largest
    return q.new_empty(rows.stop * columns.stop, dtype=dtype)


def accumulate(sums: Sums, q: Tensor, keys: Tensor, ids: Ids | None) -> None:
    """See :class:`~pretrain.contrast.kernels.protocol.Kernel`."""
    workspace = _workspace(q, keys, sums.normaliser.dtype)
    for rows, columns in _blocks(q, keys):
        k, block = keys[columns].to(q.dtype), sums[rows]
        weights = block.exponentials(_logits(workspace, q[rows], k), ids and ids.of(rows, columns))
        block.normaliser.add_(weights.sum(1))
        if block.weighted is not None:
            _multiply(block.weighted, weights.to(q.dtype), k, add=True)


def key_gradient(q: Tensor, keys: Tensor, lse: Tensor, ids: Ids | None) -> Tensor:
    """See :class:`~pretrain.contrast.kernels.protocol.Kernel`."""
    out = keys.new_zeros(keys.shape, dtype=lse.dtype)
    workspace = _workspace(q, keys, lse.dtype)
    for rows, columns in _blocks(q, keys):
        logits = _logits(workspace, q[rows], keys[columns].to(q.dtype))
        weights = probabilities(logits, lse[rows], ids and ids.of(rows, columns))
        _multiply(out[columns], weights.T.to(q.dtype), q[rows], add=True)
    return out
