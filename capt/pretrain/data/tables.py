"""Tables, wherever they are: files of any format (`FORMATS`), folders that ``datasets`` saved, data sets of the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import open_regular
from capt.pretrain.data.formats import ReadOptions, TableRow, format_of, suffix_of, suffixes
from capt.pretrain.data.paths import why_missing

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_ALL = ReadOptions()


class FileTable(NamedTuple):
    """The columns of a file (those of the first row) and its rows, which are read as they are taken.

    ``classes``: column -> the names of the classes whose numbers it holds, as the schema of the file has them.
    """

    path: Path
    columns: list[str]
    rows: Iterator[TableRow]
    classes: Mapping[str, Sequence[str]]


def open_table(path: Path, reading: ReadOptions = _ALL) -> FileTable:
    """Open the table in a file, and read its first row.

    Raises:
        DataError: there is no such file, no reader for it, it holds no row, or a column twice.
    """
    if not path.is_file() and not path.is_symlink():
        raise DataError(why_missing(path))
    _require_target(path)
    with open_regular(path) as raw:
        classes = format_of(path).classes(path, raw)
    rows = read_file(path, reading)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: the file holds no row")
    return FileTable(path, list(first.cells), chain([first], rows), classes)


def read_file(path: Path, reading: ReadOptions = _ALL) -> Iterator[TableRow]:
    """Yield the rows of a file. Raises ``DataError`` as `Format.rows`, or where there is no reader or not a byte."""
    found = format_of(path)
    _require_target(path)
    with open_regular(path) as raw:
        if not raw.peek(1):
            raise DataError(f"{path}: the file is empty")
        yield from found.rows(path, raw, reading)


def _require_target(path: Path) -> None:
    if not path.exists():
        raise DataError(f"{path}: a link that leads to no file")


def read_table(path: Path, split: str = "train", reading: ReadOptions = _ALL) -> Iterator[TableRow]:
    """Yield the rows of a file, of a folder that ``datasets`` saved, or of a data set of the hub.

    ``path`` may be ``USER/NAME`` or ``USER/NAME/SUBSET`` of the hub; ``split`` is of data sets. Raises ``DataError``.
    """
    if path.is_dir():
        from capt.pretrain.data.hub import is_saved  # datasets takes a second to import

        if not is_saved(path):
            names = ", ".join(f"*{suffix}" for suffix in suffixes())
            raise DataError(
                f"{path}: a folder without a data set; name its files ({names}), a folder that datasets saved, or one "
                "with corpus.jsonl, queries.jsonl and qrels/"
            )
        yield from _data_set(str(path), None, split, reading)
    elif path.exists() or path.is_symlink():
        yield from read_file(path, reading)
    # A mistyped path, whose first folder is there, is not taken for a data set of the hub.
    elif _HUB_ID.fullmatch(str(path)) and not Path(path.parts[0]).exists() and suffix_of(path) not in suffixes():
        user, name, *subset = path.parts
        yield from _data_set(f"{user}/{name}", subset[0] if subset else None, split, reading)
    else:
        raise DataError(why_missing(path))


def _data_set(name: str, subset: str | None, split: str, reading: ReadOptions) -> Iterator[TableRow]:
    from capt.pretrain.data.hub import load_split

    found = load_split(name, subset, split, "data.files")
    place, number = f"{name}/{subset}" if subset else name, 0
    for batch in found.select_columns(reading.choose(found.column_names)).iter(batch_size=256):
        for cells in zip(*batch.values(), strict=True):
            number += 1
            yield TableRow(f"{place}, row {number}", number, dict(zip(batch, cells, strict=True)))
