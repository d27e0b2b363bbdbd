"""Index the rows of a feature file and the names of their pictures in one pass, which also hashes the file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import numpy as np
from jaxtyping import Int64
from pydantic import Field

from capt.pretrain.base.arrays import ArrayFile, map_array, write_array
from capt.pretrain.base.atomic import sync
from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.files import open_regular, write_text
from capt.pretrain.base.records import Count, Record, read_record
from capt.pretrain.base.verification import FileState, file_state
from capt.pretrain.regions.manifest import FeatureType
from capt.pretrain.regions.picture import Damage, check_name, checked
from capt.pretrain.regions.tsv import LONGEST_ROW, TsvLayout, TsvRow, decode, parse_row

START, LENGTH, REGIONS, WIDTH, HEIGHT, NUMBER = range(6)
"""Columns of the rows of an index: first byte and number of bytes in the file, what the row says, and its number."""
_ROWS_TOGETHER = 1024


class IndexRecord(Record):
    """The record of an index; the arrays are beside it.

    Attributes:
        path: of the file.
        state: the file as the file system described it.
        sha256: of the file.
        pictures: rows.
        size: features of a region.
        labels: whether there are classes of objects, and of attributes.
        name_bytes: bytes of the longest name.
        layout: of the rows.
        skip_damaged: whether rows that cannot be used were left out; then every row was decoded.
        left_out: those rows, each with the reason.
    """

    path: str
    state: Annotated[list[int], Field(min_length=5, max_length=5)]
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    pictures: Count
    size: Count
    labels: Annotated[list[bool], Field(min_length=2, max_length=2)]
    name_bytes: Annotated[int, Field(gt=0, le=LONGEST_ROW)]
    layout: TsvLayout
    skip_damaged: bool
    left_out: list[str]

    def arrays(self) -> dict[str, ArrayFile]:
        """The arrays beside the record."""
        return {
            "rows": ArrayFile("<i8", (self.pictures, 6)),
            "names": ArrayFile(f"|S{self.name_bytes}", (self.pictures,)),
        }


class TsvIndex(NamedTuple):
    """The index of a file."""

    record: IndexRecord
    rows: Int64[np.ndarray, "pictures 6"]
    names: np.ndarray


def index_tsv(
    path: Path, folder: Path, layout: TsvLayout, dtype: FeatureType, skip_damaged: bool, advance: Callable[[int], None]
) -> TsvIndex:
    """The index of the file ``path``, which is kept in ``folder`` and taken from there while the file stays the same.

    Args:
        path: the file.
        folder: where indexes are kept.
        layout: of the rows.
        dtype: type in which features are stored; rows are checked for it where damaged ones are skipped.
        skip_damaged: decode every row and leave out those that cannot be used, instead of stopping at the first.
        advance: called with the number of bytes that are done since its last call; what it raises ends the pass.

    Raises:
        DataError: a row is not valid, with file and row; the rows are not alike; or the file changes meanwhile.
    """
    # Named by the place of the file, for two may have one name.
    place = folder / hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:16]
    with open_regular(path) as file:
        state = file_state(os.fstat(file.fileno()))
        known = _known(place, path, state, layout, skip_damaged)
        if known is not None:
            advance(state.size)
            return known
        index = _Pass(path, layout, dtype, Damage(skip_damaged)).read(file, state, advance)
        # Behind the pass: what was hashed must be what the rows were counted in.
        if file_state(os.fstat(file.fileno())) != state:
            raise DataError(f"{path} changed while it was read: see to it that nothing writes it, and start again")
    _keep(place, index)
    return index


class _Pass:
    """A pass over the lines of a file."""

    def __init__(self, path: Path, layout: TsvLayout, dtype: FeatureType, damage: Damage) -> None:
        self._path, self._layout, self._dtype, self._damage = path, layout, dtype, damage
        self._rows, self._names = [np.empty((0, 6), dtype=np.int64)], [np.empty(0, dtype="S1")]
        self._latest: list[tuple[int, ...]] = []
        self._latest_names: list[bytes] = []
        self._first: TsvRow | None = None
        self._left_out: list[str] = []

    def read(self, file: IO[bytes], state: FileState, advance: Callable[[int], None]) -> TsvIndex:
        """The index of the file."""
        digest, position, number = hashlib.sha256(), 0, 0
        while line := file.readline(LONGEST_ROW + 1):
            number += 1
            digest.update(line)
            start, position, part = position, position + len(line), line
            while len(part) > LONGEST_ROW and not part.endswith(b"\n"):  # the rest of a row that is too long
                part = file.readline(LONGEST_ROW + 1)
                digest.update(part)
                position += len(part)
            # The first line of a file with a header holds names.
            if number > 1 or not self._layout.header:
                try:
                    self._add(self._checked(line, position - start), start, position - start, number)
                except DataError as problem:
                    self._damage.report(f"{self._path}, row {number}", str(problem))
                    self._left_out.append(f"row {number}: {problem}")
            advance(position - start)
        self._pack()
        names = np.concatenate(self._names)
        if self._first is None:
            what = "no row can be used" if number else "the file is empty"
            raise DataError(f"{self._path}: {what}")
        record = IndexRecord(
            path=str(self._path), state=list(state), sha256=digest.hexdigest(), pictures=len(names),
            size=self._first.size, labels=list(self._first.labels), name_bytes=names.dtype.itemsize,
            layout=self._layout, skip_damaged=self._damage.skip, left_out=self._left_out,
        )  # fmt: skip
        return TsvIndex(record, np.concatenate(self._rows), names)

    def _checked(self, line: bytes, length: int) -> TsvRow:
        if length > LONGEST_ROW:
            raise DataError(f"over {LONGEST_ROW:,} bytes, more than a row may have")
        row = parse_row(line, self._layout)
        check_name(row.name)
        first = self._first or row
        if (row.size, row.labels) != (first.size, first.labels):
            raise DataError(
                f"picture {shown(row.name)}: {_contents(row.size, row.labels)}, and "
                f"{_contents(first.size, first.labels)} in the first row; a store holds features of one kind"
            )
        if self._damage.skip:
            checked(decode(row), self._dtype)
        return row

    def _add(self, row: TsvRow, start: int, length: int, number: int) -> None:
        # The first row is kept for comparison, without its arrays.
        self._first = self._first or row._replace(texts={name: text[:1] for name, text in row.texts.items()})
        self._latest.append((start, length, row.regions, row.width, row.height, number))
        self._latest_names.append(row.name.encode())
        if len(self._latest) == _ROWS_TOGETHER:
            self._pack()

    def _pack(self) -> None:
        self._rows.append(np.array(self._latest, dtype=np.int64).reshape(-1, 6))
        self._names.append(np.array(self._latest_names, dtype=bytes))
        self._latest, self._latest_names = [], []


def _contents(size: int, labels: tuple[bool, bool]) -> str:
    has = [what for what, there in zip(("objects", "attributes"), labels, strict=True) if there]
    return f"{size} features a region {'and ' + ' and '.join(has) if has else 'and no labels'}"


def _known(place: Path, path: Path, state: FileState, layout: TsvLayout, skip_damaged: bool) -> TsvIndex | None:
    """The index that is kept at ``place``, if it is that of the file in this state, read in the same way."""
    try:
        record = read_record(IndexRecord, place.with_suffix(".json"), error=DataError)
        if (tuple(record.state), record.layout, record.skip_damaged) != (state, layout, skip_damaged):
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
        # An index of an older state must go before the new one is written.
        path.unlink(missing_ok=True)
        write_array(path, layout, index.rows if name == "rows" else index.names)
        sync(path)
    write_text(place.with_suffix(".json"), index.record.model_dump_json())  # last: it says that the arrays are whole
