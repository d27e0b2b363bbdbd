"""Tables of labelled texts (.csv, .tsv, .jsonl, each also packed; .parquet): columns, and rows with their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from capt.pretrain.base.errors import DataError, did_you_mean
from capt.pretrain.base.files import PACKED, open_regular, read_lines
from capt.pretrain.data.csv_rows import records, require_names, require_no_header, require_one_of_each
from capt.pretrain.data.paths import why_missing

KNOWN = ".csv, .tsv, .jsonl (each also .gz or .zst), .parquet"

_PAIRS = (
    ("sentence1", "sentence2"), ("text1", "text2"), ("text", "text2"), ("text", "text_pair"), ("text", "second"),
    ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"), ("question", "answer"),
    ("query", "document"), ("query", "passage"), ("text_a", "text_b"), ("sentence_a", "sentence_b"),
)  # fmt: skip
_TEXTS = ("text", "sentence", "review", "content", "document", "comment", "tweet", "question", "title")
_LABELS = ("label", "labels", "gold_label", "class", "category", "target", "score", "rating", "sentiment", "y")
_NUMBERS = ("id", "idx", "index")
"""Usual names of columns, in the order in which they are looked for, whatever their case."""


class LabelRow(NamedTuple):
    """``cells`` by column; ``place`` names file and line."""

    place: str
    cells: dict[str, Any]


class Table(NamedTuple):
    """The columns of a file (of JSON lines: the keys of the first row) and its rows, which are read as they are taken.

    Reading raises ``DataError`` for a row that is not a row of the table.
    """

    path: Path
    columns: list[str]
    rows: Iterator[LabelRow]
    classes: Mapping[str, Sequence[str]] = {}
    """Column -> the names of the classes whose numbers it holds, as the schema of the file has them."""


class Columns(NamedTuple):
    """The columns of the texts and of the label; several ``labels`` are one column a label."""

    text: str
    second: str | None
    labels: tuple[str, ...]


def open_table(path: Path, *, quotes: bool | None = None) -> Table:
    """Open a table.

    Args:
        path: the file; its ending tells what it is.
        quotes: whether a cell in double quotes may hold separators and line ends; None = in .csv and not in .tsv.

    Raises:
        DataError: there is no such file, it has another ending, it holds no row, or a column twice.
    """
    if not path.is_file() and not path.is_symlink():
        raise DataError(why_missing(path))
    suffix = (path.with_suffix("") if path.suffix in PACKED else path).suffix.lower()
    if suffix == ".parquet" and path.suffix not in PACKED:
        table = _parquet(path)
    elif suffix == ".jsonl":
        table = _json_lines(path)
    elif suffix in (".csv", ".tsv"):
        table = _delimited(path, tabs=suffix == ".tsv", quotes=suffix == ".csv" if quotes is None else quotes)
    else:
        raise DataError(f"{path}: no table that can be read; write it as one of {KNOWN}")
    require_one_of_each(path, table.columns)
    return table


def find_columns(table: Table, text: str | None, second: str | None, labels: Sequence[str]) -> Columns:
    """Find the columns of the texts and of the label: as they are named, or by their usual names.

    Raises:
        DataError: a column is missing, or cannot be told from the others.
    """
    path, names = table.path, table.columns
    listed = ", ".join(map(repr, names))[:300]
    for key, name in (("text", text), ("second", second), *(("label", name) for name in labels)):
        if name is not None and name not in names:
            raise DataError(
                f"{path}: no column {name!r}, which data.{key} of the job names; {did_you_mean(name, names, 'it has')}"
            )
    # Reversed, so that the first of names that differ in their case counts.
    usual = {name.lower(): name for name in reversed(names)}
    labels = tuple(labels) or tuple(usual[name] for name in _LABELS if name in usual)[:1]
    if not labels:
        raise DataError(
            f"{path}: none of its columns ({listed}) has a usual name of labels; the first line must name the columns, "
            "and data.label=NAME says which has the labels"
        )
    if text is not None:
        return Columns(text, second, labels)
    free = [name for name in names if name not in labels and name.lower() not in _NUMBERS]
    usual = {name.lower(): name for name in reversed(free)}
    # Pairs first: a column of a pair may have a usual name of a single text as well.
    for pair in _PAIRS:
        if all(name in usual for name in pair):
            return Columns(usual[pair[0]], usual[pair[1]], labels)
    texts = [usual[name] for name in _TEXTS if name in usual] or (free if len(free) == 1 else [])
    if not texts:
        raise DataError(
            f"{path}: none of its columns ({listed}) has a usual name of texts; set data.text=NAME, and for pairs "
            "data.second=NAME"
        )
    return Columns(texts[0], None, labels)


def _delimited(path: Path, *, tabs: bool, quotes: bool) -> Table:
    lines = read_lines([path])
    first = next(lines, "")
    separator = "\t" if tabs else next((s for s in (",", ";", "\t") if s in first), ",")
    found = records(path, chain([first], lines), separator, quotes=quotes, remedy="set data.quotes=true")
    # An empty line is no row.
    rows_of_cells = (each for each in found if each[1])
    _, header = next(rows_of_cells, (1, [""]))
    columns = require_names(path, header)

    def rows() -> Iterator[LabelRow]:
        for number, cells in rows_of_cells:
            if len(cells) != len(columns):
                counts = f"{len(cells)} cells, and {len(columns)} in the first line"
                raise DataError(f"{path}, line {number}: {counts}; {_advice(quotes)}")
            require_no_header(path, number, columns, cells)
            yield LabelRow(f"{path}, line {number}", dict(zip(columns, cells, strict=True)))

    return Table(path, columns, rows())


def _advice(quotes: bool) -> str:
    if quotes:
        return (
            'put a text with a separator or a quote between double quotes, each quote in it doubled: "He said ""no"""'
        )
    return "no cell may hold a tab; if texts are between double quotes set data.quotes=true"


def _json_lines(path: Path) -> Table:
    from capt.pretrain.data.files import json_object  # which imports pyarrow

    lines = enumerate(read_lines([path]), start=1)
    rows = (
        LabelRow(f"{path}, line {i}", json_object(path, i, line, keys=("text", "label")))
        for i, line in lines
        if line.strip()
    )
    return _peeked(path, rows)


def _parquet(path: Path) -> Table:
    from capt.pretrain.data.files import class_names, parquet_batches

    with open_regular(path) as raw:
        classes = class_names(path, raw)

    def rows() -> Iterator[LabelRow]:
        with open_regular(path) as raw:
            for before, batch in parquet_batches(path, raw, list):
                for number, cells in enumerate(zip(*batch.values(), strict=True), start=before + 1):
                    yield LabelRow(f"{path}, row {number}", dict(zip(batch, cells, strict=True)))

    return _peeked(path, rows())._replace(classes=classes)


def _peeked(path: Path, rows: Iterator[LabelRow]) -> Table:
    first: Sequence[LabelRow] = [row for _, row in zip(range(1), rows, strict=False)]
    if not first:
        raise DataError(f"{path}: the file holds no row")
    return Table(path, list(first[0].cells), chain(first, rows))
