"""A corpus in files: plain text, JSON lines, parquet, WikiText, gzipped or not; what is wrong with one, and where."""

from __future__ import annotations

import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path

import pyarrow
import pyarrow.parquet

from pretrain.data.corpus import PASSAGE, Corpus, Piece, row_pieces
from tokenizer.errors import DataError
from tokenizer.verification import Verifier

WIKITEXT_START = re.compile(r"^ = [^=]")
"""An article of WikiText begins with its title, `` = Title = ``; sections have more than one sign."""


class FileCorpus(Corpus):
    """The documents of ``paths``, read one after the other. Raises ``DataError`` for a file that cannot be text.

    Plain text: one paragraph a line, a blank line between documents (or ``document_start``, see ``DataConfig``).
    JSON lines and parquet: one document a row, in ``text_column``. ``verifier`` hashes the files, or knows them.
    """

    def __init__(
        self, paths: Sequence[Path], text_column: str, document_start: str | None, verifier: Verifier | None = None
    ) -> None:
        self._readers = [(path, _reader(path)) for path in paths]
        self._verifier = verifier
        self._column = text_column
        self._start = re.compile(document_start) if document_start else None
        for path in paths:
            if path.stat().st_size == 0:
                raise DataError(f"{path} is empty")
        self.size = sum(path.stat().st_size for path in paths)

    def pieces(self) -> Iterator[Piece]:
        """Lines or rows of all files."""
        before = 0
        for path, reader in self._readers:
            with path.open("rb") as raw:
                blank = True
                for text, begins in reader(self, path, raw):
                    self.position = before + raw.tell()
                    yield text, begins or blank
                    blank = False
            if blank:
                raise DataError(f"{path} holds no text: every line or row is blank")
            before += path.stat().st_size

    def contents(self) -> list[dict[str, str | int]]:
        """Name, format, size and SHA-256 of every file; the first time all ranks of the verifier together."""
        return self._contents

    @cached_property
    def _contents(self) -> list[dict[str, str | int]]:
        paths = [path for path, _ in self._readers]
        digests = (self._verifier or Verifier()).digests(paths)
        return [
            {"name": str(path), "format": _suffix(path), "bytes": path.stat().st_size, "sha256": digest}
            for path, digest in zip(paths, digests, strict=True)
        ]

    def text(self, path: Path, raw: io.BufferedReader) -> Iterator[Piece]:
        """Pieces of a plain text file; a line longer than a passage comes in several."""
        return self._lines(path, raw, self._start)

    def wikitext(self, path: Path, raw: io.BufferedReader) -> Iterator[Piece]:
        """Pieces of a WikiText file (``wiki.train.tokens``), where blank lines stand around every paragraph."""
        return self._lines(path, raw, self._start or WIKITEXT_START)

    def json_lines(self, path: Path, raw: io.BufferedReader) -> Iterator[Piece]:
        """Pieces of a file with one JSON object a line."""
        return row_pieces(self._objects(path, raw), self._start)

    def parquet(self, path: Path, raw: io.BufferedReader) -> Iterator[Piece]:
        """Pieces of a parquet file."""
        return row_pieces(self._rows(path, raw), self._start)

    def _lines(self, path: Path, raw: io.BufferedReader, start: re.Pattern[str] | None) -> Iterator[Piece]:
        begins = at_line_start = True
        for piece in _decoded(path, raw, PASSAGE):
            if "\0" in piece:
                raise DataError(_diagnose(path))
            if at_line_start and piece.isspace():
                begins = begins or start is None
            else:
                if start is not None and at_line_start and start.match(piece):
                    begins = True
                yield piece, begins
                begins = False
            at_line_start = piece.endswith("\n")

    def _objects(self, path: Path, raw: io.BufferedReader) -> Iterator[str]:
        for number, line in enumerate(_decoded(path, raw, -1), start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}, column {error.colno}: not JSON ({error.msg})") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: a JSON object is needed, this is a {type(row).__name__}")
            if self._column not in row:
                raise DataError(f"{path}, line {number}: {_no_column(self._column, list(row))}")
            yield _string(row[self._column], f"{path}, line {number}", self._column)

    def _rows(self, path: Path, raw: io.BufferedReader) -> Iterator[str]:
        try:
            table = pyarrow.parquet.ParquetFile(raw)
            if self._column not in table.schema_arrow.names:
                raise DataError(f"{path}: {_no_column(self._column, table.schema_arrow.names)}")
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=[self._column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield _string(value, f"{path}, row {number}", self._column)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from None


Reader = Callable[[FileCorpus, Path, io.BufferedReader], Iterator[Piece]]

READERS: dict[str, Reader] = {
    ".txt": FileCorpus.text,
    ".tokens": FileCorpus.wikitext,
    ".raw": FileCorpus.wikitext,
    ".jsonl": FileCorpus.json_lines,
    ".json": FileCorpus.json_lines,
    ".parquet": FileCorpus.parquet,
}


def resolve(patterns: Sequence[str], key: str) -> list[Path]:
    """The files that ``patterns`` (paths or globs of the configuration key ``key``) name, a pattern's matches sorted.

    Raises ``DataError`` for a pattern without a match (with the nearest existing name), an unknown suffix, or a file
    named twice.
    """
    paths: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        found = [path] if path.is_file() else sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        found = [p for p in found if p.is_file()]
        if not found:
            raise DataError(f"{key}: {_missing(path)}")
        for file in found:
            if file in paths:
                raise DataError(f"{key}: {file} is named twice")
            _reader(file)
            paths[file] = None
    return list(paths)


def _suffix(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _reader(path: Path) -> Reader:
    suffix = _suffix(path)
    if suffix not in READERS or (path.suffix == ".gz" and suffix == ".parquet"):
        raise DataError(
            f"{path}: no reader for files ending in {''.join(path.suffixes[-2:]) or 'nothing'};"
            f" known: {', '.join(READERS)}, and .gz of these except .parquet"
        )
    return READERS[suffix]


def _missing(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder; name its files, for example {path}/*.txt"
    if not path.parent.is_dir():
        return f"{path} does not exist: there is no folder {path.parent}"
    near = get_close_matches(path.name, [p.name for p in path.parent.iterdir() if p.is_file()], n=1)
    return f"{path} does not exist" + (f"; did you mean {path.with_name(near[0])}?" if near else "")


def _no_column(column: str, names: Sequence[str]) -> str:
    near = get_close_matches(column, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, names)) or 'none'}"
    return f"there is no {column!r} (data.text_column); {hint}"


def _string(value: object, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {column!r} must be text, it is {type(value).__name__}")
    if "\0" in value:
        raise DataError(f"{where}: {column!r} is binary, not text: NUL at character {value.index(chr(0))}")
    return value


def _open(path: Path, raw: io.BufferedReader) -> io.BufferedReader | gzip.GzipFile:
    return gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw


def _decoded(path: Path, raw: io.BufferedReader, limit: int) -> Iterator[str]:
    """Lines of a UTF-8 file with their line ends, in pieces of at most ``limit`` characters (-1: whole)."""
    with io.TextIOWrapper(_open(path, raw), encoding="utf-8-sig") as lines:
        try:
            yield from iter(partial(lines.readline, limit), "")
        except UnicodeDecodeError:
            raise DataError(_diagnose(path)) from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is not a whole gzip file: {error}") from None


def _diagnose(path: Path) -> str:
    """Find the first byte that is not text, and say where it is."""
    offset = 0
    with path.open("rb") as raw:
        for number, line in enumerate(_open(path, raw), start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                where = f"byte 0x{line[error.start]:02x} at line {number}, byte {offset + error.start}"
                return f"{path} is not UTF-8: {where}; convert it, for example with iconv -f latin1 -t utf-8"
            if b"\0" in line:
                return f"{path} is binary, not text: NUL at line {number}, byte {offset + line.index(0)}"
            offset += len(line)
    raise AssertionError(f"{path} was refused, yet every byte of it is text")
