"""A corpus in files: plain text, and tables of any format with a column of text."""

from __future__ import annotations

import io
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from difflib import get_close_matches
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from capt.pretrain.base.errors import DataError, names_in
from capt.pretrain.base.files import place_after, text_lines
from capt.pretrain.base.stores import StoreFile
from capt.pretrain.base.verification import Verifier
from capt.pretrain.data.corpus import PASSAGE, Corpus, Missing, Passage, Piece, TextColumn, passages_of, row_pieces
from capt.pretrain.data.formats import FileSpan, ReadOptions, TextFile, format_of, suffix_of
from capt.pretrain.data.paths import TEXTS, identity, opened, opened_in_turn, parts_of, require_form, size_of

_PIECE = 4 * PASSAGE
"""Bytes of a piece of a line: a passage at least."""
_ROWS_WITHOUT_COLUMN = 1000
"""A JSON file whose first rows, this number of them, lack the column is not read to its end."""


class FileCorpus(Corpus):
    """The documents of ``paths``, read one after the other. Raises ``DataError`` for a file that cannot be text.

    Plain text: one paragraph a line, a blank line between documents (or ``document_start``, see ``DataConfig``).
    Tables: one document a row, in ``text_column``; ``missing``: see ``TextColumn``.
    ``verifier`` hashes the files, or knows them. ``span``: a part of the one file of ``paths``, from
    where a document begins.
    """

    def __init__(
        self,
        paths: Sequence[TextFile],
        text_column: str,
        document_start: str | None,
        verifier: Verifier | None = None,
        *,
        missing: Missing = "skip",
        span: FileSpan | None = None,
    ) -> None:
        for path in paths:
            require_form(path)
        self._paths, self._verifier, self._span = paths, verifier, span
        self._column, self._missing = text_column, missing
        self._without_text: dict[TextFile, int] = {}
        self._start = re.compile(document_start) if document_start else None
        for path in paths:
            if size_of(path) == 0:
                raise empty(path)
        self.size = sum(map(size_of, paths))

    def pieces(self) -> Iterator[Piece]:
        """The lines or rows of all files."""
        return chain.from_iterable(self._by_file())

    def by_source(self) -> Iterator[Iterator[Passage]]:
        """The passages of each file in turn."""
        return map(passages_of, self._by_file())

    def _by_file(self) -> Iterator[Iterator[Piece]]:
        before = 0
        with closing(self._opened()) as files:
            for path, file in zip(self._paths, files, strict=True):
                yield self._pieces(path, file, before)
                before += size_of(path)

    def _pieces(self, path: TextFile, file: AbstractContextManager[io.BufferedReader], before: int) -> Iterator[Piece]:
        with file as raw:
            # The first text of a file begins a document, whatever the reader says.
            blank = True
            is_plain = suffix_of(path) in TEXTS
            pieces = self._lines(path, raw) if is_plain else row_pieces(self._texts(path, raw), self._start)
            for text, begins_document in pieces:
                self.position = before + raw.tell()
                yield text, begins_document or blank
                blank = False
        # A part of a file may hold blank lines alone, a whole file may not.
        if blank and self._span is None:
            raise no_text(path)

    def contents(self) -> list[dict[str, str | int]]:
        """Name, format, size and SHA-256 of every file; the first call is collective over the verifier's ranks.

        A file in a store is not read for that: it has the hash of its address, its size and the store's tag for it.
        Of a file that has been read, the number of rows without text as well, if there are any.
        """
        counted = ({"rows_without_text": self._without_text.get(path, 0)} for path in self._paths)
        return [
            {**part, **count} if count["rows_without_text"] else part
            for part, count in zip(self._contents, counted, strict=True)
        ]

    def _opened(self) -> Generator[AbstractContextManager[io.BufferedReader]]:
        # Row groups of a whole file, and bytes of a part of it.
        if self._span is None or parts_of(self._paths[0]) == "groups":
            yield from opened_in_turn(self._paths)
        else:
            yield self._part(self._paths[0], self._span)

    @contextmanager
    def _part(self, path: TextFile, span: FileSpan) -> Iterator[io.BufferedReader]:
        for file in opened_in_turn([path]):
            with file as raw:
                yield io.BufferedReader(_Window(raw, span))

    @property
    def rows_without_text(self) -> int:
        """The rows without text of the files that have been read."""
        return sum(self._without_text.values())

    @cached_property
    def _contents(self) -> list[dict[str, str | int]]:
        here = [path for path in self._paths if isinstance(path, Path)]
        digests: dict[TextFile, str] = dict(zip(here, (self._verifier or Verifier()).digests(here), strict=True))
        digests |= {path: identity(path) for path in self._paths if isinstance(path, StoreFile)}
        return [source_record(path, digests[path]) for path in self._paths]

    def _lines(self, path: TextFile, raw: io.BufferedReader) -> Iterator[Piece]:
        """Yield the pieces of plain text; a line longer than a passage comes in several."""
        pattern = TEXTS[suffix_of(path)]
        start = self._start or (re.compile(pattern) if pattern else None)
        first_byte = 0 if self._span is None else self._span.begin
        begins = at_line_start = True
        for number, piece in text_lines(path, raw, _PIECE, begin=first_byte):
            if "\0" in piece:
                raise DataError(f"{path}, line {number}{place_after(first_byte)}: binary, not text: it holds a NUL")
            if at_line_start and piece.isspace():
                # With a pattern for the first line, blank lines separate nothing.
                begins = begins or start is None
            else:
                if start is not None and at_line_start and start.match(piece):
                    begins = True
                yield piece, begins
                begins = False
            at_line_start = piece.endswith("\n")

    def _texts(self, path: TextFile, raw: io.BufferedReader) -> Iterator[str]:
        """Yield the texts of a table."""
        column, form = TextColumn(self._column, self._missing), format_of(path)
        # Rows before this span may have the column.
        known = self._span is not None and self._span.begin > 0
        absent = ""  # the error of the first row without the column
        for place, _, cells in form.rows(path, raw, self._reading(path, self._span)):
            if self._column in cells:
                known = True
            elif self._missing == "refuse" or not known:
                absent = absent or f"{place}: {_missing_column(self._column, list(cells))}"
                if self._missing == "refuse" or column.rows == _ROWS_WITHOUT_COLUMN:
                    raise DataError(absent)
            if (text := column.text(cells.get(self._column), place)) is not None:
                yield _check_text(text, place, self._column)
        # No row had the column: in a span, those after it are looked at as well.
        if absent and not known and not self._comes_later(path, column.rows):
            raise DataError(absent)
        if self._span is None:  # else there are many such messages; the shard set tells the sum
            column.report(str(path))
        self._without_text[path] = column.without

    def _reading(self, path: TextFile, span: FileSpan | None) -> ReadOptions:
        def choose(names: list[str]) -> list[str]:
            if self._column not in names:
                raise DataError(f"{path}: {_missing_column(self._column, names)}")
            return [self._column]

        return ReadOptions(choose=choose, span=span, keys=(self._column,))

    def _comes_later(self, path: TextFile, rows: int) -> bool:
        """Return whether the column is in the rows behind the span that a whole file is judged by, after ``rows``."""
        if self._span is None:
            return False
        rest = FileSpan(self._span.end, size_of(path))
        with opened(path) as raw:
            window: io.BufferedReader[Any] = io.BufferedReader(_Window(raw, rest))
            found = format_of(path).rows(path, window, self._reading(path, rest))
            return any(self._column in cells for _, _, cells in islice(found, _ROWS_WITHOUT_COLUMN + 1 - rows))


def source_record(path: TextFile, sha256: str) -> dict[str, str | int]:
    """Return what is recorded of a file of text."""
    return {"name": str(path), "format": suffix_of(path), "bytes": size_of(path), "sha256": sha256}


def empty(path: TextFile) -> DataError:
    """Build the error of a file without a byte."""
    return DataError(f"{path} is empty: remove it, or name the others")


def no_text(path: TextFile) -> DataError:
    """Build the error of a file without text."""
    return DataError(f"{path} holds no text: every line or row is blank or has none")


class _Window(io.RawIOBase):
    """A part of a file."""

    def __init__(self, raw: io.BufferedReader, span: FileSpan) -> None:
        self._raw, self._begin, self._left = raw, span.begin, span.end - span.begin
        self._read = 0
        raw.seek(span.begin)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._read

    def readinto(self, buffer: Any) -> int:
        # Never past the end of the part, whatever the buffer asks for.
        count = self._raw.readinto(memoryview(buffer)[: self._left - self._read])
        self._read += count
        return count


def _missing_column(column: str, names: Sequence[str]) -> str:
    near = get_close_matches(column, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {names_in([*map(repr, names)]) or 'none'}"
    return (
        f"there is no {column!r} (data.text_column; --text-column of capt tokenizer train and capt neighbors); {hint}"
    )


def _check_text(value: str, where: str, column: str) -> str:
    if "\0" in value:
        raise DataError(f"{where}: {column!r} is binary, not text: NUL at character {value.index(chr(0))}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {column!r} is not text: a lone surrogate at character {error.start}") from None
    return value
