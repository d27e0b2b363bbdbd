"""Sums over the ranks, with their gradients.

The engine averages the gradients of the ranks, and every rank holds the same loss of the whole batch. The backward pass
here adds up what the ranks' copies of that loss ask for; the average is then the gradient of the one loss.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pretrain.engine import distributed


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return distributed.all_reduce_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return distributed.all_reduce_sum(grads[0])


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of the ranks' tensors of one shape, on every rank."""
    if distributed.world_size() == 1:
        return x
    summed: Tensor = _SumOverRanks.apply(x)
    return summed


def log1p_sum_exp(padded: Float[Tensor, "v m"]) -> Float[Tensor, " v"]:
    r""":math:`\log(1 + \sum_i e^{x_{vi}})` over the columns of all ranks (each may hold another number, or none).

    Args:
        padded: x behind a column of zeros, whose exponential is the 1.
    """
    if distributed.world_size() == 1:
        return -torch.log_softmax(padded, 1)[:, 0]  # one kernel
    _, highest, total = _sum_exp(padded)
    return highest + torch.log(total)


def shares_of_sum_exp(padded: Float[Tensor, "v m"]) -> Float[Tensor, "v n"]:
    r"""The gradient of :func:`log1p_sum_exp`, :math:`e^{x_{vi}} / (1 + \sum_i e^{x_{vi}})`, of the columns of x."""
    if distributed.world_size() == 1:  # exp alone takes ten times as long wherever it underflows
        return torch.softmax(padded, 1)[:, 1:]
    weights, _, total = _sum_exp(padded)
    return weights / total[:, None]


def _sum_exp(padded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """:math:`e^{x - h}`, the highest x (or 0) of all ranks h, and the sum of all ranks."""
    highest = distributed.all_reduce_max(padded.amax(1))
    weights = torch.exp(padded[:, 1:] - highest[:, None])  # of x itself: beside a large log, fp32 holds no log of a sum
    return weights, highest, distributed.all_reduce_sum(weights.sum(1)) + torch.exp(-highest)
