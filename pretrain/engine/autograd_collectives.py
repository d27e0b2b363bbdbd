"""Sums over the ranks that autograd can differentiate.

The engine averages the gradients of the ranks, and every rank holds the same loss of the whole batch. The backward pass
here adds up what the ranks' copies of that loss ask for; the average is then the gradient of the one loss.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from capt.pretrain.base import distributed


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return distributed.all_reduce_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return distributed.all_reduce_sum(grads[0])


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors, which have one shape, on every rank."""
    if distributed.world_size() == 1:
        return x
    summed: Tensor = _SumOverRanks.apply(x)
    return summed


class _Log1pSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        padded = F.pad(x, (1, 0))  # the 1 is the exponential of 0
        if distributed.world_size() == 1:
            ctx.save_for_backward(torch.softmax(padded, 1)[:, 1:])
            return -torch.log_softmax(padded, 1)[:, 0]
        running_max = distributed.all_reduce_max(padded.amax(1))
        weights = torch.exp(padded - running_max[:, None])  # beside a large log, fp32 does not hold the log of a sum
        total = distributed.all_reduce_sum(weights[:, 1:].sum(1)) + weights[:, 0]
        ctx.save_for_backward(weights[:, 1:] / total[:, None])
        return running_max + torch.log(total)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (softmax,) = ctx.saved_tensors
        summed: Tensor = distributed.all_reduce_sum(grads[0])[:, None] * softmax
        return summed


def log1p_sum_exp(x: Float[Tensor, "v n"]) -> Float[Tensor, " v"]:
    r"""Return :math:`\log(1 + \sum_i e^{x_{vi}})` over the columns of all ranks; a rank may hold any number of them."""
    summed: Tensor = _Log1pSumExp.apply(x)
    return summed
