"""BM25 by bm25s: Lucene's variant, k1 1.5, b 0.75, words in lower case, no stop words, no stemming."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import read_json, write_json

_WORDS = {"stopwords": None, "show_progress": False}
_COUNT = "texts.json"


class Bm25Index:
    """The words of texts, by which the texts are scored for a query.

    Args:
        index: an index of bm25s; None where no text holds a word, which it cannot index.
        count: the number of texts.
    """

    def __init__(self, index: Any, count: int) -> None:
        self._index, self._count = index, count

    @classmethod
    def of(cls, texts: Iterable[str]) -> Bm25Index:
        """Index ``texts``."""
        bm25s = _library()
        words = bm25s.tokenize(list(texts), **_WORDS)
        if not any(words.ids):
            return cls(None, len(words.ids))
        index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        index.index(words, show_progress=False)
        return cls(index, len(words.ids))

    def scores(self, query: str) -> Float[np.ndarray, " n"]:
        """The score of each text; 0 where it holds no word of the query."""
        (words,) = _library().tokenize([query], return_ids=False, **_WORDS)
        known = [word for word in words if self._index is not None and word in self._index.vocab_dict]
        return self._index.get_scores(known) if known else np.zeros(self._count, dtype=np.float32)

    def save(self, folder: Path) -> None:
        """Write the index into a new folder."""
        folder.mkdir()
        write_json(folder / _COUNT, {"count": self._count, "words": self._index is not None})
        if self._index is not None:
            self._index.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path) -> Bm25Index:
        """Map what `save` has written. Raises ``DataError``: files are damaged."""
        about = read_json(folder / _COUNT)
        library = _library()
        try:
            return cls(library.BM25.load(folder, mmap=True) if about["words"] else None, about["count"])
        except (ValueError, EOFError):
            raise DataError(f"{folder}: damaged words of an index; build the index again in a new folder") from None


def require_bm25() -> None:
    """Raise ``ModuleNotFoundError`` where the library is not installed."""
    _library()


def _library() -> Any:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets its own to DEBUG
    return bm25s
