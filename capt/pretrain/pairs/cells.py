"""The cells of tables of pairs and documents: texts, ids, scores, and the judgements of qrels.

A cell that is not what it should be is a ``DataError`` that names its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.files import is_utf8, number_in, read_lines


def beir_file(folder: Path, stem: str) -> Path | None:
    """Find the table ``stem`` (corpus or queries) of a BEIR folder, packed or not; None where it has none."""
    names = (f"{stem}{suffix}" for suffix in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


_HEADER_END = re.compile(r"(?!(nan|inf|null|none|na)$)[A-Za-z][A-Za-z _-]*", re.IGNORECASE)
"""The last cell of a header of qrels."""


_GRADE = re.compile(r"[+-]?[0-9]{1,9}(\.[0-9]{0,20})?([eE][+-]?[0-9])?")


def read_qrels(path: Path) -> Iterator[tuple[str, str, str, float]]:
    """Yield the judgements of a file of qrels: its place, the query, the document, and the score.

    ``query-id <tab> corpus-id <tab> score`` in this order, or as a header names them; trec's four columns as well. Of
    two judgements of one document for one query the last counts.

    Raises:
        DataError: a line has other columns, an empty id, or a score that is no number.
    """
    order: tuple[int, ...] | None = None
    for number, line in enumerate(read_lines([path]), start=1):
        # Tabs as in BEIR, or any blanks as in trec.
        cells = [cell.strip() for cell in (line.split("\t") if "\t" in line else line.split())]
        if not line.strip():
            continue
        # A first line whose last cell is a word and no score.
        if number == 1 and _HEADER_END.fullmatch(cells[-1]):
            known = (QUERY_IDS, DOCUMENT_IDS, GRADES)
            found = [next((i for i, cell in enumerate(cells) if cell.lower() in names), -1) for names in known]
            # Names that are not known leave the usual order.
            order = None if -1 in found else tuple(found)
            width = len(cells)
            continue
        if order is not None and len(cells) != width:
            raise DataError(f"{path}, line {number}: {len(cells)} columns; the header has {width}: complete the row")
        if order is None and len(cells) not in (3, 4):
            raise DataError(f"{path}, line {number}: query-id, corpus-id and a whole number as score are expected")
        # trec has four columns, of which the second is the iteration, which nothing reads.
        query, document, score = (cells[i] for i in order or ((0, 1, 2) if len(cells) == 3 else (0, 2, 3)))
        if not (query and document and _GRADE.fullmatch(score)):
            has = ", ".join(shown(cell, 40) for cell in (query, document, score))
            raise DataError(
                f"{path}, line {number}: query-id, corpus-id and a whole number as score are expected, found {has}"
            )
        yield f"{path}, line {number}", query, document, float(score)


DOCUMENT_IDS = ("_id", "id", "docid", "doc_id", "document_id", "pid", "corpus_id", "corpus-id")
"""Names under which the id of a document is known."""
QUERY_IDS = ("query-id", "query_id", "qid", "topic")
"""Names under which the id of a query is known, beside ``_id`` and ``id``."""
GRADES = ("score", "relevance", "rel", "label")
"""Names under which the judgement of a document for a query is known."""
_TRUTH = {"true": 1, "false": 0}
SIMILARITIES = (-1.0, 5.0)
"""Scores of similarity are cosines, from -1 to 1, or judgements from 0 to 5 as those of STS."""


def values(value: Any) -> list[Any]:
    """List the entries of a cell: those of a list (null is an empty text), or the one value; none for null and NaN."""
    if isinstance(value, list | tuple):
        return ["" if entry is None else entry for entry in value]
    return [] if value is None or value != value else [value]


def text_of(place: str, column: str, value: Any) -> str:
    """Return the text of an entry; of an object with ``text`` (a passage), its title before it."""
    if isinstance(value, Mapping):  # a passage as Tevatron has it: docid, title, text
        value = _passage(place, column, value)
    if not isinstance(value, str):
        raise DataError(
            f"{place}: {column!r} must be text, it holds {shown(value, 40)} ({type(value).__name__}); are the columns "
            "mixed up? data.columns='{query: NAME, positive: NAME}' chooses them"
        )
    if "\0" in value:
        raise DataError(f"{place}: {column!r} is binary, not text: NUL at character {value.index(chr(0))}")
    if not is_utf8(value):
        raise DataError(f"{place}: {column!r} is not text: it holds half a character (a lone surrogate)")
    return value


def _passage(place: str, column: str, value: Mapping[str, Any]) -> Any:
    if "text" not in value:
        keys = ", ".join(map(str, value)) or "no key"
        raise DataError(f"{place}: {column!r} holds an object without 'text' ({keys}); texts of ids come by corpus")
    title = title_of(place, value)
    return f"{title} {value['text']}" if title.strip() else value["text"]


def title_of(place: str, row: Mapping[str, Any]) -> str:
    """Return the title of a document, empty where it has none. Raises ``DataError`` for one that is not a text."""
    title = row.get("title")
    if title is None or title != title:
        return ""
    if not isinstance(title, str):
        raise DataError(f"{place}: 'title' should be a text, it is {shown(title, 40)}; put quotes around it, or null")
    return title


def score_of(
    place: str, value: Any, column: str, is_label: bool, among: tuple[float, float] | None = SIMILARITIES
) -> float:
    """Return the score in a cell, which must be ``among`` these two (None: any number); a label must be from 0 to 1."""
    if is_label:
        value = _TRUTH.get(str(value).strip().lower(), value)  # datasets and pandas write is_duplicate so
    if is_label and isinstance(value, str) and not is_number(value):
        raise DataError(
            f"{place}: {column!r} is the name of a class, {shown(value, 40)}, and no score; keep the rows whose texts "
            "belong together and drop the column, or name a score by columns={score: NAME}"
        )
    number = number_of(place, value, column)
    if is_label and not 0 <= number <= 1:
        raise DataError(
            f"{place}: {column!r} is {number:g}: labels of classes are no scores; a label is from 0 to 1 here, "
            f"columns={{score: {column}}} says that it is a similarity"
        )
    if among is not None and not among[0] <= number <= among[1]:
        raise DataError(
            f"{place}: score {number:g} in {column!r} is out of range; a score is a cosine from -1 to 1, or a "
            "similarity from 0 to 5: divide all scores, or correct this one"
        )
    return number


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or a text that reads as one."""
    if isinstance(value, str):
        return number_in(value) is not None
    return isinstance(value, int | float | Decimal)


def number_of(place: str, value: Any, column: str) -> float:
    """Return a finite number, also one written as text."""
    if isinstance(value, Decimal) or (isinstance(value, str) and is_number(value)):
        value = float(value)
    # `bool` is an `int` in Python, and no score.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{place}: {column!r} must be a number, it holds {shown(value, 40)}; are the columns mixed up?")
    # `isfinite` raises OverflowError for an integer beyond float64.
    if (isinstance(value, int) and value.bit_length() > 64) or not math.isfinite(value):
        raise DataError(
            f"{place}: {column!r} is {shown(value, 40)}, and not a finite number; correct it, or remove the row"
        )
    return float(value)


def id_of(place: str, column: str, value: Any) -> str:
    """Return the id of a document: a text, a whole number, or an object that has one."""
    if isinstance(value, Mapping):
        value = next((value[name] for name in DOCUMENT_IDS if name in value), value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{place}: {column!r} must be the id of a document, it holds {shown(value, 40)}")
    if not (name := str(value).strip()):
        raise DataError(f"{place}: {column!r} is empty; give the row an id, or remove it")
    return name
