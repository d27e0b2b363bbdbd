"""The kernel in its plainest form, all logits at once: what ``chunked`` is compared with. It needs N x c memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.contrast.kernels.products import WHOLE, Products, Terms, multiply
from pretrain.contrast.kernels.protocol import Ids, Sums, probabilities


def _product(a: Terms, b: Terms, dtype: torch.dtype) -> Tensor:
    return multiply(a[0].new_empty(len(a[0]), b[0].shape[1], dtype=dtype), a, b, add=False)


def _transposed(terms: Terms) -> Terms:
    return tuple(term.T for term in terms)


def accumulate(sums: Sums, q: Tensor, keys: Tensor, ids: Ids | None, products: Products = WHOLE) -> None:
    """See :class:`~pretrain.contrast.kernels.protocol.Kernel`."""
    if not len(q) or not len(keys):
        return
    dtype = sums.normaliser.dtype
    k = products.split(keys, dtype)
    weights = sums.exponentials(_product(products.split(q, dtype), _transposed(k), dtype), ids)
    sums.normaliser.add_(weights.sum(1))
    if sums.weighted is not None:
        sums.weighted.add_(_product(products.split(weights, dtype), k, dtype))


def key_gradient(q: Tensor, keys: Tensor, lse: Tensor, ids: Ids | None, products: Products = WHOLE) -> Tensor:
    """See :class:`~pretrain.contrast.kernels.protocol.Kernel`."""
    anchors = products.split(q, lse.dtype)
    logits = _product(anchors, _transposed(products.split(keys, lse.dtype)), lse.dtype)
    weights = products.split(probabilities(logits, lse, ids), lse.dtype)
    return _product(_transposed(weights), anchors, lse.dtype)
