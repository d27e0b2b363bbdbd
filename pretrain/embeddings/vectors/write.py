"""Writes files of word vectors in the forms of word2vec, GloVe and gensim."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Literal, cast

import numpy as np

from pretrain.base.errors import DataError, shown
from pretrain.base.files import replacing
from pretrain.embeddings.vectors.word_vectors import WordVectors

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
