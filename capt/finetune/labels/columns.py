"""The columns of a table of labelled texts: the texts and the label, as they are named or by their usual names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from capt.pretrain.base.errors import DataError, did_you_mean
from capt.pretrain.data.formats import ReadOptions
from capt.pretrain.data.tables import FileTable, open_table

_PAIRS = (
    ("sentence1", "sentence2"), ("text1", "text2"), ("text", "text2"), ("text", "text_pair"), ("text", "second"),
    ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"), ("question", "answer"),
    ("query", "document"), ("query", "passage"), ("text_a", "text_b"), ("sentence_a", "sentence_b"),
)  # fmt: skip
_TEXTS = ("text", "sentence", "review", "content", "document", "comment", "tweet", "question", "title")
_LABELS = ("label", "labels", "gold_label", "class", "category", "target", "score", "rating", "sentiment", "y")
_NUMBERS = ("id", "idx", "index")
"""Usual names of columns, in the order in which they are looked for, whatever their case."""


class Columns(NamedTuple):
    """The columns of the texts and of the label; several ``labels`` are one column a label."""

    text: str
    second: str | None
    labels: tuple[str, ...]


def open_labelled(path: Path, quotes: bool | None) -> FileTable:
    """Open a table whose cells a tab, a comma or a semicolon may separate, between quotes or not (``data.quotes``).

    Raises:
        DataError: as `open_table`.
    """
    reading = ReadOptions(keys=("text", "label"), separators=",;\t", quotes=quotes, remedy="set data.quotes=true")
    return open_table(path, reading)


def find_columns(table: FileTable, text: str | None, second: str | None, labels: Sequence[str]) -> Columns:
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
    if len(names) == 1:
        raise DataError(
            f"{path}: one column alone, {names[0]!r}; a row has a text and a label: write a table as .csv, .tsv, "
            ".jsonl or .parquet"
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
