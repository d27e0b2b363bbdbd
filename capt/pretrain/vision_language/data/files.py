"""Data files as rows: JSON arrays, JSON lines and JSON objects, also packed, bounded and checked row by row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from sys import intern
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.files import DAMAGED, PACKED, open_regular, printable, unique_keys, unpacked
from capt.pretrain.base.records import Record, first_fault

LARGEST = 2 << 30
"""Bytes of an unpacked file at most: GQA's largest balanced file has 1.2 GB."""

_KEYS_OF_LINES = ("identifier", "caption")
_LONGEST_LINE = 1 << 20
"""Characters of the first line of JSON lines: a longer one is a whole file."""

_HEAD = 1 << 12
"""Bytes that are looked at first."""

Text = Annotated[str, Field(min_length=1, max_length=1 << 16, pattern=r"\S")]
"""A sentence, a question or an answer that is not blank."""

Name = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""The name of a picture or of a question."""

Number = Annotated[int, Field(ge=0, le=1 << 62)]

Scores = dict[Annotated[str, Field(max_length=1 << 12)], Annotated[float, Field(ge=0.0, le=1.0)]]
"""Answers with their scores."""

_R = TypeVar("_R", bound=Record)


class Document(NamedTuple):
    """A file that has been parsed but not checked.

    Attributes:
        path: where it came from.
        rows: the elements of a JSON array, the objects of JSON lines, or lines of text; empty for an object.
        table: the JSON object; empty for rows.
        lines: the line of each row; None for a JSON array, whose rows are numbered from 1.
    """

    path: Path
    rows: list[Any]
    table: dict[str, Any]
    lines: list[int] | None = None

    @property
    def keys(self) -> frozenset[str]:
        """The keys of the first row; of an object: its own."""
        first = self.rows[0] if self.rows else self.table
        return frozenset(first) if isinstance(first, dict) else frozenset()

    def place(self, index: int) -> str:
        """The place of row ``index``, as an error message gives it."""
        return f"{self.path}, {f'row {index + 1}' if self.lines is None else f'line {self.lines[index]}'}"

    def checked(self, kind: type[_R]) -> Iterator[tuple[str, _R]]:
        """Place and content of each row. Raises ``DataError`` for the first that does not fit ``kind``."""
        return checked(kind, ((self.place(i), row) for i, row in enumerate(self.rows)))


def checked(kind: type[_R], rows: Iterable[tuple[str, object]]) -> Iterator[tuple[str, _R]]:
    """Rows as records of ``kind``, each with its place. Raises ``DataError`` that names place and key."""
    for place, row in rows:
        try:
            yield place, kind.model_validate(row)
        except ValidationError as problem:
            wanted = ", ".join(field.alias or name for name, field in kind.model_fields.items() if field.is_required())
            raise DataError(f"{place}: {first_fault(problem)}; a row needs {wanted}") from None


def parts(document: Document, key: str) -> Iterator[tuple[str, object]]:
    """The elements of the array ``key`` of an object with their places. Raises ``DataError`` where it is none."""
    rows = document.table.get(key)
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{document.path}: {key}: Input should be a list that is not empty")
    return ((f"{document.path}, {key}[{i}]", row) for i, row in enumerate(rows))


def read_document(path: Path, limit: int = LARGEST) -> Document:
    """Parse a file, packed or plain, of at most ``limit`` bytes. Which form it has, its content tells.

    Raises:
        DataError: it is not a regular file, too large, damaged, empty, not UTF-8 or not JSON.
    """
    text = _text(path, limit)
    start = text[:4096].lstrip()
    if not start:
        raise DataError(f"{path}: the file is empty")
    if start[0] == "{" and (rows := _json_lines(path, text)) is not None:
        return Document(path, [row for _, row in rows], {}, [line for line, _ in rows])
    if start[0] in "{[":
        content = _parsed(path, text)
        if not content:
            raise DataError(f"{path}: an empty {'list' if start[0] == '[' else 'object'}; the file holds no row")
        return Document(path, content, {}) if isinstance(content, list) else Document(path, [], content)
    # Not JSON: the lines of a table or of Flickr8k.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return Document(path, [line.rstrip("\r") for _, line in lines], {}, [number for number, _ in lines])


def _text(path: Path, limit: int) -> str:
    try:
        with open_regular(path) as raw, unpacked(raw, path) if path.suffix in PACKED else raw as file:
            # The head first: a NUL tells a binary or packed file before the rest is read.
            size = os.fstat(raw.fileno()).st_size
            content = file.read(_HEAD)
            if b"\0" in content:
                raise DataError(f"{path}: not text: a NUL among its first bytes; if it is packed, name it .gz")
            # One byte more than the limit tells that there is more, also where a small packed file unpacks to any size.
            content += file.read(limit + 1 - len(content)) if size <= limit else b""
    except DAMAGED as problem:
        raise DataError(f"{path}: not a whole {PACKED[path.suffix]} file: {problem}; fetch or pack it again") from None
    if max(size, len(content)) > limit:
        raise DataError(f"{path}: over {limit:,} bytes, which is the most that is read of such a file; split it")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path}: not UTF-8 text (byte {problem.start}); if it is packed, name it .gz") from None


def _json_lines(path: Path, text: str) -> list[tuple[int, Any]] | None:
    """The objects of JSON lines with their line numbers; None where the first is neither a statement nor a caption."""
    end = text.find("\n") if "\n" in text else len(text)
    if end > _LONGEST_LINE or not any(text.find(f'"{key}"', 0, end) >= 0 for key in _KEYS_OF_LINES):
        return None
    try:
        first = _parsed(path, text[:end])
    except DataError:
        return None
    if not any(key in first for key in _KEYS_OF_LINES):
        return None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append((number, _parsed(f"{path}, line {number}", line)))
    return rows


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _parsed(place: Path | str, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_object)
    except (ValueError, RecursionError) as problem:  # ValueError: a number of thousands of digits, too
        raise DataError(f"{place}: not valid JSON: {printable(str(problem))}") from None


_UNUSED = ("semanticStr", "fullAnswer", "equivalent")
_NO_STEP = ("exist", "query: name", "choose name")
"""Operations of GQA's programs that its evaluator does not count as a step of reasoning."""


def _object(pairs: list[tuple[str, Any]]) -> Any:
    """A JSON object without what is not read. Raises ``ValueError`` as `unique_keys`."""
    return _without_unused(unique_keys(pairs))


def _without_unused(row: dict[str, Any]) -> Any:
    """Let go of what no reader uses as soon as it is parsed: most bytes of GQA's and VQA's files.

    Of a question of GQA its program, of which the number of steps is kept; an annotator's answer in VQA becomes the
    answer alone, of which there are few.
    """
    if "imageId" in row:
        for key in _UNUSED:
            row.pop(key, None)
        if "semantic" in row:
            row["steps"] = _steps(row.pop("semantic"))
    elif "answer_id" in row and isinstance(row.get("answer"), str):
        return intern(row["answer"])
    return row


def _steps(program: object) -> int | None:
    if not isinstance(program, list) or not all(isinstance(part, dict) for part in program):
        return None
    operations = [f"{part.get('operation')}: {part.get('argument')}" for part in program]
    return sum(not any(name in operation for name in _NO_STEP) for operation in operations)


class Unique:
    """The ids that have been read."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._seen: set[int | str] = set()

    def add(self, key: int | str, place: str) -> None:
        """Note the id of the row at ``place``. Raises ``DataError`` for one that was there before."""
        if key in self._seen:
            raise DataError(f"{place}: {self.what} {shown(key)} occurs twice; leave one of the two out")
        self._seen.add(key)
