"""Join parts into a shard set: every shard is made by itself, from what the parts hold of its piece of the stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64

from capt.pretrain.base.atomic import sync
from capt.pretrain.data.shard_writer import HashedFile
from capt.pretrain.data.shards import DOCUMENTS, FileRecord
from capt.pretrain.data.sources import Split


@dataclass(frozen=True)
class ShardStream:
    """The stream of a split, over all parts.

    Attributes:
        parts: the folders of the parts.
        split: the name of the split.
        tokens: how many tokens of each part stay in the stream.
        dtype: of a token.
        mask: whether each document stays, by part; None where all do.
    """

    parts: Sequence[Path]
    split: Split
    tokens: Int64[np.ndarray, " parts"]
    dtype: np.dtype[np.unsignedinteger]
    mask: Sequence[np.ndarray] | None = None

    @property
    def total(self) -> int:
        """Tokens of the stream."""
        return int(self.tokens.sum())

    def write_shard(self, begin: int, end: int, file: HashedFile) -> None:
        """Write the tokens ``begin .. end-1`` of the stream."""
        ends = np.cumsum(self.tokens)
        # From the part in which `begin` lies, until a part begins behind `end`.
        for part in range(int(np.searchsorted(ends, begin, side="right")), len(self.parts)):
            base = int(ends[part] - self.tokens[part])
            if base >= end:
                return
            for start, stop in self._runs(part, max(begin - base, 0), min(end - base, int(self.tokens[part]))):
                stored = np.memmap(self._file(part, "tokens"), dtype=self.dtype, mode="r")
                for at in range(start, stop, _AT_ONCE):
                    file.write(stored[at : min(at + _AT_ONCE, stop)])

    def write_documents(self, file: HashedFile) -> None:
        """Write where each document of the stream begins, and where the last one ends."""
        base = 0
        for part in range(len(self.parts)):
            lengths = _lengths(self._ends(part))
            # Documents that were left out take no place in the stream.
            if (stay := self._stay(part)) is not None:
                lengths = lengths[stay]
            ends = np.cumsum(lengths)
            file.write((base + ends - lengths).astype("<i8"))
            base += int(self.tokens[part])
        file.write(np.array([base], dtype="<i8"))

    def counts(self, part: int) -> tuple[int, int]:
        """Tokens and documents of a part that stay."""
        lengths, stay = _lengths(self._ends(part)), self._stay(part)
        if stay is not None:
            lengths = lengths[stay]
        return int(lengths.sum()), len(lengths)

    def _runs(self, part: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The places in the file of a part that hold the tokens ``begin .. end-1`` of those that stay of it."""
        stay = self._stay(part)
        if stay is None or stay.all():
            if begin < end:
                yield begin, end
            return
        ends = self._ends(part)
        lengths = _lengths(ends)
        # Runs of documents that stay: each begins at one edge and ends at the next.
        edges = np.flatnonzero(np.diff(np.concatenate([[False], stay, [False]]).astype(np.int8)))
        starts = (ends - lengths)[edges[::2]]  # of each run of documents that stay
        sizes = ends[edges[1::2] - 1] - starts
        before = np.cumsum(sizes) - sizes
        for start, size, place in zip(starts.tolist(), sizes.tolist(), before.tolist(), strict=True):
            first, last = max(begin - place, 0), min(end - place, size)
            if first < last:
                yield start + first, start + last

    def _stay(self, part: int) -> Bool[np.ndarray, " documents"] | None:
        # `of` has the number of each document, for some have no tokens in this split.
        return None if self.mask is None else self.mask[part][np.fromfile(self._file(part, "of"), dtype="<i8")]

    def _ends(self, part: int) -> Int64[np.ndarray, " documents"]:
        return np.fromfile(self._file(part, "ends"), dtype="<i8")

    def _file(self, part: int, what: str) -> Path:
        return self.parts[part] / f"{self.split}.{what}"


_AT_ONCE = 1 << 22


def _lengths(ends: Int64[np.ndarray, " documents"]) -> Int64[np.ndarray, " documents"]:
    return np.diff(ends, prepend=0)


def write_file(stream: ShardStream, name: str, shard_tokens: int, folder: Path) -> FileRecord:
    """Write the file ``name`` of a shard set into the new folder ``folder``."""
    folder.mkdir(parents=True)
    file = HashedFile(folder / name)
    if name == DOCUMENTS:
        stream.write_documents(file)
    else:
        number = int(name.removeprefix("shard-").removesuffix(".bin"))
        stream.write_shard(number * shard_tokens, min((number + 1) * shard_tokens, stream.total), file)
    file.close()
    sync(folder / name)
    return file.record()
