"""How rows reach other ranks and how sums come home, for any number of rows per rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.contrast.kernels.protocol import Sums
from pretrain.engine import distributed


@dataclass(frozen=True)
class Exchange:
    """Rows per rank of one step. Collectives want equal shapes: each rank's rows are padded with zeros to the longest.

    No mask is needed: a zero anchor asks nothing of any key, its own sums are dropped at home, and keys never travel.
    """

    counts: tuple[int, ...]
    group: distributed.Group

    @classmethod
    def agree(cls, rows: int, device: torch.device, group: distributed.Group, *, equal: bool = False) -> Exchange:
        """Learn every rank's number of rows: a collective of eight bytes a rank, for whose result the host waits.

        With ``equal`` the caller knows that all ranks have as many, and nobody asks.
        """
        if equal or distributed.world_size(group) == 1:
            return cls((rows,) * distributed.world_size(group), group)
        counts = distributed.all_gather(torch.tensor(rows, device=device), group)
        return cls(tuple(counts.tolist()), group)

    def views(self, number: int) -> Exchange:
        """The same samples, ``number`` rows of each."""
        return Exchange(tuple(count * number for count in self.counts), self.group)

    def alone(self, number: int) -> Exchange:
        """The same on this rank only, where no other rank holds keys for its rows."""
        return Exchange((self.counts[self.index] * number,), None)

    @property
    def index(self) -> int:
        """This rank among those that exchange."""
        return distributed.rank(self.group) if len(self.counts) > 1 else 0

    @property
    def own(self) -> slice:
        """Where this rank's rows lie among the gathered ones."""
        start = self.index * max(self.counts)
        return slice(start, start + self.counts[self.index])

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, ``(n, ...) -> (W * max n, ...)``."""
        if len(self.counts) == 1:
            return rows
        missing = max(self.counts) - len(rows)
        if missing:
            rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
        return distributed.all_gather(rows, self.group).flatten(0, 1)

    def bring_home(self, sums: Sums) -> Sums:
        """Totals over the ranks of the sums of this rank's rows, in one collective. References agree already."""
        if len(self.counts) == 1:
            return sums
        columns = [sums.normaliser[:, None]] if sums.weighted is None else [sums.weighted, sums.normaliser[:, None]]
        by_owner = torch.cat(columns, dim=1).unflatten(0, (len(self.counts), -1))
        totals = distributed.reduce_scatter_sum(by_owner, self.group)[: self.counts[self.index]]
        return Sums(
            normaliser=totals[:, -1],
            weighted=None if sums.weighted is None else totals[:, :-1],
            reference=None if sums.reference is None else sums.reference[self.own],
        )

    def highest(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        return values if len(self.counts) == 1 else distributed.all_reduce_max(values, self.group)
