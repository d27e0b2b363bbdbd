"""Files on their way from rank to rank, over the process group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from pretrain.base import distributed
from pretrain.base.errors import CheckpointError
from pretrain.base.files import open_regular
from pretrain.engine.durable import write_error

CHUNK = 8 << 20
"""Bytes of a file that are in flight between two ranks, at most."""
BUFFERS = 64 << 20
"""Bytes that a rank has in flight, to and from all others: of a thousand ranks some talk with hundreds."""


@dataclass(frozen=True)
class Move:
    """Files (name, bytes) that ``source`` sends to ``target``; no two moves have both in common."""

    source: int
    target: int
    files: tuple[tuple[str, int], ...]


def chunk_size(moves: Sequence[Move]) -> int:
    """Bytes of a file that are in flight between two ranks; the same for all ``moves``."""
    streams = Counter(rank for move in moves for rank in (move.source, move.target))
    return min(CHUNK, max(1, BUFFERS // max(streams.values(), default=1)))


def move_files(folder: Path, moves: Sequence[Move]) -> None:
    """Carry out all ``moves`` at the same time, each from a rank's ``folder`` to another rank's. Collective.

    A file appears under its name when it is whole.

    Raises:
        CheckpointError: a rank could not read or write, on all ranks; the others have been served nevertheless.
    """
    rank, chunk = distributed.rank(), chunk_size(moves)
    with ExitStack() as stack:
        outgoing = [(m.target, _Outgoing(folder, m.files, chunk, stack)) for m in moves if m.source == rank]
        incoming = [(m.source, _Incoming(folder, m.files, chunk, stack)) for m in moves if m.target == rank]
        while any(not each.done for _, each in (*outgoing, *incoming)):
            send = [(target, each.next()) for target, each in outgoing if not each.done]
            open_ones = [(source, each) for source, each in incoming if not each.done]
            buffers = [(source, torch.empty(each.size, dtype=torch.uint8)) for source, each in open_ones]
            distributed.exchange(send, buffers)
            for (_, each), (_, buffer) in zip(open_ones, buffers, strict=True):
                each.take(buffer)
        with distributed.synchronize_errors():
            streams: list[_Stream] = [each for _, each in (*outgoing, *incoming)]
            for stream in streams:
                if stream.error is not None:
                    raise write_error(folder, stream.error) from stream.error


class _Stream:
    """The chunks of some files, one after another. After an error the rest is zeros, so that nobody waits without end.

    One file is open at a time: a rank may send hundreds, and has a descriptor for each of its peers.
    """

    def __init__(self, folder: Path, files: Sequence[tuple[str, int]], chunk: int, stack: ExitStack) -> None:
        self.error: OSError | None = None
        self._folder, self._chunk = folder, chunk
        self._chunks: Iterator[tuple[str, int, int]] = iter(
            [
                (name, size, start)
                for name, size in files
                for start in range(0, max(size, 1), chunk)  # an empty file is a chunk, too
            ]
        )
        self._file: IO[bytes] | None = None
        self._opened = stack.enter_context(ExitStack())
        self._advance()

    def _advance(self) -> None:
        self._now = next(self._chunks, None)

    def _close(self) -> None:
        self._file = None
        self._opened.close()

    @property
    def done(self) -> bool:
        return self._now is None

    @property
    def size(self) -> int:
        """Bytes of the chunk that is next; at least one is sent."""
        assert self._now is not None
        _, size, start = self._now
        return max(1, min(self._chunk, size - start))

    def _try(self, action: Callable[[], None]) -> None:
        if self.error is None:
            try:
                action()
            except OSError as error:
                self.error = error


class _Outgoing(_Stream):
    def next(self) -> Tensor:
        """Read the next chunk."""
        chunk = torch.zeros(self.size, dtype=torch.uint8)
        self._try(lambda: self._read(chunk))
        self._advance()
        return chunk

    def _read(self, chunk: Tensor) -> None:
        assert self._now is not None
        name, size, start = self._now
        if start == 0:
            self._file = self._opened.enter_context(open_regular(self._folder / name, error=CheckpointError))
        assert self._file is not None
        view = chunk.numpy()[: size - start]
        if self._file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise OSError(f"{self._folder / name} is shorter than it was")
        if start + self._chunk >= size:
            self._close()


class _Incoming(_Stream):
    def take(self, chunk: Tensor) -> None:
        """Write the next chunk."""
        self._try(lambda: self._write(chunk))
        self._advance()

    def _write(self, chunk: Tensor) -> None:
        assert self._now is not None
        name, size, start = self._now
        path = self._folder / name
        partial = path.with_name(f".{path.name}.partial")
        if start == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._opened.enter_context(partial.open("wb"))
        assert self._file is not None
        self._file.write(chunk.numpy()[: size - start].data)
        if start + self._chunk >= size:
            self._close()
            os.replace(partial, path)
