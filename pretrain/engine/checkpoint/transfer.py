"""Copies files of a checkpoint from rank to rank over the process group, all pairs of ranks side by side."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.base.files import open_regular
from capt.pretrain.engine.durable import write_error

CHUNK = 8 << 20
"""Largest number of bytes of a file that two ranks exchange in one turn."""
BUFFERS = 64 << 20
"""Largest number of bytes that a rank exchanges with all others in one turn: some of a thousand ranks have hundreds."""


class Transfer(NamedTuple):
    """Files (name, bytes) that ``source`` sends to ``target``; one transfer for each pair of ranks."""

    source: int
    target: int
    files: tuple[tuple[str, int], ...]


class _Chunk(NamedTuple):
    name: str
    start: int
    size: int
    last: bool


def chunk_size(transfers: Sequence[Transfer]) -> int:
    """Return the bytes of a file that two ranks exchange in one turn; the same for all ``transfers``."""
    partners = Counter(rank for each in transfers for rank in (each.source, each.target))
    return min(CHUNK, max(1, BUFFERS // max(partners.values(), default=1)))


def copy_files(folder: Path, transfers: Sequence[Transfer]) -> None:
    """Carry out all transfers side by side, from a rank's ``folder`` to another rank's. Collective.

    All ranks know the chunks of every transfer, so they exchange one chunk of each per turn without asking. A file
    appears under its name when it is complete. After an error a rank sends zeros, so that no other rank waits for it.

    Raises:
        CheckpointError: a rank could not read or write, on all ranks.
    """
    rank, size = distributed.rank(), chunk_size(transfers)
    own = [each for each in transfers if rank in (each.source, each.target)]
    errors: list[OSError] = []
    for turn in zip_longest(*(_chunks(each, size) for each in own)):
        chunks = [(each, chunk) for each, chunk in zip(own, turn, strict=True) if chunk is not None]
        outgoing = [(each.target, _read(folder, chunk, errors)) for each, chunk in chunks if each.source == rank]
        expected = [(each.source, chunk) for each, chunk in chunks if each.target == rank]
        incoming = [(source, torch.zeros(max(1, chunk.size), dtype=torch.uint8)) for source, chunk in expected]
        distributed.exchange(outgoing, incoming)
        for (_, chunk), (_, content) in zip(expected, incoming, strict=True):
            _write(folder, chunk, content, errors)
    with distributed.synchronize_errors():
        if errors:
            raise write_error(folder, errors[0]) from errors[0]


def _chunks(transfer: Transfer, size: int) -> Iterator[_Chunk]:
    for name, total in transfer.files:
        for start in range(0, max(total, 1), size):  # an empty file is a chunk, too
            yield _Chunk(name, start, min(size, total - start), last=start + size >= total)


def _read(folder: Path, chunk: _Chunk, errors: list[OSError]) -> Tensor:
    content = torch.zeros(max(1, chunk.size), dtype=torch.uint8)
    try:
        with open_regular(folder / chunk.name, error=CheckpointError) as file:
            file.seek(chunk.start)
            if not errors and file.readinto(content.numpy()[: chunk.size].data) != chunk.size:
                raise OSError(f"{folder / chunk.name} is shorter than it was")
    except OSError as error:
        errors.append(error)
    return content


def _write(folder: Path, chunk: _Chunk, content: Tensor, errors: list[OSError]) -> None:
    path = folder / chunk.name
    partial = path.with_name(f".{path.name}.partial")
    if errors:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab" if chunk.start else "wb") as file:
            file.write(content.numpy()[: chunk.size].data)
        if chunk.last:
            os.replace(partial, path)
    except OSError as error:
        errors.append(error)
