"""The checks that :func:`~pretrain.contrast.info_nce.info_nce` makes of its arguments; each raises ``ConfigError``."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from pretrain.base.errors import ConfigError
from pretrain.contrast import norms
from pretrain.contrast.kernels import KERNELS
from pretrain.contrast.kernels.products import Precision
from pretrain.contrast.queue import ShardedQueue
from pretrain.engine import distributed

InBatch = Literal["global", "local", "none"]
Reduction = Literal["mean", "sum"]


def compute_dtype(anchors: Tensor, positives: Tensor, precision: Precision) -> torch.dtype:
    """The type of all arithmetic: float64 where a row is float64, else float32. Raises for another ``precision``."""
    dtype = torch.float64 if torch.float64 in (anchors.dtype, positives.dtype) else torch.float32
    if dtype == torch.float64 and precision != "fp32":
        raise ConfigError(
            f"precision {precision} is for float32 rows; float64 rows are multiplied in float64, with fp32"
        )
    return dtype


def check_options(temperature: float | Tensor, in_batch: str, reduction: str, grad_reduction: str, impl: str) -> None:
    """Raise for an unknown option, and for a temperature that is not a positive number."""
    choices = {
        "in_batch": (in_batch, get_args(InBatch)),
        "reduction": (reduction, get_args(Reduction)),
        "grad_reduction": (grad_reduction, get_args(Reduction)),
        "impl": (impl, tuple(KERNELS)),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    if isinstance(temperature, Tensor) and not norms.is_readable(temperature):
        return
    tau = temperature.item() if isinstance(temperature, Tensor) else temperature
    if not (tau > 0 and math.isfinite(tau)):
        raise ConfigError(f"the temperature must be a positive number, got {tau}")


def check_rows(
    anchors: Tensor, positives: Tensor, negatives: Tensor | None, ids: Tensor | None, wait_for_values: bool
) -> None:
    """Raise for types and shapes that do not fit each other, and for rows without unit norm.

    Norms that cannot be read at once are checked only with ``wait_for_values``.
    """
    named = {"anchors": anchors, "positives": positives, "negatives": negatives}
    for name, rows in named.items():
        if rows is not None and not (rows.ndim == 2 and rows.is_floating_point()):
            raise ConfigError(f"{name} must be rows of real numbers, got {tuple(rows.shape)} of {rows.dtype}")
    if positives.shape != anchors.shape or (negatives is not None and negatives.shape[1:] != anchors.shape[1:]):
        shapes = [tuple(rows.shape) for rows in (anchors, positives, negatives) if rows is not None]
        raise ConfigError(f"anchors and positives must have one shape, negatives the same width, got {shapes}")
    if ids is not None and (ids.shape != anchors.shape[:1] or ids.dtype != torch.int64):
        raise ConfigError(f"ids must be {len(anchors)} int64 numbers, got {tuple(ids.shape)} of {ids.dtype}")
    if not (wait_for_values or norms.is_readable(anchors)):
        return
    found = {name: norms.norms_of(rows.detach()) for name, rows in named.items() if rows is not None}
    if norms.is_not_one(torch.cat(list(found.values()))):
        name = next(name for name, values in found.items() if norms.is_not_one(values))
        raise ConfigError(f"{name} must have unit norm: apply torch.nn.functional.normalize(rows, dim=-1) first")


def check_queue(
    anchors: Tensor,
    queue: ShardedQueue | None,
    negatives: Tensor | None,
    in_batch: str,
    group: distributed.Group,
    share: float | None,
    hardness: float,
) -> None:
    """Raise where the queue has another width, device or group than the loss, or rows without unit norm, or where there
    would be no negatives.

    So it does for a ``share`` that is negative or no number, or that has no live keys to be a share of, and for a
    ``hardness`` that is negative or no number.
    """
    if not (hardness >= 0 and math.isfinite(hardness)):
        raise ConfigError(f"hardness is a number of 0 or more, got {hardness}")
    if share is not None and (in_batch == "none" or not (share >= 0 and math.isfinite(share))):
        raise ConfigError(
            f"queue_share is a number of 0 or more, and a share of the live keys, got {share} with in_batch={in_batch}"
        )
    if in_batch == "none" and (queue is None or negatives is not None):
        raise ConfigError("in_batch=none leaves only the queue: pass one, and no negatives")
    if queue is None:
        return
    if not queue.has_unit_rows:
        raise ConfigError(
            "the queue was given rows without unit norm: apply torch.nn.functional.normalize(rows, dim=-1) before "
            "queue.enqueue"
        )
    if queue.device != anchors.device:
        raise ConfigError(
            f"the queue lies on {queue.device}, the anchors on {anchors.device}: give ShardedQueue(device=...) theirs"
        )
    if queue.dim != anchors.shape[1]:
        raise ConfigError(f"the queue holds rows of {queue.dim} features, the anchors have {anchors.shape[1]}")
    world = distributed.world_size(group)
    if queue.world != world:
        raise ConfigError(f"the queue is sharded over {queue.world} ranks, the loss over {world}: give both one group")
