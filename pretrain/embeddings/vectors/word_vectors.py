"""Words with their vectors, from a run, a checkpoint or a file; and the writers of such files."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BufferedIOBase
from pathlib import Path
from typing import Literal, cast

import numpy as np
from jaxtyping import Float, Float32, Float64

from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.files import replacing


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
            _write_binary(vectors, file, end=b"\n" if form == "word2vec" else b"")
        else:
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
