"""Plan a preparation: what is made, and the units of work, which are files, some small ones, and parts of large ones.

Units are cut where documents begin, so that the documents of all units in their order are those of the files, whichever
process reads them.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from capt.pretrain.base.files import PACKED
from capt.pretrain.base.stores import StoreFile
from capt.pretrain.data.config import DataConfig
from capt.pretrain.data.corpus import PASSAGE
from capt.pretrain.data.files import FileCorpus, empty
from capt.pretrain.data.filters import DocumentFilters
from capt.pretrain.data.formats import FileSpan, TextFile, format_of, suffix_of
from capt.pretrain.data.paths import TEXTS, opened, parts_of, size_of
from capt.pretrain.data.shard_writer import SHARD_TOKENS, ShardOptions
from capt.pretrain.data.shards import Tokenizer
from capt.pretrain.data.sources import Split

LARGEST, SMALLEST = 64 << 20, 4 << 20
"""Bytes of the parts into which files are cut, of much text and of little."""
_UNITS = 64
_FEW_FILES, _MANY_FILES = 64, 1000
"""Files of a unit at most, of some files and of many."""
_LONGEST_BLANK = 1000
"""Bytes of a blank line at which a text is cut. The reader passes over such lines; it takes longer ones for text."""
_LINE = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """A file of text; ``modified``, of one on a disk, is its time of modification in nanoseconds when it was found."""

    file: TextFile
    modified: int | None


@dataclass(frozen=True)
class Unit:
    """The documents of some files, or those of one that begin in ``span``; ``bytes`` is its size, for the progress.

    Text is cut at the first place in the span where that is possible, so a unit may hold nothing, and the one before it
    more.
    """

    sources: tuple[SourceFile, ...]
    bytes: int
    span: FileSpan | None = None


@dataclass(frozen=True)
class PreparationPlan:
    """A preparation as it is planned; every process gets it whole.

    Attributes:
        data: the section of the job.
        tokenizer: gives the ids.
        out: the folder of the shard sets, or of the work alone where they go to ``store``.
        units: the units of the text; without any it is the one corpus that `source_of` opens.
        splits: the splits that are made of the text. Of two, the second one is held out of it.
        options: what the manifest of each split says of how it was made.
        filters: which documents are left out.
        license: what the data card says of the licence.
        unit_bytes: the bytes by which ``units`` were cut.
        shard_tokens: tokens of a shard.
        store: the address of the folder of the shard sets in a store; None where they go to ``out``.
    """

    data: DataConfig
    tokenizer: Tokenizer
    out: Path
    units: tuple[Unit, ...]
    splits: tuple[Split, ...]
    options: dict[str, ShardOptions]
    filters: DocumentFilters = field(default_factory=DocumentFilters)
    license: str | None = None
    unit_bytes: int = LARGEST
    shard_tokens: int = SHARD_TOKENS
    store: str | None = None

    @property
    def sources(self) -> list[SourceFile]:
        """The files, each once."""
        return list(dict.fromkeys(source for unit in self.units for source in unit.sources))

    @property
    def size(self) -> int:
        """Bytes of the text."""
        return sum(unit.bytes for unit in self.units)


def key_of(contents: Sequence[dict[str, str | int]], tokenizer: Tokenizer, options: ShardOptions) -> str:
    """Name what a shard set is made from: text (hashes and formats, not where it is), tokenizer, options."""
    text = [(part["format"], part["sha256"]) for part in contents]
    return sha256(json.dumps([text, tokenizer.fingerprint, options]).encode()).hexdigest()[:32]


def unit_bytes_of(files: Sequence[TextFile]) -> int:
    """Return the bytes at which files are cut, on every host: little text makes some units as well."""
    return min(LARGEST, max(SMALLEST, sum(map(size_of, files)) // _UNITS))


def units_of(files: Sequence[TextFile], document_start: str | None, unit_bytes: int) -> list[Unit]:
    """Divide some files into units, in order. Of a large parquet file its footer is read, of others nothing.

    What a unit costs does not depend on its size, so small files that follow each other share one.

    Raises:
        DataError: a file is empty, or a parquet file is damaged.
    """
    units: list[Unit] = []
    most = min(_MANY_FILES, max(_FEW_FILES, len(files) // _UNITS))
    for file in files:
        size = size_of(file)
        if size == 0:
            raise empty(file)
        # A file in a store has a tag, which its reader compares.
        source = SourceFile(file, None if isinstance(file, StoreFile) else file.stat().st_mtime_ns)
        spans = _spans(file, size, document_start, unit_bytes) if size > unit_bytes else []
        last = units[-1] if units else None
        if len(spans) > 1:
            units += [Unit((source,), size // len(spans), span) for span in spans]
        # Whole small files join the unit before, up to its size and number of files.
        elif last and last.span is None and len(last.sources) < most and last.bytes + size <= unit_bytes:
            units[-1] = Unit((*last.sources, source), last.bytes + size)
        else:
            units.append(Unit((source,), size))
    return units


def _spans(file: TextFile, size: int, document_start: str | None, unit_bytes: int) -> list[FileSpan]:
    if parts_of(file) == "groups":
        with opened(file) as raw:
            return format_of(file).groups(file, raw, unit_bytes) if document_start is None else []
    # A packed file cannot be read from its middle; other text needs a mark of where documents begin.
    if file.name.endswith(tuple(PACKED)) or _borders(file, document_start) is None:
        return []
    return [FileSpan(begin, min(begin + unit_bytes, size)) for begin in range(0, size, unit_bytes)]


def open_unit(unit: Unit, data: DataConfig, unit_bytes: int) -> FileCorpus | None:
    """Open the text of a unit; None where nothing begins in it. Reading raises ``DataError``, as `FileCorpus` does."""
    span, files = unit.span, [source.file for source in unit.sources]
    if span is not None and parts_of(files[0]) == "lines":
        span = _unit_bytes(files[0], span, data.document_start, unit_bytes)
        if span is None or span.begin == span.end:
            return None
    return FileCorpus(files, data.text_column, data.document_start, missing=data.missing, span=span)


def _unit_bytes(file: TextFile, span: FileSpan, document_start: str | None, unit_bytes: int) -> FileSpan | None:
    """Find the bytes of a unit: from the first border in its span to that in the next span which has one."""
    find = _borders(file, document_start)
    assert find is not None, "such a file is not cut"
    size = size_of(file)
    with opened(file) as raw:
        # The unit before reads up to this border, so nothing is read twice and nothing left out.
        begin = find(raw, span.begin, span.end) if span.begin else 0
        if begin is None:
            return None
        for later in range(span.end, size, unit_bytes):
            end = find(raw, later, min(later + unit_bytes, size))
            if end is not None:
                return FileSpan(begin, end)
    return FileSpan(begin, size)


Borders = Callable[[io.BufferedReader, int, int], int | None]
"""The first place from a byte on, and before another, where a document begins as its reader sees it; maybe none."""


def _borders(file: TextFile, document_start: str | None) -> Borders | None:
    if parts_of(file) != "lines":
        return None
    if suffix_of(file) not in TEXTS:
        return _next_line if document_start is None else None
    pattern = document_start or TEXTS[suffix_of(file)]
    if pattern is None:
        return _after_blank_line
    start = re.compile(pattern)
    return lambda raw, begin, end: _matching_line(raw, begin, end, start)


def _next_line(raw: io.BufferedReader, begin: int, end: int) -> int | None:
    return next((at for at, _ in _lines(raw, begin, end)), None)


def _after_blank_line(raw: io.BufferedReader, begin: int, end: int) -> int | None:
    return next(
        (at + len(line) for at, line in _lines(raw, begin, end) if line.isspace() and len(line) <= _LONGEST_BLANK), None
    )


def _matching_line(raw: io.BufferedReader, begin: int, end: int, start: re.Pattern[str]) -> int | None:
    for at, line in _lines(raw, begin, end):
        # The reader takes longer lines in pieces.
        if len(line) < PASSAGE and not line.isspace():
            try:
                text = line.decode().removeprefix("\ufeff").replace("\r\n", "\n")
            except UnicodeDecodeError:
                continue  # the reader says what is wrong
            if not text.isspace() and start.match(text):
                return at
    return None


def _lines(raw: io.BufferedReader, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a part of a file with their places; of one of over 1 MiB pieces without its end."""
    # From the byte before: a line begins here only if that byte ends one.
    raw.seek(begin - 1)
    at, whole = begin - 1, False
    while at < end and (line := raw.readline(_LINE)):
        if whole:
            yield at, line
        at, whole = at + len(line), line.endswith(b"\n")
