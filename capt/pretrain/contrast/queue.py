r"""The memory queue of CAPT (section 2.2), sharded: every rank stores a shard, and no rank ever holds the whole.

The capacity ``K`` counts representations over all ranks and nodes. A step over ``W`` ranks puts its rows into one
order, ``[s_0 .. s_{N-1}, s_hat_0 .. s_hat_{N-1}]``, where sample ``g`` lives on rank ``g % W``; so the ``j``-th row
that rank ``r`` ever pushed has global index ``j W + r``. Keeping the newest ``(K + r) // W`` rows on rank ``r`` then
makes the union of the shards *exactly* the newest ``K`` rows of one global first-in-first-out queue, for every ``K``
and ``W`` and without communication (``docs/contrast.md`` has the proof). Where ranks push different numbers of rows,
each keeps its own newest.

**Drift.** While an encoder changes fast, all its representations move together, and a queued row shows where the
encoder *was*. To be unlike such rows it pays to move all anchors away from them together, which ends with every
representation in one point. So the queue keeps what is left of a row without the statistics of its step :math:`t`, and
the loss puts those of the live rows in their place:

.. math::
    r = k - m_t, \quad \tilde k = \frac{r + m}{\lVert r + m \rVert} \qquad \text{(mean)} \qquad\qquad
    r = \frac{k - m_t}{s_t}, \quad \tilde k = \frac{r s + m}{\lVert r s + m \rVert} \qquad \text{(moments)}

with the mean :math:`m` and the standard deviation :math:`s` of each feature over the rows of all ranks. A shift of all
rows of a step by one vector leaves no trace, but for the norm. The statistics are baked in at the push, so nothing is
kept for each step, nothing has to be looked up, and a queue of residuals is sharded, saved and dealt out again like any
other. Cross-batch normalisation (Jing et al. 2023, arXiv:2303.17127) uses the statistics of the whole queue instead.

The live statistics are those of the step alone. A running average would be steadier, and is worse than no correction:
queued rows would follow a part of the motion, and the rest would still pay (docs/contrast.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.base.traits import traits
from capt.pretrain.contrast import shards

log = logging.getLogger(__name__)

NO_ID = torch.iinfo(torch.int64).min
"""The id of a row that was given none. It equals no id that a user would give."""

_LEFT_OUT = NO_ID + 1
"""The id of a row that keeps its place in the order, so that all ranks push the same number, and is not a negative."""

QUEUE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)

DRIFTS = ("none", "mean", "moments")

_LEAST_DEVIATION = 0.1
"""Least deviation of a feature, in units of the root mean square over the features: one that hardly varied in few rows
would otherwise be blown up without bound when its residual meets the live deviation."""


def is_readable(values: Tensor) -> bool:
    """Return whether a value can be read without waiting for a CUDA stream and without breaking a compiled graph."""
    return traits().can_read(values)


def may_be_unit(rows: Tensor) -> bool:
    """False where a finite row has another norm than 1; rows that cannot be read without a wait pass."""
    return not is_readable(rows) or not is_not_one(norms_of(rows).nan_to_num(nan=1.0, posinf=1.0))


def norms_of(rows: Tensor) -> Tensor:
    """The Euclidean norm of each row, in float32 at least."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
    return norms


def is_not_one(norms: Tensor) -> bool:
    """Return whether a norm differs from 1 by more than 1 %.

    NaN does not: an fp16 step that overflowed must reach the loss scaler as NaN, not end the run here.
    """
    return bool(((norms - 1).abs() > 0.01).any())


class Statistics(NamedTuple):
    """Mean and standard deviation (None: rows are not scaled) of each feature over the rows of a step, in float64."""

    mean: Float[Tensor, " d"]
    deviation: Float[Tensor, " d"] | None

    def residuals(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Subtract the mean from rows, and divide them by the deviation if there is one."""
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # a mean in bf16 would be off for all rows alike
        rest = rows - self.mean.to(rows.dtype)
        return rest if self.deviation is None else rest / self.deviation.to(rows.dtype)

    def corrected(self, residuals: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        """Unit rows made of residuals; zeros for a residual that is NaN, of a row that was not finite."""
        rows = residuals.to(torch.promote_types(residuals.dtype, torch.float32), copy=True)
        if self.deviation is not None:
            rows *= self.deviation.to(rows.dtype)
        rows += self.mean.to(rows.dtype)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        rows /= norms.clamp_min(1e-12)  # in place: a shard may be large
        return rows.masked_fill_(norms.isnan(), 0.0)


def check_drift(drift: str) -> None:
    """Raise ``ConfigError`` for a correction of another name."""
    if drift not in DRIFTS:
        raise ConfigError(f"drift must be one of {', '.join(DRIFTS)}, got {drift!r}")


@torch.no_grad()
def statistics(views: Sequence[Float[Tensor, "n d"]], drift: str, group: distributed.Group) -> Statistics:
    """The statistics of the rows of ``views`` on all ranks, the same bits everywhere: an all-reduce of 2 d + 1 numbers.

    Rows with a value that is not finite do not count; of no row the mean is 0.
    """
    rows = torch.cat([view.detach().double() for view in views])
    known = rows.isfinite().all(1, keepdim=True)
    rows = rows.where(known, 0.0)
    sums = torch.cat([rows.sum(0), rows.square().sum(0), known.sum()[None].double()])
    sums = distributed.all_reduce_sum(sums, group)
    d, count = rows.shape[1], sums[-1].clamp_min(1)
    mean = sums[:d] / count
    if drift == "mean":
        return Statistics(mean, None)
    # Rounding may make the variance of equal rows negative.
    variance = (sums[d:-1] / count - mean.square()).clamp_min(0)
    usual = variance.mean().sqrt().clamp_min(1e-6)  # of rows that are all in one point
    return Statistics(mean, variance.sqrt().clamp_min(_LEAST_DEVIATION * usual))


@dataclass(frozen=True)
class _Storage:
    """A rank's part of a queue: its place among the ranks, and a ring buffer of rows and their ids."""

    rank: int
    world: int
    rows: Tensor
    ids: Tensor


class ShardedQueue:
    """First-in-first-out queue of the newest ``capacity`` representations over all ranks of ``group``.

    It is neither a module nor a set of buffers on purpose: engines broadcast, cast or partition what modules own, and
    each rank's shard is its own. Rows are kept detached. Only rows that were pushed are ever used; at the start of
    training the queue is empty and grows.

    A queue may be made before the process group: it takes its share when it is first used.

    Args:
        capacity: rows over all ranks, ``K`` of the paper (8192); both views of a sample count.
        dim: features of a row.
        group: the ranks that share the queue; the same group must be given to the loss.
        dtype: float32, bfloat16 (half the memory) or float64.
        device: where this rank's rows lie.
        drift: how queued rows follow the encoder (:mod:`capt.pretrain.contrast.queue`): ``none`` keeps them as they
            were pushed; ``mean`` moves the rows of each step by as much as the mean of the rows has moved since,
            ``moments`` scales them as well. Push a row for each live key of the loss and no others, of the same
            encoder or an average of it.

    Raises:
        ConfigError: capacity or dim below 1, another dtype, or another drift.
    """

    def __init__(
        self,
        capacity: int,
        dim: int,
        group: distributed.Group = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        drift: str = "none",
    ) -> None:
        if capacity < 1 or dim < 1:
            raise ConfigError(
                f"a queue needs a capacity and a dim of 1 or more, got {capacity} and {dim} (for none, use queue=None)"
            )
        if dtype not in QUEUE_DTYPES:
            raise ConfigError(f"queue dtype must be one of {', '.join(map(str, QUEUE_DTYPES))}, got {dtype}")
        check_drift(drift)
        self.capacity, self.dim = capacity, dim
        self._dtype, self._device = dtype, torch.empty(0, device=device).device
        self._bound: _Storage | None = None
        self._write_position = 0
        self._filled = 0
        self._leaves_out = False
        self.pushed = 0  # rows given to this rank so far, those that it has dropped since included
        self.has_unit_rows = True  # as far as rows could be looked at; the loss refuses a queue of others
        self.drift = drift
        self._group = group

    def _storage(self) -> _Storage:
        """This rank's part, made at first use: the process group may be initialised after the queue was made."""
        if self._bound is None:
            rank, world = distributed.rank(self._group), distributed.world_size(self._group)
            size = shards.shard_size(self.capacity, rank, world)
            rows = torch.zeros(size, self.dim, dtype=self._dtype, device=self._device)
            self._bound = _Storage(rank, world, rows, torch.full((size,), NO_ID, device=self._device))
        return self._bound

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._storage().rank

    @property
    def world(self) -> int:
        """The number of ranks that share the queue."""
        return self._storage().world

    @property
    def shard_size(self) -> int:
        """The number of rows that this rank holds at most."""
        return len(self._rows)

    @property
    def _rows(self) -> Tensor:
        return self._storage().rows

    @property
    def _ids(self) -> Tensor:
        return self._storage().ids

    def warn_if_smaller_than(self, rows: int) -> None:
        """Log a warning if one step, which pushes ``rows`` over all ranks, pushes more than the queue holds."""
        if rows > self.capacity and self.rank == 0:
            log.warning(
                "the queue of %d rows holds less than one step, which pushes %d: every queued negative will be of the "
                "last step; raise contrast.queue (%d holds four steps) or lower the batch",
                self.capacity, rows, 4 * rows,
            )  # fmt: skip

    def __len__(self) -> int:
        """Rows that this rank holds now, at most ``ceil(capacity / world)``."""
        return self._filled

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's rows and ids when its shard is full."""
        return self._rows.nbytes + self._ids.nbytes

    @property
    def device(self) -> torch.device:
        """Device that holds this rank's rows."""
        return self._device

    @property
    def rows(self) -> Float[Tensor, "k d"]:
        """Rows that this rank holds now, in no particular order; with ``drift`` their residuals (NaN where not finite).

        A view: the next ``enqueue`` changes it.
        """
        return self._without_left_out(self._rows[: self._filled])

    def negatives(self, live: Sequence[Float[Tensor, "n d"]]) -> Float[Tensor, "k d"]:
        """This rank's rows as negatives of a loss whose live keys, on this rank, are ``live``.

        With ``drift`` a collective of all ranks of the group, of the same number of bytes whatever the queue holds.
        """
        if self.drift == "none":
            return self.rows
        return statistics(live, self.drift, self._group).corrected(self.rows)

    @property
    def ids(self) -> Int[Tensor, " k"]:
        """The instance id of each of ``rows``, ``NO_ID`` where none was given."""
        return self._without_left_out(self._ids[: self._filled])

    def _without_left_out(self, stored: Tensor) -> Tensor:
        return stored[self._ids[: self._filled] != _LEFT_OUT] if self._leaves_out else stored

    @torch.no_grad()
    def enqueue(
        self,
        *views: Float[Tensor, "n d"],
        ids: Int[Tensor, " n"] | None = None,
        only: Int[Tensor, " k"] | None = None,
    ) -> None:
        """Push this rank's rows, view after view (CAPT: ``enqueue(s, s_hat)``), after the loss of the step.

        Before the loss it would make every positive its own negative. There is no communication (with ``drift`` one
        all-reduce of the rows' statistics, in which all ranks take part), and any number of rows is right; of more than
        the shard's size the newest stay. A row that is not finite (a step that overflowed in fp16) is zeros in the
        loss, as far from every anchor as a random row, so that it cannot spoil later steps.

        Args:
            views: unit rows of each view; a loss with others is refused (on a GPU they are not looked at).
            ids: instance of each sample.
            only: the samples that become negatives (None = all). The others take up places of the queue, so that every
                rank pushes the same number of rows and the shards stay those of one queue; nobody sees them.

        Raises:
            ConfigError: rows of another width than the queue's, or ids that are not one int64 number a sample.
        """
        check_ids(views, ids)
        if only is not None:
            known = torch.full((len(views[0]),), NO_ID, device=views[0].device) if ids is None else ids
            ids = torch.full_like(known, _LEFT_OUT).index_copy(0, only, known[only])
            # Readers copy from now on; without such rows they are given a view.
            self._leaves_out = True
        for view in views:
            if view.shape[1:] != (self.dim,):
                raise ConfigError(f"the queue holds rows of {self.dim} features, got {tuple(view.shape)}")
            self.has_unit_rows &= may_be_unit(view)
        if self.drift != "none":  # residuals are stored: the loss adds the statistics of its own step
            own = statistics(views if only is None else [view[only] for view in views], self.drift, self._group)
            views = tuple(own.residuals(view) for view in views)
        for view in views:
            self.pushed += len(view)
            self._push(view, ids)

    def _push(self, rows: Tensor, ids: Tensor | None) -> None:
        # More rows than the shard has places: only the newest are ever seen.
        n = min(len(rows), self.shard_size)
        if n == 0:
            return
        # A ring buffer: of more rows than fit the newest, cut where the buffer ends and continued at its beginning.
        finite = rows[-n:].isfinite().all(1, keepdim=True)
        rows = torch.where(finite, rows[-n:], 0.0 if self.drift == "none" else torch.nan)  # a residual may be zeros
        until_end = min(n, self.shard_size - self._write_position)
        for start, part in ((self._write_position, slice(0, until_end)), (0, slice(until_end, n))):
            place = slice(start, start + part.stop - part.start)
            self._rows[place] = rows[part]
            self._ids[place] = NO_ID if ids is None else ids[-n:][part]
        self._write_position = (self._write_position + n) % self.shard_size
        self._filled = min(self._filled + n, self.shard_size)

    def _oldest_first(self, stored: Tensor) -> Tensor:
        """A copy of the filled part of a ring buffer, oldest row first, in the memory of the host.

        A copy on the device would take as much again of its memory at every checkpoint.
        """
        copy = torch.empty((self._filled, *stored.shape[1:]), dtype=stored.dtype)
        # Until the buffer is full the write position is its end, and no row is older than place 0.
        old = self._filled - self._write_position  # rows from the write position on
        copy[:old] = stored[self._write_position : self._filled]
        copy[old:] = stored[: self._write_position]
        return copy

    def _fill(self, rows: Tensor, ids: Tensor, start: int) -> None:
        """Put rows into the places that they had, so that sums over them round as they would have without a restart."""
        self._leaves_out = bool((ids == _LEFT_OUT).any())
        self._filled = 0
        # Only a full shard of this very size can lie as it lay before.
        self._write_position = start % self.shard_size if 0 < self.shard_size == len(rows) else 0
        self._push(rows, ids)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: ``rows`` and ``ids`` (copies on the CPU, oldest first), ``start``, ``rank``, ``world``,
        ``drift``."""
        return {
            "rows": self._oldest_first(self._rows), "ids": self._oldest_first(self._ids),
            "start": self._write_position, "rank": self.rank, "world": self.world, "drift": self.drift,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the shard of the same rank of the same number of ranks; a smaller capacity keeps the newest rows.

        Raises:
            CheckpointError: the shard of another rank or world size (:meth:`load_shards` reads those), other rows, or
                rows of another drift.
        """
        if (state["rank"], state["world"]) != (self.rank, self.world):
            raise CheckpointError(
                f"this queue shard belongs to rank {state['rank']} of {state['world']}; this is rank {self.rank} of "
                f"{self.world}; save_shard and load_shards carry a queue to another number of ranks"
            )
        if state["rows"].shape[1] != self.dim:
            raise CheckpointError(f"the queue state holds rows of {state['rows'].shape[1]} features, not {self.dim}")
        self._check_drift(state.get("drift", "none"), "the queue state")
        self._fill(state["rows"], state["ids"], state["start"])

    def _check_drift(self, drift: str, source: str) -> None:
        if drift != self.drift:
            raise CheckpointError(
                f"{source} holds rows of drift {drift}, this queue has {self.drift}: rows of one are not rows of the "
                f"other; set contrast.drift={drift}"
            )

    def save_shard(self, folder: str | Path) -> Path:
        """Write this rank's shard into ``folder``, which is made if needed, and return the file.

        Every rank writes its own.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return shards.write_shard(folder, **self.state_dict())

    def load_shards(self, folder: str | Path) -> None:
        """Fill this rank's shard from what any number of ranks saved in ``folder``. All ranks of the queue call this.

        Where another number of ranks has saved it, each file is read by one rank, which tells the others its rows; in a
        queue of a ``group`` of its own each rank reads the rows that it keeps from all files.

        Raises:
            CheckpointError: a missing or damaged shard, shards of several saves, rows of another width or drift.
        """
        folder = Path(folder)
        self._check_drift(self.stored_drift(folder), str(folder))
        if self._is_of_all_ranks():
            self._fill(*shards.read_shards_together(folder, self.capacity, self.dim, self.device))
        else:
            self._fill(*shards.read_shards(folder, self.capacity, self.dim, self.rank, self.world))

    def stored_drift(self, folder: Path) -> str:
        """Return what the rows that were saved in ``folder`` are corrected for. All ranks of the queue call this.

        Raises:
            CheckpointError: a missing or damaged shard.
        """
        read = shards.read_drift_together if self._is_of_all_ranks() else shards.read_drift
        return read(folder, self.dim)

    def _is_of_all_ranks(self) -> bool:
        return self._group is None and 1 < self.world == distributed.world_size()


def check_ids(views: Sequence[Tensor], ids: Tensor | None) -> None:
    """Raise ``ConfigError`` for ids that are not one int64 number for each row of each view."""
    if ids is not None and (ids.dtype != torch.int64 or any(ids.shape != view.shape[:1] for view in views)):
        rows = ", ".join(str(len(view)) for view in views)
        raise ConfigError(
            f"ids must be one int64 number a sample, the same for each view, got {tuple(ids.shape)} of {ids.dtype} for "
            f"views of {rows} rows"
        )
