"""The kernel in its plainest form, all logits at once: what ``chunked`` is compared with. It needs N x c memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.contrast.kernels.protocol import Ids, Sums


def _logits(q: Tensor, keys: Tensor, ids: Ids, dtype: torch.dtype) -> Tensor:
    logits = (q @ keys.to(q.dtype).T).to(dtype)
    if ids is not None:
        logits.masked_fill_(ids[0][:, None] == ids[1][None, :], -torch.inf)
    return logits


def accumulate(sums: Sums, q: Tensor, keys: Tensor, ids: Ids) -> None:
    """See :class:`~pretrain.contrast.kernels.protocol.Kernel`."""
    if not len(q) or not len(keys):
        return
    logits = _logits(q, keys, ids, sums.normaliser.dtype)
    if sums.reference is not None:
        logits -= sums.raise_reference(logits.amax(1))[:, None]
    weights = logits.exp_()
    sums.normaliser.add_(weights.sum(1))
    if sums.weighted is not None:
        sums.weighted.add_(weights @ keys.to(weights.dtype))


def key_gradient(q: Tensor, keys: Tensor, lse: Tensor, ids: Ids) -> Tensor:
    """See :class:`~pretrain.contrast.kernels.protocol.Kernel`."""
    return _logits(q, keys, ids, lse.dtype).sub_(lse[:, None]).exp_().T @ q.to(lse.dtype)
