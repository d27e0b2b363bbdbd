"""Rows of a table that is divided over the ranks: fetched from their owners by number, gradients sent back to them.

Rank ``r`` of ``W`` owns about ``V / W`` consecutive rows, from a multiple of `ALIGNMENT` on. Only rows that a batch
uses travel, each once for each rank that uses it. A rank alone copies nothing: it works on its table itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from pretrain.base import distributed
from pretrain.engine.row_shard import row_range

ALIGNMENT = 32
"""Rows that are never divided: a float32 sum over them is the same to the last bit on any number of ranks."""


@dataclass(frozen=True)
class Borrowed:
    """Rows that a batch uses: row ``i`` of what was asked for is ``rows[place[i]]``.

    ``asked_by`` are the own rows that each rank has asked for, and ``counts`` how many rows each rank has lent.
    """

    rows: Float[Tensor, "u d"]
    place: Int64[Tensor, " k"]
    asked_by: tuple[Int64[Tensor, " a"], ...] = ()
    counts: tuple[int, ...] = ()


class RowExchange:
    """Who owns which of ``rows`` rows. Every method is called by all ranks together."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        world = distributed.world_size()
        self.share = row_range(rows, 0, world, ALIGNMENT)[1]
        self.start, self.end = row_range(rows, distributed.rank(), world, ALIGNMENT)

    def borrow(self, table: Float[Tensor, "r d"], ids: Int64[Tensor, " k"]) -> Borrowed:
        """The rows ``ids`` of the whole table, of which ``table`` is this rank's part. They must not be written to."""
        world = distributed.world_size()
        if world == 1:
            return Borrowed(table, ids)
        wanted, place = torch.unique(ids, return_inverse=True)
        counts = torch.bincount(wanted // self.share, minlength=world)
        asked = distributed.all_to_all(counts, [1] * world, [1] * world).tolist()
        mine = counts.tolist()
        requests = distributed.all_to_all(wanted, asked, mine) - self.start
        rows = distributed.all_to_all(table[requests], mine, asked)
        return Borrowed(rows, place, requests.split(asked), tuple(mine))

    def give_back(
        self, borrowed: Borrowed, *gradients: Float[Tensor, "k _d"]
    ) -> tuple[Int64[Tensor, " m"], tuple[Float[Tensor, "m _d"], ...]]:
        """The gradients of this rank's rows from all ranks, as own rows and values; a row may occur repeatedly.

        Each of ``gradients`` belongs to what was asked for, in the same order; they travel together. The order of the
        result is that of the ranks.
        """
        if distributed.world_size() == 1:
            return borrowed.place, gradients
        widths = [part.shape[1] for part in gradients]
        sums = gradients[0].new_zeros(len(borrowed.rows), sum(widths))
        for total, part in zip(sums.split(widths, dim=1), gradients, strict=True):
            total.index_add_(0, borrowed.place, part)
        received = distributed.all_to_all(sums, [len(asked) for asked in borrowed.asked_by], list(borrowed.counts))
        return torch.cat(borrowed.asked_by), received.split(widths, dim=1)
