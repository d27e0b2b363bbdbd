"""A corpus in files: plain text, JSON lines, csv, tsv, parquet and WikiText, packed or not."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from capt.pretrain.base.errors import DataError, names_in, quoted
from capt.pretrain.base.files import (
    DAMAGED,
    PACKED,
    most_unpacked,
    other_form,
    parse_json,
    parse_row,
    printable,
    require_ratio,
    unpacked,
)
from capt.pretrain.base.stores import StoreFile
from capt.pretrain.base.verification import Verifier
from capt.pretrain.data.corpus import PASSAGE, Corpus, Missing, Passage, Piece, TextColumn, passages_of, row_pieces
from capt.pretrain.data.csv_rows import Row, csv_rows, require_one_of_each, tsv_rows
from capt.pretrain.data.paths import TextFile, identity, opened, opened_in_turn, require_form, size_of, suffix_of

_CHUNK = 1 << 20
_ROWS_WITHOUT_COLUMN = 1000
"""A JSON file whose first rows, this number of them, lack the column is not read to its end."""
_LONGEST_ROW = 1 << 26
"""Characters that a JSON line may have: it is the one thing of a corpus that is in memory as a whole."""


@dataclass(frozen=True)
class Span:
    """A part of a file: bytes ``begin .. end-1``, or such row groups of a parquet file."""

    begin: int
    end: int


WIKITEXT_START = re.compile(r"^ = [^=]")
"""An article of WikiText begins with its title, `` = Title = ``; sections have more than one sign."""


class FileCorpus(Corpus):
    """The documents of ``paths``, read one after the other. Raises ``DataError`` for a file that cannot be text.

    Plain text: one paragraph a line, a blank line between documents (or ``document_start``, see ``DataConfig``).
    JSON lines, csv, tsv and parquet: one document a row, in ``text_column``; ``missing``: see ``TextColumn``.
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
        span: Span | None = None,
    ) -> None:
        for path in paths:
            require_form(path)
        self._readers = [(path, READERS[suffix_of(path)]) for path in paths]
        self._verifier, self._span = verifier, span
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
            for (path, read), file in zip(self._readers, files, strict=True):
                yield self._pieces(path, read, file, before)
                before += size_of(path)

    def _pieces(
        self, path: TextFile, read: FileReader, file: AbstractContextManager[io.BufferedReader], before: int
    ) -> Iterator[Piece]:
        with file as raw:
            # The first text of a file begins a document, whatever the reader says.
            blank = True
            for text, begins_document in read(self, path, raw):
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
        counted = ({"rows_without_text": self._without_text.get(path, 0)} for path, _ in self._readers)
        return [
            {**part, **count} if count["rows_without_text"] else part
            for part, count in zip(self._contents, counted, strict=True)
        ]

    def _opened(self) -> Generator[AbstractContextManager[io.BufferedReader]]:
        paths = [path for path, _ in self._readers]
        if self._span is None or suffix_of(paths[0]) == ".parquet":
            yield from opened_in_turn(paths)
        else:
            yield self._part(paths[0], self._span)

    @contextmanager
    def _part(self, path: TextFile, span: Span) -> Iterator[io.BufferedReader]:
        for file in opened_in_turn([path]):
            with file as raw:
                yield io.BufferedReader(_Window(raw, span))

    @property
    def rows_without_text(self) -> int:
        """The rows without text of the files that have been read."""
        return sum(self._without_text.values())

    @cached_property
    def _contents(self) -> list[dict[str, str | int]]:
        paths = [path for path, _ in self._readers]
        here = [path for path in paths if isinstance(path, Path)]
        digests: dict[TextFile, str] = dict(zip(here, (self._verifier or Verifier()).digests(here), strict=True))
        digests |= {path: identity(path) for path in paths if isinstance(path, StoreFile)}
        return [source_record(path, digests[path]) for path in paths]

    def text(self, path: TextFile, raw: io.BufferedReader) -> Iterator[Piece]:
        """The pieces of a plain text file; a line longer than a passage comes in several."""
        return self._lines(path, raw, self._start)

    def wikitext(self, path: TextFile, raw: io.BufferedReader) -> Iterator[Piece]:
        """The pieces of a WikiText file (``wiki.train.tokens``), where blank lines surround every paragraph."""
        return self._lines(path, raw, self._start or WIKITEXT_START)

    def json_lines(self, path: TextFile, raw: io.BufferedReader) -> Iterator[Piece]:
        """The pieces of a file with one JSON object a line."""
        return row_pieces(self._objects(path, raw), self._start)

    def csv(self, path: TextFile, raw: io.BufferedReader) -> Iterator[Piece]:
        """The pieces of a file with a header and commas."""
        return row_pieces(self._cells(path, csv_rows(path, _row_lines(path, raw))), self._start)

    def tsv(self, path: TextFile, raw: io.BufferedReader) -> Iterator[Piece]:
        """The pieces of a file with a header and tabs."""
        return row_pieces(self._cells(path, tsv_rows(path, _row_lines(path, raw))), self._start)

    def parquet(self, path: TextFile, raw: io.BufferedReader) -> Iterator[Piece]:
        """The pieces of a parquet file."""
        return row_pieces(self._rows(path, raw), self._start)

    def _lines(self, path: TextFile, raw: io.BufferedReader, start: re.Pattern[str] | None) -> Iterator[Piece]:
        begins = at_line_start = True
        for piece in _decoded(path, raw, PASSAGE):
            if "\0" in piece:
                raise DataError(_diagnose(path))
            if at_line_start and piece.isspace():
                # With a pattern for the first line, blank lines separate nothing.
                begins = begins or start is None
            else:
                if start is not None and at_line_start and start.match(piece):
                    begins = True
                yield piece, begins
                begins = False
            at_line_start = piece.endswith("\n")

    def _end_of_table(self, path: TextFile, column: TextColumn) -> None:
        if self._span is None:  # else there are many such messages; the shard set tells the sum
            column.report(str(path))
        self._without_text[path] = column.without

    def _objects(self, path: TextFile, raw: io.BufferedReader) -> Iterator[str]:
        column = TextColumn(self._column, self._missing)
        begin = self._span.begin if self._span is not None else 0
        after = f" after byte {begin:,}" if begin else ""
        # Rows before this span may have the column.
        known, absent = begin > 0, ""  # whether a row has the column, and the error of the first that has not
        for number, line in enumerate(_decoded(path, raw, _LONGEST_ROW), start=1):
            if line.isspace():
                continue
            if len(line) == _LONGEST_ROW:
                raise DataError(
                    f"{path}, line {number}{after}: over {_LONGEST_ROW:,} characters, more than a row may have"
                )
            row = json_object(path, number, line, after, keys=(self._column,))
            where = f"{path}, line {number}{after}"
            if self._column in row:
                known = True
            elif self._missing == "refuse" or not known:
                absent = absent or f"{where}: {_missing_column(self._column, list(row))}"
                if self._missing == "refuse" or column.rows == _ROWS_WITHOUT_COLUMN:
                    raise DataError(absent)
            if (text := column.text(row.get(self._column), where)) is not None:
                yield _check_text(text, where, self._column)
        # No row had the column: in a span, those after it are looked at as well.
        if absent and not known and not self._comes_later(path, column.rows):
            raise DataError(absent)
        self._end_of_table(path, column)

    def _comes_later(self, path: TextFile, rows: int) -> bool:
        """Whether the column is in the rows after the span that are looked at in a whole file, after ``rows``."""
        if self._span is None:
            return False
        begin, after = self._span.end, f" after byte {self._span.end:,}"
        with opened(path) as raw:
            lines = _decoded(path, io.BufferedReader(_Window(raw, Span(begin, size_of(path)))), _LONGEST_ROW)
            numbered = ((number, line) for number, line in enumerate(lines, start=1) if not line.isspace())
            looked_at = islice(numbered, _ROWS_WITHOUT_COLUMN + 1 - rows)
            return any(self._column in json_object(path, number, line, after) for number, line in looked_at)

    def _cells(self, path: TextFile, rows: Iterator[Row]) -> Iterator[str]:
        column = TextColumn(self._column, self._missing)
        for where, row in rows:
            if self._column not in row:
                raise DataError(f"{path}: {_missing_column(self._column, list(row))}")
            if (text := column.text(row[self._column], where)) is not None:
                yield _check_text(text, where, self._column)
        self._end_of_table(path, column)

    def _rows(self, path: TextFile, raw: io.BufferedReader) -> Iterator[str]:
        def choose(names: list[str]) -> list[str]:
            if self._column not in names:
                raise DataError(f"{path}: {_missing_column(self._column, names)}")
            return [self._column]

        column = TextColumn(self._column, self._missing)
        for before, batch in parquet_batches(path, raw, choose, self._span):
            for number, value in enumerate(batch[self._column], start=before + 1):
                where = f"{path}, row {number}"
                if (text := column.text(value, where)) is not None:
                    yield _check_text(text, where, self._column)
        self._end_of_table(path, column)


def json_object(
    path: TextFile, number: int, line: str, after: str = "", *, keys: Sequence[str] = (), lists: bool = False
) -> dict[str, Any]:
    """The JSON object on line ``number`` of a file, counted ``after`` some place.

    Args:
        path: the file.
        number: of the line.
        line: its text.
        after: the place from which lines are counted, where that is not the beginning.
        keys: what an object is expected to have, for the remedy where there is a list of values instead.
        lists: whether a list of values is a row as well; its keys are ``column 1``, ``column 2``, ...

    Raises:
        DataError: the line is neither.
    """
    try:
        row = parse_row(line)
    except json.JSONDecodeError as error:
        is_part = error.msg == "Extra data" or line.strip() in ("{", "[{")
        is_list = line.lstrip().startswith("[")
        hint = _OBJECTS if is_list else _ONE_A_LINE if is_part else "; correct the line, or remove it"
        raise DataError(f"{path}, line {number}{after}, column {error.colno}: not JSON ({error.msg}){hint}") from None
    except (ValueError, RecursionError) as error:  # a key twice, a number of thousands of digits, a thousand brackets
        raise DataError(
            f"{path}, line {number}{after}: not JSON that can be read ({error}); correct the line, or remove it"
        ) from None
    if lists and isinstance(row, list) and not (row and all(isinstance(value, list | dict) for value in row)):
        return {f"column {i}": value for i, value in enumerate(row, start=1)}
    if not isinstance(row, dict):
        hint = _list_remedy(row, keys) if isinstance(row, list) else ""
        raise DataError(f"{path}, line {number}{after}: a JSON object is needed, this is a {type(row).__name__}{hint}")
    return row


def parquet_batches(
    path: TextFile, raw: io.BufferedReader, choose: Callable[[list[str]], list[str]], span: Span | None = None
) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Yield up to 256 rows at a time of a parquet file: how many of the file lie before them, and column -> values.

    ``choose`` picks from the columns that it has, ``span`` from its row groups.

    Raises ``DataError`` for a damaged file, and for one that unpacks to far more than text does.
    """
    try:
        table = pyarrow.parquet.ParquetFile(raw)
        if listed := _listed_texts(table):
            table = pyarrow.parquet.ParquetFile(raw, metadata=table.metadata, read_dictionary=listed)
        require_one_of_each(path, table.schema_arrow.names)
        columns = choose(table.schema_arrow.names)
        # Before the first batch: a row group unpacks as a whole.
        _require_ratio(path, table)
        size = 0
        groups = range(span.begin, span.end) if span is not None else range(table.metadata.num_row_groups)
        before = sum(table.metadata.row_group(group).num_rows for group in range(groups.start))
        for batch in table.iter_batches(
            batch_size=_rows_at_once(path, table), columns=columns, row_groups=list(groups)
        ):
            size += sum(_size(column) for column in batch.columns)
            require_ratio(path, size, size_of(path))
            names = batch.schema.names
            yield before, {name: column.to_pylist() for name, column in zip(names, batch.columns, strict=True)}
            before += batch.num_rows
    # A DataError is a ValueError, and would count as damage below.
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8, too
        raise DataError(f"{path} is not a readable parquet file: {printable(str(error))}") from None


def class_names(path: Path, raw: io.BufferedReader) -> dict[str, list[str]]:
    """The names of the classes of each column of a parquet file, as ``datasets`` keeps them in its schema.

    A column of ``ClassLabel`` holds numbers, and one of lists of them as well. Files without such columns have none.

    Raises ``DataError`` for a damaged file.
    """
    try:
        schema = pyarrow.parquet.read_schema(raw)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable parquet file: {printable(str(error))}") from None
    content = (schema.metadata or {}).get(b"huggingface")
    if content is None:
        return {}
    described = parse_json(content, f"{path} (the description of its columns by datasets)")
    for key in ("info", "features"):
        described = described.get(key) if isinstance(described, dict) else None
    found = {name: _names_of(kind) for name, kind in described.items()} if isinstance(described, dict) else {}
    return {name: names for name, names in found.items() if names and name in schema.names}


def _names_of(kind: Any) -> list[str]:
    """The names of a ``ClassLabel``, or of the one in a list, in their order."""
    # A list is written as Sequence, List or LargeList with a feature, and by old releases as a list of one.
    while isinstance(kind, list) or (isinstance(kind, dict) and "feature" in kind):
        kind = kind["feature"] if isinstance(kind, dict) else kind[0] if kind else None
    names = kind.get("names") if isinstance(kind, dict) and kind.get("_type") == "ClassLabel" else None
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        return []
    names = [name.strip() for name in names]  # as the cells of other tables are read
    return names if len(set(names)) == len(names) else []


def _listed_texts(table: pyarrow.parquet.ParquetFile) -> list[str]:
    """The columns of texts in lists, which are read as numbers of a dictionary.

    A list may hold one text a million times: what a batch of such rows unpacks to is then known before it is unpacked.
    """
    columns = [table.schema.column(i) for i in range(table.metadata.num_columns)]
    is_text = ("STRING", "NONE")
    return [
        column.path
        for column in columns
        if column.max_repetition_level and column.physical_type == "BYTE_ARRAY" and column.logical_type.type in is_text
    ]


def _require_ratio(path: TextFile, table: pyarrow.parquet.ParquetFile) -> None:
    """Refuse by its own account a file that unpacks to far more than text does: a group of rows is read as a whole."""
    groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
    lists = [table.schema.column(i).max_repetition_level > 0 for i in range(table.metadata.num_columns)]
    # Values of a list may take no bits of the file, and eight bytes each in memory.
    size = sum(
        max(column.total_uncompressed_size, 8 * column.num_values if in_list else 0)
        for group in groups
        for column, in_list in zip(map(group.column, range(group.num_columns)), lists, strict=True)
    )
    require_ratio(path, size, size_of(path))


def _rows_at_once(path: TextFile, table: pyarrow.parquet.ParquetFile) -> int:
    """Rows of a batch: no text is longer than what its column unpacks to, and each may be the longest one."""
    groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
    sizes = (group.column(i).total_uncompressed_size for group in groups for i in range(group.num_columns))
    longest: int = max(sizes, default=0)
    return max(1, min(256, most_unpacked(size_of(path)) // max(1, longest)))


def _size(column: pyarrow.Array) -> int:
    """Bytes of the rows of a column: a text of its dictionary may occur in a million rows, or in a list of one."""
    kind, types = column.type, pyarrow.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 8 * len(column) + _size(column.flatten())
    if types.is_map(kind):
        begin, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return 8 * len(column) + sum(_size(part[begin:end]) for part in (column.keys, column.items))
    if types.is_struct(kind):
        return len(column) + sum(map(_size, column.flatten()))
    value = kind.value_type if types.is_dictionary(kind) else None
    if value is None or not any(test(value) for test in _TEXTS):
        return int(column.nbytes)
    lengths = pyarrow.compute.binary_length(column.dictionary).take(column.indices)
    return int(pyarrow.compute.sum(lengths, min_count=0).as_py())


_TEXTS = (
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
    pyarrow.types.is_binary,
    pyarrow.types.is_large_binary,
)


_OBJECTS = "; write one object a line: jq -c '.[]' FILE"
_ONE_A_LINE = "; write one object a line, with nothing behind it: jq -c . FILE"


def _list_remedy(row: list[Any], keys: Sequence[str]) -> str:
    """How a list becomes objects, one a line: it may hold them, or values in the order of ``keys``."""
    if not keys or any(isinstance(value, dict) for value in row):
        return _OBJECTS
    names = [json.dumps(key) for key in keys]
    made = f"{names[0]}: .[]" if len(names) == 1 else ", ".join(f"{name}: .[{i}]" for i, name in enumerate(names))
    # A list of lists has several rows.
    rows = ".[] | " if any(isinstance(value, list) for value in row) else ""
    return f"; write one object a line: jq -c {quoted(f'{rows}{{{made}}}')} FILE"


def source_record(path: TextFile, sha256: str) -> dict[str, str | int]:
    """What is recorded of a file of text."""
    return {"name": str(path), "format": suffix_of(path), "bytes": size_of(path), "sha256": sha256}


def empty(path: TextFile) -> DataError:
    """The error of a file without a byte."""
    return DataError(f"{path} is empty: remove it, or name the others")


def no_text(path: TextFile) -> DataError:
    """The error of a file without text."""
    return DataError(f"{path} holds no text: every line or row is blank or has none")


class _Window(io.RawIOBase):
    """A part of a file."""

    def __init__(self, raw: io.BufferedReader, span: Span) -> None:
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


FileReader = Callable[[FileCorpus, TextFile, io.BufferedReader], Iterator[Piece]]

READERS: dict[str, FileReader] = {
    ".txt": FileCorpus.text,
    ".md": FileCorpus.text,
    ".tokens": FileCorpus.wikitext,
    ".raw": FileCorpus.wikitext,
    ".jsonl": FileCorpus.json_lines,
    ".json": FileCorpus.json_lines,
    ".csv": FileCorpus.csv,
    ".tsv": FileCorpus.tsv,
    ".parquet": FileCorpus.parquet,
}


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


def _open(path: TextFile, raw: io.BufferedReader) -> io.BufferedReader:
    return unpacked(raw, path) if path.name.endswith(tuple(PACKED)) else raw


def _row_lines(path: TextFile, raw: io.BufferedReader) -> Iterator[str]:
    for number, line in enumerate(_decoded(path, raw, _LONGEST_ROW), start=1):
        if len(line) == _LONGEST_ROW:
            raise DataError(f"{path}, line {number}: over {_LONGEST_ROW:,} characters, more than a row may have")
        yield line.rstrip("\n")


def _decoded(path: TextFile, raw: io.BufferedReader, limit: int) -> Iterator[str]:
    """The lines of a UTF-8 file with their line ends, in pieces of at most ``limit`` characters.

    A byte order mark at the start of a line is not part of it: joined files have one wherever a file began.
    """
    at_line_start = True
    with io.TextIOWrapper(_open(path, raw), encoding="utf-8") as lines, _whole_archive(path):
        try:
            # Read in pieces, so that a file on one line does not fill the memory.
            for piece in iter(partial(lines.readline, limit), ""):
                text = piece.removeprefix("\ufeff") if at_line_start else piece
                if text:
                    yield text
                at_line_start = piece.endswith("\n")
        except UnicodeDecodeError:
            raise DataError(_diagnose(path)) from None


@contextmanager
def _whole_archive(path: TextFile) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        suffix = Path(path.name).suffix
        raise DataError(
            f"{path} is not a whole {PACKED[suffix]} file: {error}; fetch or pack it again, or name it without "
            f"{suffix} if it is not packed"
        ) from None


def _diagnose(path: TextFile) -> str:
    """Describe the first byte that is not text, and its place. Memory is constant, however long the lines are."""
    number, offset, rest = 1, 0, b""

    def not_utf8(byte: int, at: int) -> str:
        if form is not None:
            return f"{path} is not UTF-8 text: {form}"
        where = f"byte 0x{byte:02x} at line {number}, byte {at}"
        return (
            f"{path} is not UTF-8: {where}; convert it from the encoding that it has: iconv -f ENCODING -t utf-8 FILE"
        )

    with opened(path) as raw, _open(path, raw) as file, _whole_archive(path):
        form = other_form(file.peek(8))
        while chunk := file.readline(_CHUNK):
            piece = rest + chunk
            whole = len(piece)
            try:
                piece.decode("utf-8")
            except UnicodeDecodeError as error:
                whole = error.start
                if error.reason != "unexpected end of data":
                    return not_utf8(piece[whole], offset + whole)
            if b"\0" in piece:
                return f"{path} is binary, not text: NUL at line {number}, byte {offset + piece.index(0)}"
            # The bytes of a character that the end of the chunk cuts wait for the next chunk.
            rest, offset = piece[whole:], offset + whole
            number += chunk.endswith(b"\n")
    return not_utf8(rest[0], offset) if rest else f"{path} changed while it was read"
