"""How a file of word vectors is laid out, found out from its first mebibyte; opening it, packed or not."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

from pretrain.base.errors import DataError
from pretrain.base.files import open_regular
from pretrain.base.text_lines import unpacked

MOST_WORDS = 1 << 25
"""Words of a file, at most: a small archive may say or hold any number."""

MOST_WIDTH = 65_536
"""Dimensions of a vector, at most."""

MOST_NUMBERS = 1 << 32
"""Numbers of a file, at most: 16 GiB in memory."""

LONGEST_WORD = 16_384
"""Bytes of a word, at most."""

DAMAGED_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)
"""What Python raises for a packed file that is cut off or changed."""

PIECE = 1 << 14
"""Bytes that are read at a time: what a damaged archive holds before the damage is lost to this many."""

_HEAD = 1 << 20
_HEADER = re.compile(rb"[ \t]*([0-9]{1,18})[ \t]+([0-9]{1,18})[ \t\r]*")
_NATIVE = {
    **{bytes([0x80, protocol]): "a pickle, such as gensim's own save() writes" for protocol in (2, 3, 4, 5)},
    b"\x93NUMPY": "a NumPy array, such as gensim's own save() writes beside its pickle",
    (793712314).to_bytes(4, "little"): "a model of fastText (.bin)",
}
"""How files of vectors begin that are not read, and what they are."""
_CONVERT = "gensim's KeyedVectors.save_word2vec_format('vectors.txt') (those of a model are model.wv)"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Layout:
    """The form of a file of vectors.

    Attributes:
        words: the number of words that the header names; None for a file without a header (GloVe).
        width: dimensions of a vector.
        binary: whether the numbers are little-endian float32 (word2vec's binary form), else text.
    """

    words: int | None
    width: int
    binary: bool


@contextmanager
def open_vectors(path: Path) -> Iterator[BufferedIOBase]:
    """Open a file of vectors to read; one that begins like gzip is unpacked, whatever its name.

    Raises:
        DataError: there is no such file, it is not a regular one, or it is empty.
    """
    try:
        with open_regular(path) as raw:
            magic = raw.read(2)
            if not magic:
                raise DataError(f"{path}: the file is empty; give word vectors")
            raw.seek(0)
            if magic == b"\x1f\x8b":
                yield unpacked(raw, path)
            else:
                yield raw
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file; give word vectors in word2vec's or GloVe's form, or .gz of it"
        ) from None


def find_layout(path: Path) -> Layout:
    """Find out whether a file has a header, how wide its vectors are and whether they are text.

    Two whole numbers alone in the first line are a header. The width of a file without one is that of most of its
    first lines, so that neither a faulty first line nor a word with spaces decides it.

    Raises:
        DataError: the file cannot be opened, or its first line is neither a header nor a word with numbers.
    """
    head = _head(path)
    if native := next((about for start, about in _NATIVE.items() if head.startswith(start)), None):
        raise DataError(f"{path}: {native}, which is not read; write it with {_CONVERT}")
    first, newline, rest = head.removeprefix(_BYTE_ORDER_MARK).partition(b"\n")
    header = _HEADER.fullmatch(first)
    if header is None or not newline:
        return _without_header(path, head)
    words, width = int(header[1]), int(header[2])
    numbers = words * width
    if not (0 < words <= MOST_WORDS and 0 < width <= MOST_WIDTH and numbers <= MOST_NUMBERS):
        raise DataError(
            f"{path}, line 1: the header says {words} words of {width} dimensions; expected 1 to {MOST_WORDS:,} words, "
            f"1 to {MOST_WIDTH:,} dimensions and at most {MOST_NUMBERS:,} numbers"
        )
    return Layout(words, width, binary=not _is_text(rest))


def _head(path: Path) -> bytes:
    """Read the first mebibyte, or as much of a damaged archive as can be: who reads the rows says where it ends."""
    head = b""
    with open_vectors(path) as file:
        try:
            while len(head) < _HEAD and (piece := file.read(PIECE)):
                head += piece
        except DAMAGED_GZIP as error:
            if not head:
                raise DataError(f"{path}, after line 0: damaged gzip file ({error})") from error
    return head


def _without_header(path: Path, head: bytes) -> Layout:
    lines = head.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    whole = lines[:1000] if len(lines) == 1 else lines[:-1][:1000]
    if not _is_text(head):
        raise DataError(f"{path}, line 1: neither text nor a header 'words dimensions', with which binary files begin")
    widths = Counter(_numbers_at_end(line) for line in whole if line.strip())
    width = widths.most_common(1)[0][0] if widths else 0
    if not 0 < width <= MOST_WIDTH:
        raise DataError(f"{path}, line 1: expected a word and 1 to {MOST_WIDTH:,} numbers, got {_shown(whole[0])}")
    return Layout(None, width, binary=False)


def _numbers_at_end(line: bytes) -> int:
    """How many fields, from the last one on, are numbers; the first field is the word, even if it is a number."""
    fields = line.split()[1:]
    return next((n for n, field in enumerate(reversed(fields)) if not is_number(field)), len(fields))


def is_number(field: bytes) -> bool:
    """Whether the field is a floating-point number; ``nan`` counts, the underscores that Python allows do not."""
    try:
        float(field)
    except ValueError:
        return False
    return b"_" not in field


def _is_text(block: bytes) -> bool:
    """Whether a block is rows of text: most fields of the first row are numbers, or no byte is one of binary files."""
    fields = block.partition(b"\n")[0].split()[1:]
    fields = fields[:-1] if b"\n" not in block and len(fields) > 1 else fields  # the block may have cut a number
    if fields and 2 * sum(map(is_number, fields)) > len(fields):
        return True
    return not any(byte < 9 or 13 < byte < 32 for byte in block[:4096])


def _shown(line: bytes) -> str:
    return ascii(line[:60].decode("utf-8", "replace"))
