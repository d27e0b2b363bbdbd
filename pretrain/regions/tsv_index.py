"""Where the rows of a feature file begin and what their pictures are called: one pass, which also hashes the file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import numpy as np
from jaxtyping import Int64
from pydantic import Field

from pretrain.base.atomic import sync
from pretrain.base.errors import DataError, shown
from pretrain.base.files import open_regular, write_text
from pretrain.base.hashing import FileState, file_state
from pretrain.base.records import Count, Record, read_record
from pretrain.regions.arrays import ArrayFile, map_array, write_array
from pretrain.regions.checks import check_name
from pretrain.regions.tsv import LONGEST_ROW, parse_row

START, LENGTH, REGIONS, WIDTH, HEIGHT = range(5)
"""Columns of the rows of an index: first byte and number of bytes in the file, and what the row says."""
_ROWS_TOGETHER = 1024


class IndexRecord(Record):
    """What an index says about its file; the arrays lie beside it.

    Attributes:
        path: of the file.
        state: the file as the file system described it.
        sha256: of the file.
        pictures: rows.
        size: features of a region.
        labels: whether there are classes of objects, and of attributes.
        name_bytes: bytes of the longest name.
    """

    path: str
    state: Annotated[list[int], Field(min_length=5, max_length=5)]
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    pictures: Count
    size: Count
    labels: Annotated[list[bool], Field(min_length=2, max_length=2)]
    name_bytes: Annotated[int, Field(gt=0, le=LONGEST_ROW)]

    def arrays(self) -> dict[str, ArrayFile]:
        """The arrays beside the record."""
        return {
            "rows": ArrayFile("<i8", (self.pictures, 5)),
            "names": ArrayFile(f"|S{self.name_bytes}", (self.pictures,)),
        }


class TsvIndex(NamedTuple):
    """The index of a file."""

    record: IndexRecord
    rows: Int64[np.ndarray, "pictures 5"]
    names: np.ndarray


def index_tsv(path: Path, folder: Path, advance: Callable[[int], None]) -> TsvIndex:
    """The index of the file ``path``, which is kept in ``folder`` and taken from there while the file stays the same.

    ``advance`` is called with the number of bytes that are done since its last call; what it raises ends the pass.

    Raises:
        DataError: a row is not valid, with file and row; the rows are not alike; or the file changes meanwhile.
    """
    place = folder / hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:16]
    with open_regular(path) as file:
        state = file_state(os.fstat(file.fileno()))
        known = _known(place, path, state)
        if known is not None:
            advance(state.size)
            return known
        index = _read(file, path, state, advance)
        if file_state(os.fstat(file.fileno())) != state:
            raise DataError(f"{path} changed while it was read: see to it that nothing writes it, and start again")
    _keep(place, index)
    return index


def _read(file: IO[bytes], path: Path, state: FileState, advance: Callable[[int], None]) -> TsvIndex:
    digest, position, number = hashlib.sha256(), 0, 0
    rows, names = [np.empty((0, 5), dtype=np.int64)], [np.empty(0, dtype="S1")]
    latest: list[tuple[int, int, int, int, int]] = []
    latest_names: list[bytes] = []
    size: int | None = None
    labels = (False, False)

    def pack() -> None:
        rows.append(np.array(latest, dtype=np.int64).reshape(-1, 5))
        names.append(np.array(latest_names, dtype=bytes))
        latest.clear()
        latest_names.clear()

    while line := file.readline(LONGEST_ROW + 1):
        number += 1
        digest.update(line)
        if len(line) > LONGEST_ROW:
            raise DataError(f"{path}, row {number}: over {LONGEST_ROW:,} bytes, more than a row may have")
        try:
            row = parse_row(line)
            check_name(row.name)
        except DataError as problem:
            raise DataError(f"{path}, row {number}: {problem}") from None
        if size is None:
            size, labels = row.size, row.labels
        if (row.size, row.labels) != (size, labels):
            raise DataError(
                f"{path}, row {number} (picture {shown(row.name)}): {_contents(row.size, row.labels)}, and "
                f"{_contents(size, labels)} in the first row; a store holds features of one kind"
            )
        latest.append((position, len(line), row.regions, row.width, row.height))
        latest_names.append(row.name.encode())
        position += len(line)
        advance(len(line))
        if len(latest) == _ROWS_TOGETHER:
            pack()
    if size is None:
        raise DataError(f"{path}: the file is empty")
    pack()
    all_names = np.concatenate(names)
    record = IndexRecord(
        path=str(path), state=list(state), sha256=digest.hexdigest(), pictures=len(all_names), size=size,
        labels=list(labels), name_bytes=all_names.dtype.itemsize,
    )  # fmt: skip
    return TsvIndex(record, np.concatenate(rows), all_names)


def _contents(size: int, labels: tuple[bool, bool]) -> str:
    has = [what for what, there in zip(("objects", "attributes"), labels, strict=True) if there]
    return f"{size} features a region {'and ' + ' and '.join(has) if has else 'and no labels'}"


def _known(place: Path, path: Path, state: FileState) -> TsvIndex | None:
    """The index that is kept at ``place``, if it is that of the file in this state."""
    try:
        record = read_record(IndexRecord, place.with_suffix(".json"), error=DataError)
        if tuple(record.state) != state:
            return None
        rows, names = (map_array(place.with_suffix(f".{name}"), layout) for name, layout in record.arrays().items())
    except (FileNotFoundError, DataError):
        return None
    named = record.model_copy(update={"path": str(path)})  # an earlier call may have had another working folder
    return TsvIndex(named, rows, names)


def _keep(place: Path, index: TsvIndex) -> None:
    place.parent.mkdir(exist_ok=True)
    for name, layout in index.record.arrays().items():
        path = place.with_suffix(f".{name}")
        path.unlink(missing_ok=True)
        write_array(path, layout, index.rows if name == "rows" else index.names)
        sync(path)
    write_text(place.with_suffix(".json"), index.record.model_dump_json())  # last: it says that the arrays are whole
