"""Words with their vectors; files of them in the forms of word2vec, GloVe and gensim, written and read."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from io import BufferedIOBase
from pathlib import Path
from typing import Literal, cast

import numpy as np
from jaxtyping import Float, Float32, Float64

from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.files import DAMAGED, open_regular, replacing, unpacked


@dataclass(frozen=True)
class WordVectors:
    """Words and the rows of their vectors.

    Attributes:
        words: every word once.
        matrix: the vector of each word; of a run the input table.
        context: the vector of each word as a context, where it is known: files of vectors do not hold it.
    """

    words: tuple[str, ...]
    matrix: Float32[np.ndarray, "V d"]
    context: Float32[np.ndarray, "V d"] | None = None

    def __len__(self) -> int:
        return len(self.words)

    @property
    def width(self) -> int:
        """The dimensions of a vector."""
        return int(self.matrix.shape[1])

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The row of each word."""
        return {word: row for row, word in enumerate(self.words)}

    @cached_property
    def norms(self) -> Float64[np.ndarray, " V"]:
        """The length of each vector; in float64, where the squares of all float32 numbers have room."""
        norms: Float64[np.ndarray, " V"] = np.sqrt(np.einsum("vd,vd->v", self.matrix, self.matrix, dtype=np.float64))
        return norms

    def find(self, word: str) -> int | None:
        """Return the row of a word as it is written, else of its lower-case form; None where neither is there."""
        row = self.index.get(word)
        return self.index.get(word.lower()) if row is None else row

    def cosines_to(self, row: int) -> Float64[np.ndarray, " V"]:
        """Return the cosine of every vector to that of ``row``; 0 where one of both is zero."""
        products = np.einsum("vd,d->v", self.matrix, self.matrix[row], dtype=np.float64)
        lengths = self.norms * self.norms[row]
        cosines: Float64[np.ndarray, " V"] = np.divide(products, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        return cosines

    def cosines(self, first: Sequence[int], second: Sequence[int]) -> Float[np.ndarray, " n"]:
        """Return the cosine of each pair of rows in float64; 0 where a vector is zero."""
        a, b = (self.matrix[np.asarray(rows, dtype=np.int64)].astype(np.float64) for rows in (first, second))
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        products = np.einsum("nd,nd->n", a, b)
        cosines: Float[np.ndarray, " n"] = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
        return cosines


# Writes files of word vectors in the forms of word2vec, GloVe and gensim.


Form = Literal["word2vec", "glove", "gensim"]
"""``word2vec``: as its C program; ``gensim``: as `KeyedVectors.save_word2vec_format`; ``glove``: text, no header."""


def write_vectors(vectors: WordVectors, path: Path, form: Form, *, binary: bool = False) -> None:
    """Write words and their vectors as one file, which appears whole or not at all; a name in ``.gz`` packs it.

    Numbers in text have nine significant digits, from which every float32 is read back exactly. Binary numbers are
    little-endian float32.

    Raises:
        DataError: GloVe's form has no binary file, or a word has characters that the form cannot hold.
    """
    if binary and form == "glove":
        raise DataError(f"{path}: GloVe's form is text; give a name without .bin")
    _check_words(vectors, path, form)
    with _opened(path) as file:
        if form != "glove":
            file.write(f"{len(vectors)} {vectors.width}\n".encode())
        if binary:
            # word2vec ends a row with a line end, gensim does not.
            _write_binary(vectors, file, end=b"\n" if form == "word2vec" else b"")
        else:
            # word2vec has a blank before each line end.
            _write_text(vectors, file, end=" \n" if form == "word2vec" else "\n")


@contextmanager
def _opened(path: Path) -> Iterator[BufferedIOBase]:
    with replacing(path) as (file, _):
        if path.suffix != ".gz":
            yield cast(BufferedIOBase, file)
            return
        # no name and no time in the archive: the same vectors make the same bytes
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as packed:
            yield packed


def _check_words(vectors: WordVectors, path: Path, form: Form) -> None:
    """Refuse what would be read back as something else: fields end at blanks of ASCII."""
    for number, word in enumerate(vectors.words, start=1):
        fields = word.encode().split()
        if fields != [word.encode()] and (form != "glove" or not fields or "\n" in word):
            raise DataError(
                f"{path}: word {number}, {shown(word)}, is empty or holds blanks, which {form}'s form cannot write; "
                "GloVe's can hold spaces"
            )


def _write_text(vectors: WordVectors, file: BufferedIOBase, end: str) -> None:
    numbers = " ".join(["%.9g"] * vectors.width) + end
    for word, row in zip(vectors.words, vectors.matrix, strict=True):
        file.write(f"{word} {numbers % tuple(row.tolist())}".encode())


def _write_binary(vectors: WordVectors, file: BufferedIOBase, end: bytes) -> None:
    for word, row in zip(vectors.words, vectors.matrix, strict=True):
        file.write(word.encode() + b" " + row.astype(np.dtype("<f4")).tobytes() + end)


# Read files of word vectors, packed or not; how one is laid out is found out from its first mebibyte.


MOST_WORDS = 1 << 25
"""Words of a file, at most: a small archive may say or hold any number."""

MOST_WIDTH = 65_536
"""Dimensions of a vector, at most."""

MOST_NUMBERS = 1 << 32
"""Numbers of a file, at most: 16 GiB in memory."""

LONGEST_WORD = 16_384
"""Bytes of a word, at most."""

PIECE = 1 << 14
"""Bytes that are read at a time: what a damaged archive holds before the damage is lost to this many."""

_HEAD = 1 << 20
_HEADER = re.compile(rb"[ \t]*([0-9]{1,18})[ \t]+([0-9]{1,18})[ \t\r]*")
_NATIVE = {
    **{bytes([0x80, protocol]): "a pickle, such as gensim's own save() writes" for protocol in (2, 3, 4, 5)},
    b"\x93NUMPY": "a NumPy array, such as gensim's own save() writes beside its pickle",
    (793712314).to_bytes(4, "little"): "a model of fastText (.bin)",
}
"""First bytes of files of vectors that are not read, and the kind of each."""
_CONVERT = "gensim's KeyedVectors.save_word2vec_format('vectors.txt') (those of a model are model.wv)"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class VectorLayout:
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


def find_layout(path: Path) -> VectorLayout:
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
    return VectorLayout(words, width, binary=not _is_text(rest))


def _head(path: Path) -> bytes:
    """Read the first mebibyte, or as much of a damaged archive as can be: who reads the rows says where it ends."""
    head = b""
    with open_vectors(path) as file:
        try:
            while len(head) < _HEAD and (piece := file.read(PIECE)):
                head += piece
        except DAMAGED as error:
            if not head:
                raise DataError(f"{path}, after line 0: damaged gzip file ({error})") from error
    return head


def _without_header(path: Path, head: bytes) -> VectorLayout:
    lines = head.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    # The last line may be cut off by the end of the head.
    whole = lines[:1000] if len(lines) == 1 else lines[:-1][:1000]
    if not _is_text(head):
        raise DataError(f"{path}, line 1: neither text nor a header 'words dimensions', with which binary files begin")
    widths = Counter(_numbers_at_end(line) for line in whole if line.strip())
    width = widths.most_common(1)[0][0] if widths else 0
    if not 0 < width <= MOST_WIDTH:
        raise DataError(f"{path}, line 1: expected a word and 1 to {MOST_WIDTH:,} numbers, got {_shown(whole[0])}")
    return VectorLayout(None, width, binary=False)


def _numbers_at_end(line: bytes) -> int:
    """Count the fields, from the last one on, that are numbers; the first field is the word, even if it is a number."""
    fields = line.split()[1:]
    return next((n for n, field in enumerate(reversed(fields)) if not is_number(field)), len(fields))


def is_number(field: bytes) -> bool:
    """Return whether the field is a floating-point number; ``nan`` is one, Python's ``1_000`` is not."""
    try:
        float(field)
    except ValueError:
        return False
    return b"_" not in field


def _is_text(block: bytes) -> bool:
    """Return whether a block is rows of text: mostly numbers in its first row, or no byte of a binary file."""
    fields = block.partition(b"\n")[0].split()[1:]
    fields = fields[:-1] if b"\n" not in block and len(fields) > 1 else fields  # the block may have cut a number
    if fields and 2 * sum(map(is_number, fields)) > len(fields):
        return True
    return not any(byte < 9 or 13 < byte < 32 for byte in block[:4096])


def _shown(line: bytes) -> str:
    return ascii(line[:60].decode("utf-8", "replace"))


# The rows of a text file and of a binary file of word vectors, one word at a time.


WordVector = tuple[str, Float32[np.ndarray, " d"]]
"""A word and its vector."""

_LONGEST_LINE = LONGEST_WORD + 64 * MOST_WIDTH


def text_rows(file: BufferedIOBase, path: Path, layout: VectorLayout) -> Iterator[WordVector]:
    """Yield the rows of a text file; the last ``width`` fields of a line are the numbers, the rest is the word.

    So a word may hold spaces, as a few of GloVe's do. Only blanks of ASCII separate fields: others occur in words.

    Raises:
        DataError: a line has another width, its word is not UTF-8, or a number cannot be read; the line is named.
    """
    first = 1
    if layout.words is not None:
        # Bounded reads: a file without line ends would otherwise be one line of any size.
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
            raise DataError(
                f"{where}: a carriage return within the line; end lines with a line feed: tr '\\r' '\\n' < FILE"
            )
        yield _decoded(fields[0].strip(), where), _parsed(fields[1:], where)


def _parsed(fields: list[bytes], where: str) -> Float32[np.ndarray, " d"]:
    try:
        row = np.array(list(map(float, fields)))
        # Python takes 1_000 for a number, other programs do not.
        if any(b"_" in field for field in fields):
            raise ValueError
    except ValueError:
        bad = next(field for field in fields if b"_" in field or not is_number(field))
        raise DataError(
            f"{where}: {shown(bad.decode('utf-8', 'replace'))} is not a number: mend or remove the line"
        ) from None
    # Written so that NaN is refused as well.
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


def binary_rows(file: BufferedIOBase, path: Path, layout: VectorLayout) -> Iterator[WordVector]:
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
        # Refill where the longest word and its numbers might not be whole.
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
    # word2vec ends the file with a line end.
    if (block[place:] + file.read(2)).strip(b"\r\n"):
        raise DataError(f"{path}: continues after word {layout.words:,}, the last that the header speaks of")


def _ends_early(path: Path, done: int, words: int) -> DataError:
    return DataError(f"{path}: ends within or before word {done + 1:,}; the header says {words:,} words")


# Reads files of word vectors, one word at a time or as a whole.


def stream_vectors(path: Path) -> Iterator[WordVector]:
    """Yield every word of a file with its vector, in the file's order; only the words are kept in memory.

    The form is found out from the file itself: word2vec's text or binary form (with a header), or GloVe's (without
    one, also C&W's vectors with their words), each also packed with gzip.

    Raises:
        DataError: the file is missing, damaged or not of one form; line (of a binary file: number of the word) and
            remedy are named. Also for a word that occurs twice, and a header with another number of words.
    """
    yield from _checked_rows(path, find_layout(path))


def _checked_rows(path: Path, layout: VectorLayout) -> Iterator[WordVector]:
    seen: dict[str, int] = {}

    def place(row: int) -> str:
        """The place of word number ``row`` (from 0)."""
        return f"word {row + 1:,}" if layout.binary else f"line {row + 1 + (layout.words is not None)}"

    with open_vectors(path) as file:
        rows = (binary_rows if layout.binary else text_rows)(file, path, layout)
        try:
            for word, row in rows:
                number = len(seen)
                where = f"{path}, {place(number)}"
                if not word:
                    raise DataError(f"{where}: the word is empty")
                # Two vectors of one word: to choose either would be a guess.
                if seen.setdefault(word, number) != number:
                    raise DataError(
                        f"{where}: the word {shown(word)} occurs at {place(seen[word])} already; remove one"
                    )
                if layout.words is not None and number == layout.words:
                    raise DataError(f"{where}: more words than the {layout.words:,} that the header in line 1 says")
                if number == MOST_WORDS or (number + 1) * layout.width > MOST_NUMBERS:
                    raise DataError(f"{where}: more than {MOST_WORDS:,} words or {MOST_NUMBERS:,} numbers")
                yield word, row
        except DAMAGED as error:
            before = f"after word {len(seen):,}" if layout.binary else f"after {place(len(seen) - 1)}"
            raise DataError(f"{path}, {before}: damaged gzip file ({error})") from error
    if not layout.binary and layout.words is not None and len(seen) < layout.words:
        raise DataError(
            f"{path}, line 1: the header says {layout.words:,} words, but the file ends after {len(seen):,}; "
            "get the whole file, or correct the header"
        )


def read_vectors(path: Path) -> WordVectors:
    """Read a whole file of word vectors, of any form that `stream_vectors` reads.

    Raises:
        DataError: as `stream_vectors`.
    """
    layout = find_layout(path)
    words: list[str] = []
    # A header may be about any number of words: memory grows with what is there, in place (realloc).
    matrix = np.empty((min(layout.words or 4096, 4096), layout.width), dtype=np.float32)
    for word, row in _checked_rows(path, layout):
        if len(words) == len(matrix):
            matrix.resize((len(matrix) + len(matrix) // 2 + 1, layout.width), refcheck=False)
        matrix[len(words)] = row
        words.append(word)
    matrix.resize((len(words), layout.width), refcheck=False)
    return WordVectors(tuple(words), matrix)
