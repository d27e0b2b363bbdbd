"""Approximate search among a million vectors and more: a graph of neighbours (HNSW) by faiss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from capt.pretrain.retrieval.search import BLOCK, TopK

GRAPH_FROM = 1_000_000
"""Vectors from which on a graph is made, unless the user decides."""
_LINKS, _BUILD_BREADTH, _BREADTH = 32, 100, 128
"""Neighbours of a vector in the graph; candidates that are looked at when it is built, and at least when searched."""
_QUESTIONS, _TOP = 200, 10


class VectorGraph:
    """A graph over vectors, by which those nearest to a query are found without comparing it with all.

    The vectors in it are rounded to fp16; the scores of what it finds are computed anew from the vectors themselves.
    """

    def __init__(self, index: Any) -> None:
        self._index = index

    @classmethod
    def of(cls, vectors: Float[np.ndarray, "n d"]) -> VectorGraph:
        """Build the graph of ``vectors``, of which products are compared."""
        faiss = _library()
        kind = faiss.ScalarQuantizer.QT_fp16
        index = faiss.IndexHNSWSQ(vectors.shape[1], kind, _LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = _BUILD_BREADTH
        index.train(_fp32(vectors[:BLOCK]))
        for first in range(0, len(vectors), BLOCK):
            index.add(_fp32(vectors[first : first + BLOCK]))
        return cls(index)

    def save(self, path: Path) -> None:
        """Write the graph into a file."""
        _library().write_index(self._index, str(path))

    @classmethod
    def load(cls, path: Path) -> VectorGraph:
        """Read what `save` has written."""
        return cls(_library().read_index(str(path)))

    def nearest(self, queries: Float[np.ndarray, "q d"], k: int) -> Int[np.ndarray, "q k"]:
        """The numbers of about the ``k`` nearest vectors of each query; -1 where it finds fewer."""
        breadth = _library().SearchParametersHNSW(efSearch=max(_BREADTH, 2 * k))
        numbers: Int[np.ndarray, "q k"] = self._index.search(_fp32(queries), k, params=breadth)[1]
        return numbers

    def recall(self, vectors: Float[np.ndarray, "n d"]) -> float:
        """The share of the 10 nearest vectors, by an exact search, that the graph finds; of 200 of them as queries."""
        drawn = np.random.default_rng(0).choice(len(vectors), min(_QUESTIONS, len(vectors)), replace=False)
        queries = _fp32(vectors[np.sort(drawn)])
        exact = TopK(queries, min(_TOP, len(vectors)), np.arange(len(vectors)))
        for first in range(0, len(vectors), BLOCK):
            exact.update(first, _fp32(vectors[first : first + BLOCK]))
        wanted = exact.result().numbers
        found = self.nearest(queries, wanted.shape[1])
        return float(np.mean([np.isin(row, there).mean() for row, there in zip(wanted, found, strict=True)]))


def require_faiss() -> None:
    """Raise ``ModuleNotFoundError`` where the library is not installed."""
    _library()


def has_faiss() -> bool:
    """Return whether the library is installed."""
    try:
        require_faiss()
    except ModuleNotFoundError:
        return False
    return True


def _fp32(rows: np.ndarray) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def _library() -> Any:
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss
