"""Queue shards on disk: one safetensors file a rank, readable by any number of ranks.

``queue-00002-of-00004.safetensors`` holds the ``rows`` and ``ids`` of rank 2 of 4, oldest first; its metadata
name the ``drift`` that the rows are corrected for, where there is one. A row of age ``t``
(0 is the newest of its rank) on rank ``r`` of ``W`` has order ``-(t + 1) W + r``; sorting by it restores the global
queue. The loaded rows are dealt out again in that order, the newest to the last rank, and pushing continues as if the
queue had always been sharded this way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError

_ROW_DTYPES = ("F32", "BF16", "F64")
_SHARD_NAME = re.compile(r"queue-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)


def shard_size(capacity: int, rank: int, world: int) -> int:
    """The number of rows of a global queue of ``capacity`` that ``rank`` of ``world`` keeps."""
    return (capacity + rank) // world


def write_shard(folder: Path, rows: Tensor, ids: Tensor, start: int, rank: int, world: int, drift: str) -> Path:
    """Write one rank's shard, oldest row first, and return the file; ``start`` is that row's place in memory."""
    path = folder / f"queue-{rank:05d}-of-{world:05d}.safetensors"
    about = None if drift == "none" else {"drift": drift}
    save_file({"rows": rows.cpu(), "ids": ids.cpu(), "start": torch.tensor(start)}, path, about)
    return path


def read_drift(folder: Path, dim: int) -> str:
    """What the rows in ``folder`` are corrected for: ``drift`` of the queue that saved them.

    Raises:
        CheckpointError: a missing or damaged shard.
    """
    path = _shard_files(folder)[0]
    _count_rows(path, dim)
    with _open_shard(path) as file:
        return str((file.metadata() or {}).get("drift", "none"))


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
    counts = [_count_rows(path, dim) for path in paths]
    rows, ids, ages = [], [], []
    for path, (indices, age) in zip(paths, _kept_rows(counts, capacity, rank, world), strict=True):
        if len(indices):
            with _open_shard(path) as file:
                rows.append(file.get_slice("rows")[indices.tolist()])
                ids.append(file.get_slice("ids")[indices.tolist()])
            ages.append(age)
    if not rows:
        return torch.empty(0, dim), torch.empty(0, dtype=torch.int64), 0
    oldest_first = torch.cat(ages).argsort(descending=True)
    return torch.cat(rows)[oldest_first], torch.cat(ids)[oldest_first], 0


def _kept_rows(counts: Sequence[int], capacity: int, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """For each file, the indices of the rows that ``rank`` keeps, and the age of each (0 is the newest row of all).

    Rows newer than the row of age ``t`` in a file are those of a lower age in any file, and those of its age in later
    files. Files are handled one by one: the ages of all rows of a large queue would take a gigabyte on every rank.
    """
    longest = max(counts, default=0)
    ends = torch.tensor(counts).bincount(minlength=longest + 1)
    holding = len(counts) - ends.cumsum(0)  # files with a row of each age
    newer = holding.cumsum(0) - holding
    later = torch.zeros(longest + 1, dtype=torch.int64)
    kept_rows = []
    for count in reversed(counts):
        ages = newer[:count] + later[:count]
        later[:count] += 1
        kept = ((ages < capacity) & ((-1 - ages) % world == rank)).nonzero().flatten().flip(0)
        kept_rows.append((count - 1 - kept, ages[kept]))
    return kept_rows[::-1]


def _read_shard_of_rank(path: Path, most: int, dim: int) -> tuple[Tensor, Tensor, int]:
    """Read the newest ``most`` rows of this rank's own shard, when the number of ranks has not changed."""
    first = max(0, _count_rows(path, dim) - most)
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


def _count_rows(path: Path, dim: int) -> int:
    """Check the header of a shard (rows of width ``dim``, one id each, one start) and return its number of rows."""
    with _open_shard(path) as file:
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (a safetensors handle is not a dict)
        header = {name: (part.get_dtype(), part.get_shape()) for name, part in stored.items()}
    dtype, shape = header.get("rows", ("", [0, 0]))
    if len(shape) == 2 and shape[1] != dim and dtype in _ROW_DTYPES:
        raise CheckpointError(f"{path} holds rows of shape {shape[1:]}, this model's have [{dim}]")
    count = shape[0]
    if dtype not in _ROW_DTYPES or header != {
        "rows": (dtype, [count, dim]), "ids": ("I64", [count]), "start": ("I64", [])
    }:  # fmt: skip
        raise CheckpointError(f"{path} is damaged: a shard holds rows, ids and start, this one {str(header)[:300]}")
    return int(count)


@contextmanager
def _open_shard(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
