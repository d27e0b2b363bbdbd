"""The kernel in plain torch, block by block: two matrix products a block and no tensor but of a block's size.

A block of logits is exponentiated in place and multiplied with the same keys while both are in cache, so that the
forward pass already holds the gradient: 4 N c d floating-point operations, where recomputing designs need 6.
Logits and sums are fp32 (fp64 for fp64 rows), in whatever precision the operands are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pretrain.contrast.kernels.products import FP32, Products, Terms, multiply, transpose
from pretrain.contrast.kernels.protocol import InstanceIds, SoftmaxSums, probabilities

# Anchors by keys of the largest block. Wider blocks make better matrix products, up to what these sizes give; on a CPU
# the logits (4 MB in fp32) should stay in cache between the two products, on a GPU a block must fill the device.
_LARGEST_BLOCK = {"cpu": (1024, 1024), "cuda": (4096, 8192)}


def _blocks(q: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut anchors x keys into blocks, with the loop over keys outermost.

    However small the problem, a block has at most ``4 d`` anchors and an eighth of the keys: half the size of the keys.
    """
    largest = _LARGEST_BLOCK["cuda" if q.is_cuda else "cpu"]
    rows = max(1, min(len(q), largest[0], 4 * q.shape[1]))
    columns = max(1, min(largest[1], math.ceil(len(keys) / 8)))
    for k in range(0, len(keys), columns):
        for a in range(0, len(q), rows):
            yield slice(a, min(a + rows, len(q))), slice(k, min(k + columns, len(keys)))


def _logits(workspace: Tensor, q: Terms, keys: Terms) -> Tensor:
    block = workspace[: len(q[0]) * len(keys[0])].view(-1, len(keys[0]))
    return multiply(block, q, transpose(keys), add=False)


def _workspace(q: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = next(_blocks(q, keys), (slice(0, 0), slice(0, 0)))  # the first block is the largest
    return q.new_empty(rows.stop * columns.stop, dtype=dtype)


def _split_blocks(
    q: Tensor, keys: Tensor, products: Products, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, Terms, Terms]]:
    """Yield the blocks with the operands of each. Anchors are split once, and keys once per columns of blocks."""
    q_terms = products.split(q, dtype)
    k_terms: Terms = ()
    split_columns = None
    for rows, columns in _blocks(q, keys):
        if columns != split_columns:
            k_terms, split_columns = products.split(keys[columns], dtype), columns
        yield rows, columns, tuple(term[rows] for term in q_terms), k_terms


def accumulate(sums: SoftmaxSums, q: Tensor, keys: Tensor, ids: InstanceIds | None, products: Products = FP32) -> None:
    """Implement :meth:`~pretrain.contrast.kernels.protocol.Kernel.accumulate`."""
    dtype = sums.normaliser.dtype
    workspace = _workspace(q, keys, dtype)
    for rows, columns, anchors, k in _split_blocks(q, keys, products, dtype):
        block = sums[rows]
        weights = block.exponentials(_logits(workspace, anchors, k), ids and ids.block(rows, columns))
        block.add(weights)
        if block.weighted_keys is not None:
            multiply(block.weighted_keys, products.split(weights, dtype), k, add=True)


def key_gradient(q: Tensor, keys: Tensor, lse: Tensor, ids: InstanceIds | None, products: Products = FP32) -> Tensor:
    """Implement :meth:`~pretrain.contrast.kernels.protocol.Kernel.key_gradient`."""
    out = keys.new_zeros(keys.shape, dtype=lse.dtype)
    workspace = _workspace(q, keys, lse.dtype)
    for rows, columns, anchors, k in _split_blocks(q, keys, products, lse.dtype):
        weights = probabilities(_logits(workspace, anchors, k), lse[rows], ids and ids.block(rows, columns))
        multiply(out[columns], transpose(products.split(weights, lse.dtype)), anchors, add=True)
    return out
