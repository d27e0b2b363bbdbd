"""Text as a stream of short passages: what every source turns into, and all that tokenizing needs in memory at a time.

A document is a run of passages; joining them gives the document back. A book of a megabyte, a file of a hundred
gigabytes on one line, and a docstring all pass through the same few kilobytes.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import Literal

from capt.pretrain.base.errors import DataError

logger = logging.getLogger(__name__)

PASSAGE = 4096
"""Longest passage, in characters (SentencePiece's trainer skips lines of more than 4192 bytes)."""

Piece = tuple[str, bool]
"""A line or row as a reader gives it, and whether it begins a document."""


@dataclass(frozen=True)
class Passage:
    """At most ``PASSAGE`` characters of one document; ``starts`` is true if the document begins here."""

    text: str
    starts: bool


Missing = Literal["skip", "refuse"]
"""Treatment of a row without text."""


class TextColumn:
    """The text of the rows of one table. A row whose text is null, not a number (NaN) or absent has none.

    Raises ``DataError`` for a value of another type, and with ``missing="refuse"`` for a row without text. With
    ``"skip"`` such rows are left out and counted; a blank text is left out in any case, and is not counted.
    """

    def __init__(self, name: str, missing: Missing) -> None:
        self.name, self._missing = name, missing
        self.rows = self.without = 0
        self._first = ""

    def text(self, value: object, where: str) -> str | None:
        """The text of the row at ``where``; None for a row to leave out."""
        self.rows += 1
        if isinstance(value, str):
            return value
        if value is not None and value == value:  # NaN, as tables of pandas have it, is not itself
            raise DataError(f"{where}: {self.name!r} must be text, it is {type(value).__name__}")
        if self._missing == "refuse":
            raise DataError(f"{where}: {self.name!r} has no text; data.missing=skip leaves such rows out")
        self._first = self._first or where
        self.without += 1
        return None

    def report(self, name: str) -> None:
        """Log, once in a process, how many rows of the table ``name`` were left out."""
        if self.without:
            warn_once(
                f"{name}: {self.without:,} of {self.rows:,} rows have no {self.name!r} and are left out, the first "
                f"is {self._first}; data.missing=refuse ends the job there"
            )


@cache
def warn_once(message: str) -> None:
    """Log a warning, once in a process."""
    logger.warning("%s", message)


class Corpus(ABC):
    """Documents in a fixed order, as passages: ``for passage in corpus``.

    ``size`` and ``position`` tell the progress of an iteration, in the source's unit (bytes on disk, or rows).
    """

    size: int
    position: int = 0

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """The lines or rows of the source, blank ones left out."""

    @abstractmethod
    def contents(self) -> list[dict[str, str | int]]:
        """The sources of the text, each with a hash (``sha256`` of a file) that changes when the text does."""

    @property
    def rows_without_text(self) -> int:
        """The rows that had no text and were left out, of what has been read."""
        return 0

    def __iter__(self) -> Iterator[Passage]:
        return passages_of(self.pieces())

    def by_source(self) -> Iterator[Iterator[Passage]]:
        """The passages of each source in turn, each to be read to its end; here all are of one."""
        yield iter(self)


class CorpusPart(Corpus):
    """A side of a corpus split in two: about ``fraction`` of its passages held out, or (``held_out=False``) the rest.

    A passage falls on a side by the hash of its text, so the split depends neither on the order of the files nor on
    what is added later, and equal texts stay together. Documents of up to ``PASSAGE`` characters are held out whole,
    longer ones piece by piece. The first passage is never held out: training always has something to read.
    """

    def __init__(self, corpus: Corpus, fraction: float, held_out: bool) -> None:
        self._corpus, self._fraction, self._held_out = corpus, fraction, held_out
        self.size = corpus.size

    def pieces(self) -> Iterator[Piece]:
        """The pieces of the whole corpus, both sides of the split."""
        return self._corpus.pieces()

    def contents(self) -> list[dict[str, str | int]]:
        """The sources of the whole corpus, both sides of the split."""
        return self._corpus.contents()

    def __iter__(self) -> Iterator[Passage]:
        after_gap = True
        for index, passage in enumerate(self._corpus):
            self.position = self._corpus.position
            if (index > 0 and is_held_out(passage.text, self._fraction)) == self._held_out:
                # A passage after one of the other side begins a document: it continues nothing that was given.
                yield replace(passage, starts=passage.starts or after_gap)
                after_gap = False
            else:
                after_gap = True


def is_held_out(text: str, fraction: float) -> bool:
    """Return whether a passage belongs to the held-out ``fraction``, by the hash of its text."""
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < int(fraction * 2**64)


def row_pieces(rows: Iterable[str], document_start: re.Pattern[str] | None) -> Iterator[Piece]:
    """Rows of a table as pieces: each its own document, or (``document_start``) up to the next row that matches.

    An expression with the flag ``(?m)`` looks at the lines of a row each by itself.
    """
    by_line = document_start is not None and bool(document_start.flags & re.MULTILINE)
    for row in rows:
        for text in row.split("\n") if by_line else [row]:
            if text and not text.isspace():
                yield text.rstrip() + "\n", document_start is None or document_start.match(text) is not None


def passages_of(pieces: Iterable[Piece]) -> Iterator[Passage]:
    """Collect pieces into passages, cut where a line ends if possible, else at a space."""
    text, starts = "", True
    for piece, begins_document in pieces:
        if begins_document and text:
            yield from _last_passage(text, starts)
            text, starts = "", True
        text += piece
        at = 0
        while len(text) - at > PASSAGE:
            # From the second character on, or an empty passage would follow another without end.
            line_end, space = text.rfind("\n", at + 1, at + PASSAGE), text.rfind(" ", at + 1, at + PASSAGE)
            cut = line_end if line_end > 0 else space if space > 0 else at + PASSAGE
            yield Passage(text[at:cut], starts)
            at, starts = cut, False
        text = text[at:]
    yield from _last_passage(text, starts)


def _last_passage(text: str, starts: bool) -> Iterator[Passage]:
    if text and not text.isspace():
        yield Passage(text.rstrip(), starts)
