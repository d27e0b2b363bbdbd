"""Places where this rank keeps its part of each parameter, sharded or not: for checkpoints and norms per tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.engine.engines.base import Engine


@dataclass(frozen=True)
class RowShard:
    """A parameter's rows are those from ``start_row`` on, of ``rows`` over all ranks (its attribute ``rows_of``).

    Such tables are too large, or too rarely touched, to be on every rank. Their module brings every gradient to the
    rank that owns the row itself (an engine neither sums nor averages it), and all its parameters are sharded.
    Checkpoints hold the whole table, so that a run continues at any number of ranks.
    """

    start_row: int
    rows: int


def row_range(rows: int, rank: int, world: int, multiple: int = 1) -> tuple[int, int]:
    """The half-open range of rows that ``rank`` holds: equal parts but for the last ones, which may be empty.

    Every part begins at a multiple of ``multiple``.
    """
    size = -(-rows // (world * multiple)) * multiple
    return min(rank * size, rows), min((rank + 1) * size, rows)


def row_shard(parameter: Any) -> RowShard | None:
    """Return the rows that ``parameter`` holds; None for one that is whole, or sharded by ZeRO."""
    shard: RowShard | None = getattr(parameter, "rows_of", None)
    return shard


def is_row_sharded(module: nn.Module) -> bool:
    """Return whether the rows of a module's parameters are shared out over the ranks: of all of them, or of none."""
    sharded = [row_shard(parameter) is not None for parameter in module.parameters()]
    assert all(sharded) or not any(sharded), "a module with row-sharded parameters has no others"
    return any(sharded)


@dataclass(frozen=True)
class Place:
    """Place of a rank's part of a parameter: ``flat[offset : offset + numel]`` holds elements from ``start``.

    ``everywhere`` is true where all ranks hold the same elements.
    """

    name: str
    flat: Tensor
    offset: int
    start: int
    numel: int
    everywhere: bool = False


def trainable(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the named parameters that are updated, each once (a tied one by its first name).

    ZeRO hangs attributes of its own on them.
    """
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad)


def global_shape(parameter: Any) -> tuple[int, ...]:
    """Return the parameter's shape, also when ZeRO 3 has partitioned it or each rank holds some of its rows."""
    shard = row_shard(parameter)
    if shard is not None:
        return (shard.rows, *parameter.shape[1:])
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def first_element(parameter: Any) -> int:
    """Return where the elements that this rank holds begin in the flattened parameter (not for ZeRO's partitions)."""
    shard = row_shard(parameter)
    return 0 if shard is None else shard.start_row * math.prod(parameter.shape[1:])


def places(engine: Engine) -> Iterator[Place]:
    """Yield where this rank keeps its part of each parameter: of trained ones the fp32 copy, of frozen ones itself."""
    zero = engine.zero_optimizer
    parameters: Iterator[tuple[str, Any]] = engine.module.named_parameters()
    for name, p in parameters:
        # Frozen at ZeRO 3: cut like all others, but in no flat tensor of the optimizer.
        if not p.requires_grad and engine.zero_stage == 3:
            start = distributed.rank() * p.ds_tensor.ds_numel
            numel = min(p.ds_tensor.ds_numel, p.ds_numel - start)
            if numel > 0:
                yield Place(name, p.ds_tensor, 0, start, numel)
        # Whole on every rank, or the rows that this rank has of a table.
        elif not p.requires_grad or engine.zero_stage == 0:
            yield Place(name, p, 0, first_element(p), p.numel(), everywhere=row_shard(p) is None)
        # Trained at ZeRO 3: this rank's part of the fp32 copy.
        elif engine.zero_stage == 3:
            group, offset, _ = zero.grad_position[zero.get_param_id(p)]
            start = distributed.rank() * p.ds_tensor.ds_numel
            numel = min(p.ds_tensor.ds_numel, p.ds_numel - start)  # the last partitions are padded
            if numel > 0:
                yield Place(name, zero.fp32_partitioned_groups_flat[group], offset, start, numel)
        # Trained at ZeRO 1 and 2: hp is the fp32 copy, lp the weight in use; without a mapping no part is on this rank.
        elif p._hp_mapping is not None:
            mapping = p._hp_mapping
            yield Place(
                name,
                zero.single_partition_of_fp32_groups[mapping.param_group_index],
                mapping.hp_fragment_address.start,
                mapping.lp_fragment_address.start,
                mapping.lp_fragment_address.numel,
            )
