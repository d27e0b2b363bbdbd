"""Marks a parameter that holds some rows of a larger one, the others being on other ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowShard:
    """Where the rows of a parameter lie in the whole: set as its attribute ``rows_of``.

    Args:
        start_row: number of its first row.
        rows: rows of the whole parameter, over all ranks.
    """

    start_row: int
    rows: int
