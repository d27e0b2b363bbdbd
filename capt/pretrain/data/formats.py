"""The formats of tables in files, and the registry of them.

A format yields the rows of a file with their places, and may write a table of ours. The rooms that read tables (text,
pairs, labels, retrieval) ask the registry and know no suffix. Other distributions add formats through the entry-point
group ``capt.formats`` (name = the suffix without its dot, value = ``module:Class``, a subclass of `Format`).

Readers are imported where a file of theirs is named, so that a job without tables is checked without pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.files import PACKED, text_lines
from capt.pretrain.base.stores import StoreFile
from capt.pretrain.registry import entry_point_values, load_entry

FORMATS = {
    ".jsonl": "capt.pretrain.data.json_rows:JsonLines",
    ".json": "capt.pretrain.data.json_rows:JsonLines",
    ".csv": "capt.pretrain.data.csv_rows:Csv",
    ".tsv": "capt.pretrain.data.csv_rows:Tsv",
    ".txt": "capt.pretrain.data.formats:Lines",
    ".parquet": "capt.pretrain.data.parquet:Parquet",
}
_GROUP = "capt.formats"

TextFile = Path | StoreFile
"""A file of this host, or one in a store."""


class TableRow(NamedTuple):
    """A row of a table: ``place`` names it in messages (``FILE, line 3``), ``number`` is its line or row, from 1."""

    place: str
    number: int
    cells: dict[str, Any]


@dataclass(frozen=True)
class FileSpan:
    """A part of a file: bytes ``begin .. end-1``, or such groups of rows."""

    begin: int
    end: int


ColumnTypes = Mapping[str, type]
"""The columns of a table that is written, in order, and what a cell holds: ``str``, ``int``, ``float``, or ``list`` of
texts; None is an empty cell."""

Choose = Callable[[list[str]], list[str]]
"""Picks the columns to read from those that a file has."""


@dataclass(frozen=True)
class ReadOptions:
    """Options of a reader.

    Attributes:
        choose: picks the columns, in a format that names them before its rows.
        span: the part of the file that is read.
        keys: what an object of JSON is expected to have, for the remedy where there is a list in its place. Without any
            a list is a row too, with the columns ``column 1``, ``column 2``, ...
        separators: what may separate the cells of ``.csv``; the first of them that the first line has does.
        quotes: whether a cell between double quotes may hold separators and line ends; None = in .csv and not in .tsv.
        remedy: what to do where cells are between quotes that do not count as such.
    """

    choose: Choose = list
    span: FileSpan | None = None
    keys: Sequence[str] = ()
    separators: str = ","
    quotes: bool | None = None
    remedy: str = "write the file as .csv"


class Format:
    """A format of tables. A subclass yields `rows`; the attributes and the other methods say what else its files allow.

    Attributes:
        packed: whether its files may be packed (``.gz``, ``.zst``).
        has_header: whether the first line alone names the columns, and cells have no types.
        writes: whether it has `write`.
        parts: how a large file can be divided: at the ends of lines, in groups of rows, or not at all.
    """

    packed = True
    has_header = False
    writes = False
    parts: Literal["lines", "groups"] | None = None

    def rows(self, path: TextFile, raw: BufferedReader, reading: ReadOptions) -> Iterator[TableRow]:
        """Yield the rows of a file that is open as ``raw``; of a span of bytes ``raw`` holds that alone.

        Raises:
            DataError: the file is damaged, or a row is none; the message names the place.
        """
        raise NotImplementedError

    def classes(self, path: TextFile, raw: BufferedReader) -> dict[str, list[str]]:
        """Return the names of the classes whose numbers a column holds, for each column of which the file says them."""
        return {}

    def groups(self, path: TextFile, raw: BufferedReader, size: int) -> list[FileSpan]:
        """Divide a file into groups of rows of about ``size`` bytes. Raises ``DataError`` for a damaged file."""
        raise NotImplementedError

    def write(self, file: IO[bytes], columns: ColumnTypes, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a table into an open file, a row at a time; every row has a cell for each column."""
        raise NotImplementedError


class Lines(Format):
    """Plain text: one text a line, in the column ``text``."""

    def rows(self, path: TextFile, raw: BufferedReader, reading: ReadOptions) -> Iterator[TableRow]:
        """Yield the lines, blank ones too."""
        for number, line in text_lines(path, raw):
            yield TableRow(f"{path}, line {number}", number, {"text": line.rstrip("\r\n")})


def suffix_of(path: TextFile) -> str:
    """Return the suffix of a file in lower case, without the end that says how it is packed."""
    name = Path(path.name)
    return (name.with_suffix("").suffix if name.suffix in PACKED else name.suffix).lower()


def suffixes() -> tuple[str, ...]:
    """Return the suffixes of all formats, those of other distributions last."""
    return (*FORMATS, *(f".{name}" for name in entry_point_values(_GROUP)))


def format_of(path: TextFile, others: Iterable[str] = ()) -> Format:
    """Return the format of a file, by its suffix.

    Raises:
        DataError: none has it; the message names the known ones, ``others`` first.
    """
    suffix = suffix_of(path)
    found = _load(suffix)
    if found is None or (Path(path.name).suffix in PACKED and not found.packed):
        known = ", ".join(dict.fromkeys((*others, *suffixes())))
        raise DataError(
            f"{path}: no reader for files ending in {''.join(Path(path.name).suffixes[-2:]) or 'nothing'}; known: "
            f"{known}, and {' and '.join(PACKED)} of these except .parquet; rename a file of plain text so that it "
            "ends in .txt"
        )
    return found


def writer_of(path: Path) -> Format:
    """Return the format that writes a table into a file of this name. Raises ``ConfigError`` where none does."""
    found = _load(suffix_of(path))
    if found is None or not found.writes or Path(path.name).suffix in PACKED:
        known = ", ".join(suffix for suffix in suffixes() if (each := _load(suffix)) is not None and each.writes)
        raise ConfigError(f"{path}: no writer of tables for such a name; end it in one of {known}")
    return found


def has_header(path: TextFile) -> bool:
    """Return whether the columns of a file are named by its first line alone; not of what is no file."""
    found = _load(suffix_of(path))
    return found is not None and found.has_header


@cache
def _load(suffix: str) -> Format | None:
    """Import a format. An entry point that leads to nothing is a ``ConfigError``."""
    # Built-in ones without a search through every installed distribution.
    path = FORMATS.get(suffix) or entry_point_values(_GROUP).get(suffix[1:])
    return None if path is None else load_entry(path, _GROUP, f"files ending in {suffix}")()
