"""Exchange between the ranks of a contrast: anchors, their sums, and one number an anchor; never keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.traits import traits
from capt.pretrain.contrast.kernels import SoftmaxSums


@dataclass(frozen=True)
class Exchange:
    """Collectives over ``group``, whose rank ``r`` has ``counts[r]`` rows in this step.

    Collectives need equal shapes, so each rank's rows are padded with zeros to the longest. No mask is needed: a zero
    anchor adds nothing to the gradient of any key, its own sums are dropped by its owner, and keys are never sent.
    """

    counts: tuple[int, ...]
    group: distributed.Group

    @classmethod
    def gather_counts(
        cls, rows: int, device: torch.device, group: distributed.Group, *, equal: bool = False
    ) -> Exchange:
        """Learn every rank's number of rows: an all-gather of 8 bytes per rank, for whose result the host waits.

        With ``equal`` the caller knows that all ranks have the same number, and there is no collective.
        """
        if equal or distributed.world_size(group) == 1:
            return cls((rows,) * distributed.world_size(group), group)
        counts = distributed.all_gather(torch.tensor(rows, device=device), group)
        if not traits().has_values:  # those of the others are not known: all are like this one
            return cls((rows,) * distributed.world_size(group), group)
        return cls(tuple(counts.tolist()), group)

    def with_views(self, views: int) -> Exchange:
        """The exchange of ``views`` rows per sample in place of one."""
        return Exchange(tuple(count * views for count in self.counts), self.group)

    def local(self) -> Exchange:
        """The exchange of this rank's rows with itself, for a loss in which no other rank holds keys."""
        return Exchange((self.counts[self.rank],), None)

    @property
    def rank(self) -> int:
        """This rank's place in ``counts``."""
        return distributed.rank(self.group) if len(self.counts) > 1 else 0

    @property
    def local_rows(self) -> slice:
        """The place of this rank's rows among the gathered ones."""
        start = self.rank * max(self.counts)
        return slice(start, start + self.counts[self.rank])

    def real_rows(self, device: torch.device) -> Tensor:
        """The places of the rows that are not padding among the gathered ones, rank by rank."""
        most = max(self.counts)
        places = [range(rank * most, rank * most + count) for rank, count in enumerate(self.counts)]
        return torch.tensor([place for each in places for place in each], dtype=torch.int64, device=device)

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, padded: ``(n, ...) -> (W * max n, ...)``."""
        if len(self.counts) == 1:
            return rows
        missing = max(self.counts) - len(rows)
        if missing:
            rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
        return distributed.all_gather(rows, self.group).flatten(0, 1)

    def reduce_scatter(self, sums: SoftmaxSums) -> SoftmaxSums:
        """Total the sums of all ranks and return those of this rank's anchors, in one collective.

        All ranks must have the same running maxima (:meth:`all_reduce_max`).
        """
        if len(self.counts) == 1:
            return sums
        # All sums of an anchor are columns of one matrix, so that one collective takes them.
        numbers = [sums.normaliser] if sums.squares is None else [sums.normaliser, sums.squares]
        columns = [each[:, None] for each in numbers]
        if sums.weighted_keys is not None:
            columns.append(sums.weighted_keys)
        # Gathered anchors lie rank by rank, so the first axis is the owner.
        by_owner = torch.cat(columns, dim=1).unflatten(0, (len(self.counts), -1))
        totals = distributed.reduce_scatter_sum(by_owner, self.group)[: self.counts[self.rank]]
        return SoftmaxSums(
            normaliser=totals[:, 0],
            weighted_keys=None if sums.weighted_keys is None else totals[:, len(numbers) :],
            running_max=None if sums.running_max is None else sums.running_max[self.local_rows],
            squares=None if sums.squares is None else totals[:, 1],
            largest=None if sums.largest is None else sums.largest[self.local_rows],
        )

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over the ranks."""
        return values if len(self.counts) == 1 else distributed.all_reduce_max(values, self.group)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over the ranks."""
        return values if len(self.counts) == 1 else distributed.all_reduce_sum(values, self.group)
