"""Queue shards on disk: one safetensors file a rank, readable by any number of ranks.

``queue-00002-of-00004.safetensors`` holds the ``rows`` and ``ids`` of rank 2 of 4, oldest first. A row of age ``t``
(0 is the newest of its rank) on rank ``r`` of ``W`` has order ``-(t + 1) W + r``; sorting by it restores the global
queue. The loaded rows are dealt out again in that order, the newest to the last rank, and pushing goes on as if the
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

from pretrain.base.errors import CheckpointError

_DTYPES = ("F32", "BF16", "F64")
_NAME = re.compile(r"queue-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)


def share(capacity: int, rank: int, world: int) -> int:
    """Rows of a global queue of ``capacity`` that ``rank`` of ``world`` keeps; at most ``ceil(capacity / world)``."""
    return (capacity + rank) // world


def write(folder: Path, rows: Tensor, ids: Tensor, start: int, rank: int, world: int) -> Path:
    """Write one rank's shard, rows oldest first, and return the file; ``start`` is the oldest row's place in memory."""
    path = folder / f"queue-{rank:05d}-of-{world:05d}.safetensors"
    save_file({"rows": rows.cpu(), "ids": ids.cpu(), "start": torch.tensor(start)}, path)
    return path


def read(folder: Path, capacity: int, dim: int, rank: int, world: int) -> tuple[Tensor, Tensor, int]:
    """Rows and ids, oldest first, that ``rank`` of ``world`` keeps of the newest ``capacity`` in ``folder``; and the
    place of the oldest, which has a meaning for as many ranks as wrote them.

    Only these rows are read, and for as many ranks as wrote them only this rank's file. Raises
    :class:`CheckpointError` for a missing, damaged or foreign shard.
    """
    paths = _complete_set(folder)
    if len(paths) == world:
        return _read_own(paths[rank], share(capacity, rank, world), dim)
    counts = [_count(path, dim) for path in paths]
    rows, ids, places = [], [], []
    for path, (wanted, place) in zip(paths, _mine(counts, capacity, rank, world), strict=True):
        if len(wanted):
            with _opened(path) as file:
                rows.append(file.get_slice("rows")[wanted.tolist()])
                ids.append(file.get_slice("ids")[wanted.tolist()])
            places.append(place)
    if not rows:
        return torch.empty(0, dim), torch.empty(0, dtype=torch.int64), 0
    oldest_first = torch.cat(places).argsort(descending=True)
    return torch.cat(rows)[oldest_first], torch.cat(ids)[oldest_first], 0


def _mine(counts: Sequence[int], capacity: int, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Of each file, which rows ``rank`` keeps, and the place of each, 0 for the newest row of all.

    Newer than the row of age ``t`` in a file are those of a lower age in any, and those of its age in later files. A
    file at a time, since all rows of a large queue would be a gigabyte of numbers on every rank.
    """
    longest = max(counts, default=0)
    ends = torch.tensor(counts).bincount(minlength=longest + 1)
    holding = len(counts) - ends.cumsum(0)  # files with a row of each age
    younger = holding.cumsum(0) - holding
    later = torch.zeros(longest + 1, dtype=torch.int64)
    found = []
    for count in reversed(counts):
        place = younger[:count] + later[:count]
        later[:count] += 1
        age = ((place < capacity) & ((-1 - place) % world == rank)).nonzero().flatten().flip(0)
        found.append((count - 1 - age, place[age]))
    return found[::-1]


def _read_own(path: Path, most: int, dim: int) -> tuple[Tensor, Tensor, int]:
    """The newest ``most`` rows of a rank's own shard: of as many ranks, each keeps its own (see the module's text)."""
    first = max(0, _count(path, dim) - most)
    with _opened(path) as file:
        return file.get_slice("rows")[first:], file.get_slice("ids")[first:], int(file.get_tensor("start"))


def _complete_set(folder: Path) -> list[Path]:
    """The shards of one save, in rank order."""
    found = {path: match for path in sorted(folder.glob("queue-*")) if (match := _NAME.fullmatch(path.name))}
    worlds = {int(match[2]) for match in found.values()}
    if len(worlds) != 1:
        what = "holds no queue shard" if not worlds else f"mixes queue shards of {sorted(worlds)} ranks"
        raise CheckpointError(f"{folder} {what}; it should hold queue-*-of-*.safetensors of one save")
    (world,) = worlds
    missing = sorted(set(range(world)) - {int(match[1]) for match in found.values()})
    if missing:
        raise CheckpointError(
            f"{folder} lacks queue-{missing[0]:05d}-of-{world:05d}.safetensors ({len(missing)} missing)"
        )
    if len(found) != world:
        raise CheckpointError(f"{folder}: {list(found)[-1].name} is the shard of no rank of {world}")
    return list(found)


def _count(path: Path, dim: int) -> int:
    """Rows in a shard, whose head is checked: rows of width ``dim``, as many ids, one start."""
    with _opened(path) as file:
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (a safetensors handle is no dict)
        found = {name: (part.get_dtype(), part.get_shape()) for name, part in stored.items()}
    dtype, shape = found.get("rows", ("", [0, 0]))
    if len(shape) == 2 and shape[1] != dim and dtype in _DTYPES:
        raise CheckpointError(f"{path} holds rows of shape {shape[1:]}, this model's have [{dim}]")
    count = shape[0]
    if dtype not in _DTYPES or found != {
        "rows": (dtype, [count, dim]), "ids": ("I64", [count]), "start": ("I64", [])
    }:  # fmt: skip
        raise CheckpointError(f"{path} is damaged: a shard holds rows, ids and start, this one {str(found)[:300]}")
    return int(count)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
