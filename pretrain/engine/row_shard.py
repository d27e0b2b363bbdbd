"""Parameters of which each rank holds some rows: tables too large, or too rarely touched, to be on every rank.

A parameter says so by its attribute ``rows_of``. Its module brings every gradient to the rank that owns the row itself
(an engine neither sums nor averages it), and all parameters of such a module are sharded. Checkpoints hold the whole
table, so that a run continues at any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class RowShard:
    """A parameter's rows are those from ``start_row`` on, of ``rows`` over all ranks."""

    start_row: int
    rows: int


def row_range(rows: int, rank: int, world: int, multiple: int = 1) -> tuple[int, int]:
    """The half-open range of rows that ``rank`` holds: equal parts but for the last ones, which may be empty.

    Every part begins at a multiple of ``multiple``.
    """
    size = -(-rows // (world * multiple)) * multiple
    return min(rank * size, rows), min((rank + 1) * size, rows)


def row_shard(parameter: Any) -> RowShard | None:
    """Which rows ``parameter`` holds; None for one that is whole, or sharded by ZeRO."""
    shard: RowShard | None = getattr(parameter, "rows_of", None)
    return shard


def is_row_sharded(module: nn.Module) -> bool:
    """Whether the rows of a module's parameters are shared out over the ranks: of all of them, or of none."""
    sharded = [row_shard(parameter) is not None for parameter in module.parameters()]
    assert all(sharded) or not any(sharded), "a module with row-sharded parameters has no others"
    return any(sharded)
