"""Blocks of words and rows out of an open vector file, every value checked; the formats one by one.

Memory is asked for as rows arrive, never for what a header promises.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from itertools import chain
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from pretrain.base.errors import DataError, shown
from pretrain.base.text_lines import read_lines

DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)
"""What `gzip` raises for an archive that is cut short or altered."""

BLOCK = 8192
"""Rows that are handed on at a time."""
_LONGEST_WORD = 10_000
_CHUNK = 1 << 20

Block = tuple[list[str], Float32[np.ndarray, "n d"]]
"""Some words and their rows."""


@dataclass(frozen=True)
class Header:
    """The first line of a word2vec file: how many words there are, and of how many values each."""

    words: int
    width: int


def text_blocks(path: Path, header: Header | None) -> Iterator[Block]:
    """Yield the rows of a text file: a word and its values in each line, after the header if there is one.

    Spaces or tabs stand between the fields. A word may hold spaces itself, as some of GloVe's do: the last ``width``
    fields are the values. Without a header the first line tells the width.

    Raises:
        DataError: a line has too few or too many values, or one that is no finite number; the header promises another
            number of words; or as `read_lines`. Always with the number of the line.
    """
    lines = enumerate(read_lines([path]), start=1)
    if header is not None:
        next(lines)
        width = header.width
    else:
        number, first = next(lines, (1, ""))
        width = _width(_fields(first), path)
        lines = chain([(number, first)], lines)
    words: list[str] = []
    rows: list[list[float]] = []
    done, number = 0, 1
    for number, line in lines:
        word, values = _row(line, width, f"{path}, line {number}", header is not None)
        words.append(word)
        rows.append(values)
        if len(words) == BLOCK:
            yield words, _checked(rows, f"{path}, line", number - BLOCK + 1)
            done += BLOCK
            words, rows = [], []
    if words:
        yield words, _checked(rows, f"{path}, line", number - len(words) + 1)
        done += len(words)
    _require_count(header, done, path, f"line {number}")


def _width(fields: list[str], path: Path) -> int:
    """The number of values of the first line: the numbers at its end, without its first field."""
    width = 0
    while width < len(fields) - 1 and _is_number(fields[-1 - width]):
        width += 1
    if not width:
        raise DataError(
            f"{path}, line 1: not a word and its values: {shown(' '.join(fields[:4]))}; give word2vec or GloVe"
        )
    return width


def _fields(line: str) -> list[str]:
    """Split at spaces and tabs alone: a no-break space belongs to the word."""
    fields = line.replace("\t", " ").split(" ")
    return [field for field in fields if field] if "" in fields else fields


def _row(line: str, width: int, where: str, by_header: bool) -> tuple[str, list[float]]:
    fields = _fields(line)
    surplus = len(fields) - width
    expected = f"{width} as {'the header says' if by_header else 'in line 1'}"
    if surplus < 1:
        raise DataError(f"{where}: {max(len(fields) - 1, 0)} values, not {expected}")
    if surplus > 1 and all(_is_number(field) for field in fields[1:surplus]):
        raise DataError(f"{where}: {len(fields) - 1} values, not {expected}")
    try:
        if "_" in line and any("_" in field for field in fields[surplus:]):  # Python reads 1_0 as ten
            raise ValueError
        return " ".join(fields[:surplus]), list(map(float, fields[surplus:]))
    except ValueError:
        wrong = next(field for field in fields[surplus:] if not _is_number(field))
        raise DataError(f"{where}: {shown(wrong)} is not a number") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _checked(rows: list[list[float]], what: str, first: int) -> Float32[np.ndarray, "n d"]:
    with np.errstate(over="ignore"):
        block = np.array(rows, dtype=np.float64).astype(np.float32)
    _require_finite(block, what, first)
    return block


def _require_finite(block: Float32[np.ndarray, "n d"], what: str, first: int) -> None:
    finite = np.isfinite(block).all(axis=1)
    if not finite.all():
        row = int(finite.argmin())
        column = int(np.isfinite(block[row]).argmin())
        raise DataError(f"{what} {first + row}: value {column + 1} is {block[row, column]}, not a finite float32")


def binary_blocks(file: BufferedIOBase, path: Path, header: Header) -> Iterator[Block]:
    """Yield the rows of word2vec's binary format, of which ``file`` stands behind the header.

    Each is a word, a space and ``width`` little-endian float32 values; a line feed may stand before a word.

    Raises:
        DataError: the file ends early or goes on after the last word; a word is not UTF-8 or too long; a value is not
            finite. Always with the number of the word, from 1.
    """
    size = 4 * header.width
    buffer, at = b"", 0
    words: list[str] = []
    rows: list[bytes] = []
    for number in range(1, header.words + 1):
        while (space := buffer.find(b" ", at)) < 0 or len(buffer) < space + 1 + size:
            if space < 0 and len(buffer) - at > _LONGEST_WORD:
                raise DataError(
                    f"{path}, word {number}: over {_LONGEST_WORD:,} bytes, so this is not word2vec's format"
                )
            try:
                chunk = file.read(max(_CHUNK, size))
            except DAMAGE as error:
                raise DataError(f"{path}, word {number} or later: damaged gzip file ({error})") from error
            if not chunk:
                raise DataError(
                    f"{path}, word {number}: the file ends here; its header promises {header.words:,} words"
                )
            buffer, at = buffer[at:] + chunk, 0
        words.append(_word(buffer[at:space].lstrip(b"\n"), path, number))
        rows.append(buffer[space + 1 : space + 1 + size])
        at = space + 1 + size
        if len(words) == BLOCK or number == header.words:
            block = np.frombuffer(b"".join(rows), dtype="<f4").reshape(len(rows), header.width)
            _require_finite(block, f"{path}, word", number - len(words) + 1)
            yield words, block.astype(np.float32)
            words, rows = [], []
    rest = buffer[at:] + file.read(_CHUNK)
    if rest.strip(b"\n"):
        raise DataError(f"{path}: goes on after word {header.words:,}, the last that its header promises")


def _word(raw: bytes, path: Path, number: int) -> str:
    try:
        word = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, word {number}: not UTF-8 text (byte 0x{raw[error.start]:02x})") from None
    if not word:
        raise DataError(f"{path}, word {number}: an empty word")
    return word


def _require_count(header: Header | None, done: int, path: Path, where: str) -> None:
    if header is not None and done != header.words:
        raise DataError(f"{path}, {where}: the file ends after {done:,} words; its header promises {header.words:,}")
