"""Writes files of word vectors in the forms of word2vec, GloVe and gensim."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal, cast

import numpy as np

from pretrain.base.errors import DataError, shown
from pretrain.base.files import replacing
from pretrain.embeddings.vectors.word_vectors import WordVectors

Form = Literal["word2vec", "glove", "gensim"]
"""``word2vec``: as the C program writes it; ``gensim``: as `KeyedVectors.save_word2vec_format`; ``glove``: no header."""


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
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with replacing(path) as (file, _):
        if path.suffix != ".gz":
            yield file
            return
        # no name and no time in the archive: the same vectors make the same bytes
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as packed:
            yield cast(IO[bytes], packed)


def _check_words(vectors: WordVectors, path: Path, form: Form) -> None:
    """Refuse what would be read back as something else."""
    for number, word in enumerate(vectors.words, start=1):
        parts = word.split()
        if parts == [word]:
            continue
        if not parts or "\n" in word or form != "glove":
            raise DataError(
                f"{path}: word {number}, {shown(word)}, is empty or has blanks: {form}'s form cannot hold it"
            )


def _write_text(vectors: WordVectors, file: IO[bytes], end: str) -> None:
    numbers = " ".join(["%.9g"] * vectors.width) + end
    for word, row in zip(vectors.words, vectors.matrix, strict=True):
        file.write(f"{word} {numbers % tuple(row.tolist())}".encode())


def _write_binary(vectors: WordVectors, file: IO[bytes], end: bytes) -> None:
    for word, row in zip(vectors.words, vectors.matrix, strict=True):
        file.write(word.encode() + b" " + row.astype(np.dtype("<f4")).tobytes() + end)
