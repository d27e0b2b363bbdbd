"""The rows of a text file and of a binary file of word vectors, one word at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from io import BufferedIOBase
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from pretrain.base.errors import DataError, shown
from pretrain.embeddings.vectors.layout import LONGEST_WORD, MOST_WIDTH, PIECE, Layout, is_number

Row = tuple[str, Float32[np.ndarray, " d"]]
"""A word and its vector."""

_LONGEST_LINE = LONGEST_WORD + 64 * MOST_WIDTH
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def text_rows(file: BufferedIOBase, path: Path, layout: Layout) -> Iterator[Row]:
    """Yield the rows of a text file; the last ``width`` fields of a line are the numbers, the rest is the word.

    So a word may hold spaces, as a few of GloVe's do. Only blanks of ASCII separate fields: others occur in words.

    Raises:
        DataError: a line has another width, its word is not UTF-8, or a number cannot be read; the line is named.
    """
    first = 1
    if layout.words is not None:
        file.readline(_LONGEST_LINE)
        first = 2
    for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE), b""), start=first):
        where = f"{path}, line {number}"
        if len(line) == _LONGEST_LINE:
            raise DataError(f"{where}: over {_LONGEST_LINE:,} bytes, more than a line of vectors may have")
        fields = (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).rsplit(None, layout.width)
        if len(fields) <= layout.width:
            found = max(len(fields) - 1, 0)
            raise DataError(
                f"{where}: a word and {found} numbers; the vectors of this file have {layout.width}: "
                "mend or remove the line"
            )
        parts = fields[0].split()
        if len(parts) > 1 and is_number(parts[-1]):
            raise DataError(
                f"{where}: more than {layout.width} numbers, which the vectors of this file have: mend or remove it"
            )
        if b"\r" in fields[0]:
            raise DataError(f"{where}: a carriage return within the line; end lines with a line feed (tr '\\r' '\\n')")
        yield _decoded(fields[0].strip(), where), _parsed(fields[1:], where)


def _parsed(fields: list[bytes], where: str) -> Float32[np.ndarray, " d"]:
    try:
        row = np.array(list(map(float, fields)))
        if any(b"_" in field for field in fields):
            raise ValueError
    except ValueError:
        bad = next(field for field in fields if b"_" in field or not is_number(field))
        raise DataError(
            f"{where}: {shown(bad.decode('utf-8', 'replace'))} is not a number: mend or remove the line"
        ) from None
    if not np.abs(row).max() <= np.finfo(np.float32).max:
        bad = next(field for field, value in zip(fields, row, strict=True) if not abs(value) < 3.4028236e38)
        raise DataError(f"{where}: {shown(bad.decode())} is not a finite 32-bit number: mend or remove the line")
    return row.astype(np.float32)


def _decoded(word: bytes, where: str) -> str:
    if len(word) > LONGEST_WORD:
        raise DataError(f"{where}: a word of {len(word):,} bytes; at most {LONGEST_WORD:,} are read")
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: the word is not UTF-8 (byte 0x{word[error.start]:02x}); convert it with iconv, or remove it"
        ) from None


def binary_rows(file: BufferedIOBase, path: Path, layout: Layout) -> Iterator[Row]:
    """Yield the rows of word2vec's binary file: a word, a space, ``width`` little-endian float32.

    A line end before a word, which word2vec writes and gensim does not, is dropped.

    Raises:
        DataError: the file ends early or continues, a word is not UTF-8, or a number is not finite; the number of the
            word is named.
    """
    assert layout.words is not None, "a binary file has a header"
    file.readline(_LONGEST_LINE)
    size = 4 * layout.width
    block, place = b"", 0
    for number in range(1, layout.words + 1):
        where = f"{path}, word {number}"
        if len(block) - place < LONGEST_WORD + 2 + size:
            block, place = block[place:] + file.read(LONGEST_WORD + PIECE + size), 0
        space = block.find(b" ", place, place + LONGEST_WORD + 2)
        if space < 0:
            if place + LONGEST_WORD < len(block):
                raise DataError(f"{where}: no end within {LONGEST_WORD:,} bytes; is the header's width right?")
            raise _ends_early(path, number - 1, layout.words)
        if space + 1 + size > len(block):
            raise _ends_early(path, number - 1, layout.words)
        word = _decoded(block[place:space].lstrip(b"\r\n"), where)
        row = np.frombuffer(block, dtype="<f4", count=layout.width, offset=space + 1).astype(np.float32)
        if not np.isfinite(row).all():
            raise DataError(f"{where} ({shown(word)}): a number is not finite")
        yield word, row
        place = space + 1 + size
    if (block[place:] + file.read(2)).strip(b"\r\n"):
        raise DataError(f"{path}: continues after word {layout.words:,}, the last that the header speaks of")


def _ends_early(path: Path, done: int, words: int) -> DataError:
    return DataError(f"{path}: ends within or before word {done + 1:,}; the header says {words:,} words")
