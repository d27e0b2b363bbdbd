"""Whether rows have unit norm, which loss and queue rely on: their logits are then bounded by the temperature."""

from __future__ import annotations

import torch
from torch import Tensor


def is_readable(values: Tensor) -> bool:
    """Whether a value can be read without waiting for a CUDA stream and without breaking a compiled graph."""
    return not values.is_cuda and not torch.compiler.is_compiling()


def may_be_unit(rows: Tensor) -> bool:
    """False where a finite row has another norm than 1; rows that cannot be read at once are taken to have it."""
    return not is_readable(rows) or not is_not_one(norms_of(rows).nan_to_num(nan=1.0, posinf=1.0))


def norms_of(rows: Tensor) -> Tensor:
    """The Euclidean norm of each row, in float32 at least."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
    return norms


def is_not_one(norms: Tensor) -> bool:
    """Whether a norm differs from 1 by more than 1 %.

    NaN does not: an fp16 step that overflowed must reach the loss scaler as NaN, not end the run here.
    """
    return bool(((norms - 1).abs() > 0.01).any())
