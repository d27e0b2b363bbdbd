"""Reads files of word vectors, one word at a time or as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pretrain.base.errors import DataError, shown
from pretrain.embeddings.vectors.layout import DAMAGED_GZIP, MOST_NUMBERS, MOST_WORDS, Layout, find_layout, open_vectors
from pretrain.embeddings.vectors.rows import Row, binary_rows, text_rows
from pretrain.embeddings.vectors.word_vectors import WordVectors


def stream_vectors(path: Path) -> Iterator[Row]:
    """Yield every word of a file with its vector, in the file's order; only the words are kept in memory.

    The form is found out from the file itself: word2vec's text or binary form (with a header), or GloVe's (without
    one, also C&W's vectors with their words), each also packed with gzip.

    Raises:
        DataError: the file is missing, damaged or not of one form; line (of a binary file: number of the word) and
            remedy are named. Also for a word that occurs twice, and a header with another number of words.
    """
    yield from _checked_rows(path, find_layout(path))


def _checked_rows(path: Path, layout: Layout) -> Iterator[Row]:
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
                if seen.setdefault(word, number) != number:
                    raise DataError(
                        f"{where}: the word {shown(word)} occurs at {place(seen[word])} already; remove one"
                    )
                if layout.words is not None and number == layout.words:
                    raise DataError(f"{where}: more words than the {layout.words:,} that the header in line 1 says")
                if number == MOST_WORDS or (number + 1) * layout.width > MOST_NUMBERS:
                    raise DataError(f"{where}: more than {MOST_WORDS:,} words or {MOST_NUMBERS:,} numbers")
                yield word, row
        except DAMAGED_GZIP as error:
            before = f"after word {len(seen):,}" if layout.binary else f"after {place(len(seen) - 1)}"
            raise DataError(f"{path}, {before}: damaged gzip file ({error})") from error
    if not layout.binary and layout.words is not None and len(seen) < layout.words:
        raise DataError(
            f"{path}, line 1: the header says {layout.words:,} words, but the file ends after {len(seen):,}; "
            "get the whole file, or correct the header"
        )


def read_vectors(path: Path, progress: Callable[[int], None] | None = None) -> WordVectors:
    """Read a whole file of word vectors.

    Args:
        path: the file, of any form that `stream_vectors` reads.
        progress: called after every 10,000 words with their number so far.

    Raises:
        DataError: as `stream_vectors`.
    """
    layout = find_layout(path)
    words: list[str] = []
    # A header may lie about any number of words: memory grows with what is there, in place (realloc).
    matrix = np.empty((min(layout.words or 4096, 4096), layout.width), dtype=np.float32)
    for word, row in _checked_rows(path, layout):
        if len(words) == len(matrix):
            matrix.resize((len(matrix) + len(matrix) // 2 + 1, layout.width), refcheck=False)
        matrix[len(words)] = row
        words.append(word)
        if progress is not None and len(words) % 10_000 == 0:
            progress(len(words))
    matrix.resize((len(words), layout.width), refcheck=False)
    return WordVectors(tuple(words), matrix)
