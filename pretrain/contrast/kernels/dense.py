"""The kernel in its plainest form, all logits at once, to compare ``chunked`` with. It needs N x c memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.contrast.kernels.products import FP32, Products, Terms, multiply, transpose
from pretrain.contrast.kernels.protocol import InstanceIds, SoftmaxSums, probabilities


def _product(a: Terms, b: Terms, dtype: torch.dtype) -> Tensor:
    return multiply(a[0].new_empty(len(a[0]), b[0].shape[1], dtype=dtype), a, b, add=False)


def accumulate(sums: SoftmaxSums, q: Tensor, keys: Tensor, ids: InstanceIds | None, products: Products = FP32) -> None:
    """Implement :meth:`~pretrain.contrast.kernels.protocol.Kernel.accumulate`."""
    if not len(q) or not len(keys):
        return
    dtype = sums.normaliser.dtype
    k = products.split(keys, dtype)
    weights = sums.exponentials(_product(products.split(q, dtype), transpose(k), dtype), ids)
    sums.add(weights)
    if sums.weighted_keys is not None:
        sums.weighted_keys.add_(_product(products.split(weights, dtype), k, dtype))


def key_gradient(q: Tensor, keys: Tensor, lse: Tensor, ids: InstanceIds | None, products: Products = FP32) -> Tensor:
    """Implement :meth:`~pretrain.contrast.kernels.protocol.Kernel.key_gradient`."""
    anchors = products.split(q, lse.dtype)
    logits = _product(anchors, transpose(products.split(keys, lse.dtype)), lse.dtype)
    weights = products.split(probabilities(logits, lse, ids), lse.dtype)
    return _product(transpose(weights), anchors, lse.dtype)
