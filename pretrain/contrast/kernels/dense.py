"""The kernel in its plainest form, all logits at once: what ``chunked`` is compared with. It needs N x c memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.contrast.kernels.protocol import Ids, Sums, probabilities


def _logits(q: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    return (q @ keys.to(q.dtype).T).to(dtype)


def accumulate(sums: Sums, q: Tensor, keys: Tensor, ids: Ids | None) -> None:
    """See :class:`~pretrain.contrast.kernels.protocol.Kernel`."""
    if not len(q) or not len(keys):
        return
    weights = sums.exponentials(_logits(q, keys, sums.normaliser.dtype), ids)
    sums.normaliser.add_(weights.sum(1))
    if sums.weighted is not None:
        sums.weighted.add_(weights @ keys.to(weights.dtype))


def key_gradient(q: Tensor, keys: Tensor, lse: Tensor, ids: Ids | None) -> Tensor:
    """See :class:`~pretrain.contrast.kernels.protocol.Kernel`."""
    return probabilities(_logits(q, keys, lse.dtype), lse, ids).T @ q.to(lse.dtype)
