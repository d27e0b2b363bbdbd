"""Blocks of rows of feature files, decoded and written to their places in the arrays of a store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from pretrain.base.errors import DataError
from pretrain.base.files import open_regular
from pretrain.base.hashing import FileState, file_state
from pretrain.regions.arrays import HEADER_BYTES
from pretrain.regions.checks import checked
from pretrain.regions.manifest import Shape
from pretrain.regions.picture import Picture
from pretrain.regions.tsv import decode, parse_row
from pretrain.regions.tsv_index import LENGTH, NUMBER, REGIONS, START, IndexRecord, TsvIndex

_ROWS = 64


class Block(NamedTuple):
    """Rows of one file that are written together.

    Attributes:
        number: among all blocks.
        source: which file.
        first_region: where its first region belongs in the store.
        rows: of the file's index.
    """

    number: int
    source: int
    first_region: int
    rows: Int64[np.ndarray, "rows 6"]

    @property
    def size(self) -> int:
        """Bytes of its rows in the file."""
        return int(self.rows[:, LENGTH].sum())


def blocks_of(indexes: Sequence[TsvIndex]) -> Iterator[Block]:
    """The blocks of all files, one after the other."""
    number = region = 0
    for source, index in enumerate(indexes):
        for first_row in range(0, len(index.rows), _ROWS):
            rows = np.array(index.rows[first_row : first_row + _ROWS])
            yield Block(number, source, region, rows)
            number += 1
            region += int(rows[:, REGIONS].sum())


def count_blocks(indexes: Sequence[TsvIndex]) -> int:
    """How many blocks there are."""
    return sum(-(-len(index.rows) // _ROWS) for index in indexes)


class BlockWriter:
    """Decodes and writes blocks, in whatever process it is called.

    Args:
        folder: holds the arrays' files in full length.
        shape: of the store; a number of classes other than 0 only says that there are labels.
        sources: the records of the files' indexes.
    """

    def __init__(self, folder: Path, shape: Shape, sources: Sequence[IndexRecord]) -> None:
        self._folder, self._shape, self._sources = folder, shape, list(sources)
        self._layouts = shape.arrays()
        self._files: dict[str, int] = {}

    def __call__(self, block: Block) -> tuple[int, int]:
        """Write a block; its number, and the bytes of its rows.

        Raises:
            DataError: a row is not valid, with file and row; or the file is no longer that of its index.
        """
        source = self._sources[block.source]
        path, region = Path(source.path), block.first_region
        with open_regular(path) as file:
            state = file_state(os.fstat(file.fileno()))
            if state != FileState(*source.state):
                raise DataError(f"{path} has changed since its rows were counted: start again")
            for row in block.rows:
                line = os.pread(file.fileno(), int(row[LENGTH]), int(row[START]))
                try:
                    picture = checked(decode(parse_row(line, source.layout)), self._shape.feature_dtype)
                except DataError as problem:
                    raise DataError(f"{path}, row {row[NUMBER]}: {problem}") from None
                if len(picture.features) != row[REGIONS]:
                    raise DataError(f"{path} has changed since its rows were counted: start again")
                self._write(picture, region)
                region += len(picture.features)
        return block.number, block.size

    def _write(self, picture: Picture, region: int) -> None:
        arrays = {"features": picture.features, "boxes": picture.boxes}
        for what, labels in (("object", picture.objects), ("attribute", picture.attributes)):
            if labels is not None:
                arrays |= {f"{what}_ids": labels.ids, f"{what}_scores": labels.scores}
        for name, values in arrays.items():
            layout = self._layouts[name]
            left = np.ascontiguousarray(values, dtype=layout.dtype).data.cast("B")
            place = HEADER_BYTES + region * layout.row_bytes
            while left:  # not through a map: a full disk would be a signal that kills, and not an error
                written = os.pwrite(self._file(name), left, place)
                left, place = left[written:], place + written

    def _file(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(self._folder / f"{name}.npy", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self._files[name]
