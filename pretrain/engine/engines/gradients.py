"""Measures and clips the gradients that lie beside their parameters, dense or sparse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def measure_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients together, a scalar on their device; 0 where there are none.

    A sparse gradient is coalesced in place first: the norm is that of the sums of the entries of each row.
    """
    values = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            values.append(parameter.grad.values())
        elif parameter.grad is not None:
            values.append(parameter.grad)
    if not values:
        return torch.zeros(())
    # what nn.utils.get_total_norm does, without sorting tensors by device and type: half of its time in small modules
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    return norm


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float, norm: Tensor) -> None:
    """Scale all gradients so that their norm, now ``norm``, is at most ``largest`` (0 leaves them as they are)."""
    if largest:
        nn.utils.clip_grads_with_norm_(parameters, largest, norm)
