"""The columns of a table of texts, as they are named or by their usual names, and its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from capt.pretrain.base.errors import DataError, did_you_mean, shown
from capt.pretrain.base.files import is_utf8
from capt.pretrain.data.formats import ReadOptions
from capt.pretrain.data.tables import FileTable, open_table

_PAIRS = (
    ("sentence1", "sentence2"), ("text1", "text2"), ("text", "text2"), ("text", "text_pair"), ("text", "second"),
    ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"), ("question", "answer"),
    ("query", "document"), ("query", "passage"), ("text_a", "text_b"), ("sentence_a", "sentence_b"),
)  # fmt: skip
_TEXTS = ("text", "sentence", "review", "content", "document", "comment", "tweet", "question", "title")
_LABELS = ("label", "labels", "gold_label", "class", "category", "target", "score", "rating", "sentiment", "y")
_NUMBERS = ("id", "_id", "idx", "index")
"""Usual names of columns, in the order in which they are looked for, whatever their case."""


class TextColumns(NamedTuple):
    """The column of the text, and of the second text of a pair."""

    text: str
    second: str | None


class Columns(NamedTuple):
    """The columns of the texts and of the label; several ``labels`` are one column a label."""

    text: str
    second: str | None
    labels: tuple[str, ...]


def open_texts(path: Path, quotes: bool | None) -> FileTable:
    """Open a table whose cells a tab, a comma or a semicolon may separate, between quotes or not (``data.quotes``).

    Raises:
        DataError: as `open_table`.
    """
    return open_table(path, ReadOptions(keys=("text",), separators=",;\t", quotes=quotes))


def open_labelled(path: Path, quotes: bool | None) -> FileTable:
    """Open a table of texts with their labels, for a job, as `open_texts`."""
    reading = ReadOptions(keys=("text", "label"), separators=",;\t", quotes=quotes, remedy="set data.quotes=true")
    return open_table(path, reading)


def find_columns(table: FileTable, text: str | None, second: str | None, labels: Sequence[str]) -> Columns:
    """Find the columns of the texts and of the label: as they are named, or by their usual names.

    Raises:
        DataError: a column is missing, or cannot be told from the others.
    """
    path, names = table.path, table.columns
    for key, name in (("text", text), ("second", second), *(("label", name) for name in labels)):
        _require_column(table, name, f"data.{key} of the job")
    if len(names) == 1:
        raise DataError(
            f"{path}: one column alone, {names[0]!r}; a row has a text and a label: write a table as .csv, .tsv, "
            ".jsonl or .parquet"
        )
    usual = _by_usual_name(names)
    labels = tuple(labels) or tuple(usual[name] for name in _LABELS if name in usual)[:1]
    if not labels:
        raise DataError(
            f"{path}: none of its columns ({_listed(names)}) has a usual name of labels; the first line must name the "
            "columns, and data.label=NAME says which has the labels"
        )
    if text is not None:
        return Columns(text, second, labels)
    remedy = "set data.text=NAME, and for pairs data.second=NAME"
    return Columns(*_usual_texts(table, labels, remedy), labels)


def find_texts(
    table: FileTable, text: str | None, second: str | None, *, pair: bool | None, known: Sequence[str | None] = ()
) -> TextColumns:
    """Find the columns of texts that have no label, for a model of single texts or of pairs.

    Args:
        table: an open table.
        text: the column of the text, as the user names it.
        second: the column of the second text of a pair.
        pair: whether the model reads pairs; None = it reads both, and the table says which.
        known: names of the two columns in the data that the model was trained on, which count where both are there.

    Raises:
        DataError: a column is missing, cannot be told from the others, or the table has no pairs for a model of pairs.
    """
    for option, name in (("text", text), ("second", second)):
        _require_column(table, name, f"--{option}")
    if second is not None and pair is False:
        raise DataError(f"{table.path}: --second {second}: the model reads single texts; leave the option out")
    names = [name for name in known if name is not None]
    if text is None and second is None and names and all(name in table.columns for name in names):
        text, second = names[0], names[1] if len(names) > 1 else None
    if text is None:
        remedy = "--text NAME names it, and --second NAME the second text of a pair"
        text, found = _usual_texts(table, [second] if second else [], remedy, pair=pair and second is None)
        second = second or found
    if pair and second is None:
        raise DataError(
            f"{table.path}: the model reads pairs of texts, and none of {_listed(table.columns)} is known as "
            "the second; --text NAME and --second NAME name both"
        )
    return TextColumns(text, None if pair is False else second)


def id_column(table: FileTable, texts: TextColumns) -> str | None:
    """Return the column that has the ids of the rows, by its usual name; None where there is none."""
    usual = _by_usual_name([name for name in table.columns if name not in texts])
    return next((usual[name] for name in _NUMBERS if name in usual), None)


def _usual_texts(
    table: FileTable, taken: Sequence[str], remedy: str, *, pair: bool | None = None
) -> tuple[str, str | None]:
    """Find the texts by their usual names. Raises ``DataError``, which ends with ``remedy``."""
    free = [name for name in table.columns if name not in taken and name.lower() not in _NUMBERS]
    usual = _by_usual_name(free)
    # Pairs first: a column of a pair may have a usual name of a single text as well.
    for each in _PAIRS if pair is not False else ():
        if all(name in usual for name in each):
            return usual[each[0]], usual[each[1]]
    texts = [usual[name] for name in _TEXTS if name in usual] or (free if len(free) == 1 else [])
    if not texts:
        raise DataError(
            f"{table.path}: none of its columns ({_listed(table.columns)}) has a usual name of texts; {remedy}"
        )
    return texts[0], None


def _require_column(table: FileTable, name: str | None, whose: str) -> None:
    if name is not None and name not in table.columns:
        raise DataError(
            f"{table.path}: no column {name!r}, which {whose} names; {did_you_mean(name, table.columns, 'it has')}"
        )


def _by_usual_name(names: Sequence[str]) -> dict[str, str]:
    # Reversed, so that the first of names that differ in their case counts.
    return {name.lower(): name for name in reversed(names)}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))[:300]


# The cells of a row.


def text_in(cells: Mapping[str, Any], column: str, place: str) -> str:
    """Return the text of a row. Raises ``DataError`` where it is missing, empty or no text; ``place`` is named."""
    value = cell_in(cells, column, place)
    if not isinstance(value, str):
        raise DataError(f"{place}: {column!r} is {shown(value)}; it must be text: correct or remove the row")
    if not value.strip():
        raise DataError(f"{place}: {column!r} is empty; every row needs its text: correct or remove the row")
    if not is_utf8(value):
        raise DataError(f"{place}: {column!r} is not text: it holds half a character (a lone surrogate)")
    return value


def cell_in(cells: Mapping[str, Any], column: str, place: str) -> Any:
    """Return a cell of a row. Raises ``DataError`` where the row lacks it, or it is binary."""
    if column not in cells:
        raise DataError(
            f"{place}: no {column!r}; {did_you_mean(column, list(cells), 'it has')}: complete the row, or remove it"
        )
    if isinstance(cells[column], str) and "\0" in cells[column]:
        raise DataError(f"{place}: {column!r} is binary, not text: it holds a NUL")
    return cells[column]
