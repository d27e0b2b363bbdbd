"""Queue shards on disk: one safetensors file a rank, readable by any number of ranks.

``queue-00002-of-00004.safetensors`` holds the ``rows`` and ``ids`` of rank 2 of 4, oldest first; its metadata
name the ``drift`` that the rows are corrected for, where there is one. A row of age ``t``
(0 is the newest of its rank) on rank ``r`` of ``W`` has order ``-(t + 1) W + r``; sorting by it restores the global
queue. The loaded rows are dealt out again in that order, the newest to the last rank, and pushing continues as if the
queue had always been sharded this way.

A rank of another number of ranks keeps rows of nearly every file. So ranks that read together divide the files among
them (`read_shards_together`): each reads its own from beginning to end, and the rows are sent to all ranks in turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F64": torch.float64}
_AT_ONCE = 1 << 28
"""Bytes of rows of all ranks that are told at a time."""
_SHARD_NAME = re.compile(r"queue-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)


def shard_size(capacity: int, rank: int, world: int) -> int:
    """The number of rows of a global queue of ``capacity`` that ``rank`` of ``world`` keeps."""
    return (capacity + rank) // world


def write_shard(folder: Path, rows: Tensor, ids: Tensor, start: int, rank: int, world: int, drift: str) -> Path:
    """Write one rank's shard, oldest row first, and return the file; ``start`` is that row's place in memory."""
    path = _shard_path(folder, rank, world)
    about = None if drift == "none" else {"drift": drift}
    save_file({"rows": rows.cpu(), "ids": ids.cpu(), "start": torch.tensor(start)}, path, about)
    return path


def _shard_path(folder: Path, rank: int, world: int) -> Path:
    return folder / f"queue-{rank:05d}-of-{world:05d}.safetensors"


def read_drift(folder: Path, dim: int) -> str:
    """The drift that the rows in ``folder`` are corrected for: ``drift`` of the queue that saved them.

    Raises:
        CheckpointError: a missing or damaged shard.
    """
    path = _shard_files(folder)[0]
    _read_head(path, dim)
    with _open_shard(path) as file:
        return str((file.metadata() or {}).get("drift", "none"))


def read_drift_together(folder: Path, dim: int) -> str:
    """Do `read_drift` on all ranks; rank 0 reads. Collective."""
    drift = ""
    with distributed.synchronize_errors(patient=True):
        if distributed.rank() == 0:
            drift = read_drift(folder, dim)
    return distributed.broadcast_object(drift)


def read_shards(folder: Path, capacity: int, dim: int, rank: int, world: int) -> tuple[Tensor, Tensor, int]:
    """Read what ``rank`` of ``world`` keeps of the newest ``capacity`` rows in ``folder``.

    Returns rows and ids, oldest first, and the oldest row's place in memory (0 if another number of ranks wrote the
    shards). Only these rows are read; if the number of ranks is the same, only this rank's file.

    Raises:
        CheckpointError: a missing, damaged or foreign shard.
    """
    paths = _shard_files(folder)
    if len(paths) == world:
        return _read_shard_of_rank(paths[rank], shard_size(capacity, rank, world), dim)
    counts = [_read_head(path, dim).rows for path in paths]
    found = []
    for path, ages in zip(paths, _ages(counts), strict=True):
        kept = _kept(ages, capacity, rank, world).nonzero().flatten()
        if len(kept):
            with _open_shard(path) as file:
                rows, ids = (file.get_slice(name)[kept.tolist()] for name in ("rows", "ids"))
            found.append((rows, ids, ages[kept]))
    return *_oldest_first(found, dim), 0


def read_shards_together(folder: Path, capacity: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Do `read_shards` on all ranks, which divide the files among them. Collective.

    All rows pass every rank on ``device``, `_AT_ONCE` bytes at a time, and each keeps its own. So no rank needs a
    connection of its own to every other one.

    Raises:
        CheckpointError: on all ranks: a missing, damaged or foreign shard.
    """
    rank, world, written = distributed.rank(), distributed.world_size(), 0
    # Rank 0 alone lists the folder, and all others take its word for the number of files.
    with distributed.synchronize_errors(patient=True):
        if rank == 0:
            written = len(_shard_files(folder))
    written = distributed.broadcast_object(written)
    paths = [_shard_path(folder, number, written) for number in range(written)]
    # The same number of ranks: each reads its own file, and nothing travels.
    if written == world:
        with distributed.synchronize_errors(patient=True):
            own = _read_shard_of_rank(paths[rank], shard_size(capacity, rank, world), dim)
        return own
    # Another number: rank r reads the files r, r + W, r + 2 W, ..., of which the headers come first.
    with distributed.synchronize_errors(patient=True):
        looked_at = [_read_head(path, dim) for path in paths[rank::world]]
    heads = [_Head(0, "")] * written
    for reader, those in enumerate(distributed.gather_objects(looked_at)):
        heads[reader::world] = [_Head(*head) for head in those]
    with distributed.synchronize_errors(patient=True):
        if len(dtypes := {head.dtype for head in heads}) > 1:
            raise CheckpointError(f"{folder} mixes queue shards of {' and '.join(sorted(dtypes))}")
        # Each reads the newest rows of its files, then tells them to all ranks, and keeps of all what is its own.
        found, most = _read_share(paths, [head.rows for head in heads], capacity)
    rows, ids, ages = _joined(found, dim, _DTYPES[heads[0].dtype])
    return *_oldest_first(_deal(rows, torch.stack([ids, ages], 1), most, capacity, device), dim), 0


_Rows = tuple[Tensor, Tensor, Tensor]
"""Rows of a queue, the id of each, and its age (0 is the newest row of all)."""


def _joined(found: Sequence[_Rows], dim: int, dtype: torch.dtype = torch.float32) -> _Rows:
    if not found:
        none = torch.empty(0, dtype=torch.int64)
        return torch.empty(0, dim, dtype=dtype), none, none
    rows, ids, ages = (torch.cat(parts) for parts in zip(*found, strict=True))
    return rows, ids, ages


def _oldest_first(found: Sequence[_Rows], dim: int) -> tuple[Tensor, Tensor]:
    rows, ids, ages = _joined(found, dim)
    order = ages.argsort(descending=True)
    return rows[order], ids[order]


def _kept(ages: Tensor, capacity: int, rank: int, world: int) -> Tensor:
    """The rows by age that ``rank`` keeps: the last rank has the newest."""
    return (ages >= 0) & (ages < capacity) & ((-1 - ages) % world == rank)


def _read_share(paths: Sequence[Path], counts: Sequence[int], capacity: int) -> tuple[list[_Rows], int]:
    """The rows that count of the files that this rank reads, and how many the rank has that reads the most."""
    rank, world = distributed.rank(), distributed.world_size()
    shares, found = [0] * world, []
    for number, ages in enumerate(_ages(counts)):
        count = int((ages < capacity).sum())
        shares[number % world] += count
        if count and number % world == rank:
            # Rows lie oldest first, so that those which count are the last.
            newest = slice(len(ages) - count, None)
            with _open_shard(paths[number]) as file:
                found.append((file.get_slice("rows")[newest], file.get_slice("ids")[newest], ages[newest]))
    return found, max(shares)


def _deal(rows: Tensor, tags: Tensor, most: int, capacity: int, device: torch.device) -> list[_Rows]:
    """Tell all ranks this rank's rows with their ids and ages (``tags``); return those of all that this rank keeps.

    A rank has ``most`` rows to tell at most.
    """
    rank, world = distributed.rank(), distributed.world_size()
    # Sent as bytes: rows of any type travel alike.
    content = rows.view(torch.uint8)
    at_once, found = max(1, _AT_ONCE // (world * content.shape[1])), []
    for start in range(0, most, at_once):
        part, own = content[start : start + at_once], tags[start : start + at_once]
        # Collectives need equal shapes: rows of age -1 fill up, which no rank keeps.
        lacking = min(at_once, most - start) - len(part)
        part = torch.cat([part, part.new_zeros(lacking, content.shape[1])])
        own = torch.cat([own, own.new_full((lacking, 2), -1)])
        ids, ages = distributed.all_gather(own.to(device)).flatten(0, 1).T
        kept = _kept(ages, capacity, rank, world)
        gathered = distributed.all_gather(part.to(device)).flatten(0, 1)[kept]
        found.append((gathered.cpu().view(rows.dtype), ids[kept].cpu(), ages[kept].cpu()))
    return found


def _ages(counts: Sequence[int]) -> Iterator[Tensor]:
    """The age of each row of each file, in the order of the file (0 is the newest row of all).

    Rows newer than the row of age ``t`` in a file are those of a lower age in any file, and those of its age in later
    files. Files are handled one by one: the ages of all rows of a large queue would take a gigabyte on every rank.
    """
    longest = max(counts, default=0)
    holding = len(counts) - torch.tensor(counts).bincount(minlength=longest + 1).cumsum(0)  # files with a row of an age
    newer = holding.cumsum(0) - holding
    later = holding.clone()
    for count in counts:
        later[:count] -= 1
        yield (newer[:count] + later[:count]).flip(0)


def _read_shard_of_rank(path: Path, most: int, dim: int) -> tuple[Tensor, Tensor, int]:
    """Read the newest ``most`` rows of this rank's own shard, when the number of ranks has not changed."""
    first = max(0, _read_head(path, dim).rows - most)
    with _open_shard(path) as file:
        return file.get_slice("rows")[first:], file.get_slice("ids")[first:], int(file.get_tensor("start"))


def _shard_files(folder: Path) -> list[Path]:
    """The shard files of one save, in rank order. Raises :class:`CheckpointError` for an incomplete or mixed set."""
    matches = {path: match for path in sorted(folder.glob("queue-*")) if (match := _SHARD_NAME.fullmatch(path.name))}
    worlds = {int(match[2]) for match in matches.values()}
    if len(worlds) != 1:
        what = "holds no queue shard" if not worlds else f"mixes queue shards of {sorted(worlds)} ranks"
        raise CheckpointError(f"{folder} {what}; it should hold queue-*-of-*.safetensors of one save")
    (world,) = worlds
    missing = sorted(set(range(world)) - {int(match[1]) for match in matches.values()})
    if missing:
        raise CheckpointError(
            f"{folder} lacks queue-{missing[0]:05d}-of-{world:05d}.safetensors ({len(missing)} missing)"
        )
    if len(matches) != world:
        raise CheckpointError(f"{folder}: {list(matches)[-1].name} is the shard of no rank of {world}")
    return list(matches)


class _Head(NamedTuple):
    """The header of a shard: the number of rows, and their type."""

    rows: int
    dtype: str


def _read_head(path: Path, dim: int) -> _Head:
    """Check the header of a shard: rows of width ``dim``, one id each, one start."""
    with _open_shard(path) as file:
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (a safetensors handle is not a dict)
        header = {name: (part.get_dtype(), part.get_shape()) for name, part in stored.items()}
    dtype, shape = header.get("rows", ("", [0, 0]))
    if len(shape) == 2 and shape[1] != dim and dtype in _DTYPES:
        raise CheckpointError(f"{path} holds rows of shape {shape[1:]}, this model's have [{dim}]")
    count = shape[0]
    if dtype not in _DTYPES or header != {
        "rows": (dtype, [count, dim]), "ids": ("I64", [count]), "start": ("I64", [])
    }:  # fmt: skip
        raise CheckpointError(f"{path} is damaged: a shard holds rows, ids and start, this one {str(header)[:300]}")
    return _Head(int(count), dtype)


@contextmanager
def _open_shard(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
