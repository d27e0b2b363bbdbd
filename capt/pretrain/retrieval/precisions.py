"""Exact search by vectors in int8 and in bits: integer products, and Hamming distances by popcount.

Products of int8 are sums of integers, so that `TopK` gives them without rounding: in fp32 up to 1,024 columns, and of
more it scores its candidates in float64. Of bits the score is the product of their signs, d - 2 h with the Hamming
distance h. Both are the same on every device and for any number of ranks; equal scores are ordered by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt8, UInt64

from capt.pretrain.base.distributed import gather_objects, rank, synchronize_errors, world_size
from capt.pretrain.base.errors import ConfigError, did_you_mean, repeated
from capt.pretrain.contrast.precisions import VECTOR_PRECISIONS, VectorPrecision
from capt.pretrain.retrieval.quantize import Ranges, bits_of, signs_of
from capt.pretrain.retrieval.search import Nearest, Scoring, TopK, keys_of, pair_scores
from capt.pretrain.retrieval.store import Vectors

_HAMMING_QUERIES = 64
"""Queries that are compared with a block of documents at a time: the counts of one word stay in the cache."""
_RESCORED = 1 << 15
"""Documents that are read at a time to be scored again."""


def precisions_of(names: Sequence[str]) -> tuple[VectorPrecision, ...]:
    """Precisions by their names. Raises ``ConfigError``."""
    for name in names:
        if name not in VECTOR_PRECISIONS:
            raise ConfigError(f"--precision {name}: unknown; {did_you_mean(name, VECTOR_PRECISIONS, 'valid:')}")
    if twice := repeated(names):
        raise ConfigError(f"--precision names {twice} twice")
    return tuple(each for name in names for each in VECTOR_PRECISIONS if each == name)


@dataclass(frozen=True)
class QuantizedScoring(Scoring):
    """Vectors compared in int8 or in bits.

    ``normalize`` is of the vectors before they are quantized. The rows that are compared are numbers of int8 in fp32,
    or bits, eight in a byte.

    Attributes:
        precision: int8 or binary.
        dimension: numbers of a vector.
        ranges: of int8.
    """

    precision: VectorPrecision = "int8"
    dimension: int = 0
    ranges: Ranges | None = None

    def rows(self, stored: Float[np.ndarray, "n d"]) -> np.ndarray:
        """Stored vectors as they are compared."""
        vectors = super().rows(stored)
        if self.precision == "binary":
            return bits_of(vectors)
        assert self.ranges is not None
        return self.ranges.codes(vectors).astype(np.float32)

    def restored(self, rows: np.ndarray) -> Float[np.ndarray, "n d"]:
        """The vectors behind compared rows: the middle of each step, or 1 and -1."""
        if self.precision == "binary":
            return signs_of(rows, self.dimension)
        assert self.ranges is not None
        return self.ranges.restored(rows.astype(np.int8))

    def best(self, queries: np.ndarray, k: int, order: Int[np.ndarray, " n"]) -> TopK:
        """A ranking of ``k`` documents for each query, still empty."""
        if self.precision == "binary":
            return HammingTopK(queries, k, order, self.dimension)
        return super().best(queries, k, order)

    def pairs(
        self, left: np.ndarray, right: np.ndarray, rows: Int[np.ndarray, " p"], columns: Int[np.ndarray, " p"]
    ) -> Float[np.ndarray, " p"]:
        """The score of query ``left[rows[i]]`` and document ``right[columns[i]]`` for each i."""
        if self.precision == "binary":
            left, right = (signs_of(each, self.dimension) for each in (left, right))
        return super().pairs(left, right, rows, columns)


class HammingTopK(TopK):
    """The best documents by the number of bits that differ.

    Args:
        queries: bits, eight in a byte.
        k: documents to keep.
        order: as for `TopK`.
        dimension: bits of a vector.
    """

    def __init__(self, queries: UInt8[np.ndarray, "q b"], k: int, order: Int[np.ndarray, " n"], dimension: int) -> None:
        super().__init__(queries.astype(np.float32), k, order)
        self._words, self._dimension = _words_of(queries), dimension

    def update(self, first: int, vectors: UInt8[np.ndarray, "n b"]) -> None:
        """Compare the documents ``first``, ``first + 1``, ... with all queries."""
        documents = _words_of(vectors)
        places = self._order[first : first + len(vectors)]
        for start in range(0, len(self._words) if len(vectors) else 0, _HAMMING_QUERIES):
            part = slice(start, start + _HAMMING_QUERIES)
            differing = np.zeros((len(self._words[part]), len(documents)), dtype=np.int32)
            for mine, theirs in zip(self._words[part].T, documents.T, strict=True):
                differing += np.bitwise_count(mine[:, None] ^ theirs)
            scores = (self._dimension - 2 * differing).astype(np.float32)
            keys = np.concatenate([self._best[part], keys_of(scores, np.broadcast_to(places, scores.shape))], axis=1)
            self._best[part] = np.sort(np.partition(keys, self._k - 1, axis=1)[:, : self._k], axis=1)


def _words_of(bits: UInt8[np.ndarray, "n b"]) -> UInt64[np.ndarray, "n w"]:
    """Bits as words of 64, with zeros at the end, which differ in no pair."""
    padded = np.zeros((len(bits), -(-bits.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : bits.shape[1]] = bits
    return padded.view(np.uint64)


def ranges_of(store: Vectors, hashes: Sequence[bytes], dimension: int, scoring: Scoring, block: int) -> Ranges:
    """The ranges of the first ``dimension`` numbers of stored vectors, as they are compared. Collective."""
    with synchronize_errors(patient=True):
        starts = range(0, len(hashes), block)[rank() :: world_size()]
        rows = (scoring.rows(store.vectors(hashes[start : start + block])[:, :dimension]) for start in starts)
        own = Ranges.of(rows, dimension)
    return own.gathered()


def rescored(
    nearest: Nearest,
    queries: Float[np.ndarray, "q d"],
    store: Vectors,
    hashes: Sequence[bytes],
    order: Int[np.ndarray, " n"],
    scoring: QuantizedScoring,
) -> Nearest:
    """The same documents ordered by the product of the query in float with what is stored of each. Collective.

    Args:
        nearest: what a search has found.
        queries: vectors of length 1 where directions are compared.
        store: the vectors of the documents.
        hashes: the text of each document.
        order: as for `TopK`.
        scoring: how the documents are quantized.
    """
    found: list[tuple[int, np.ndarray, np.ndarray]] = []
    step = max(1, _RESCORED // nearest.numbers.shape[1])
    with synchronize_errors(patient=True):
        for start in range(0, len(queries), step)[rank() :: world_size()]:
            numbers = nearest.numbers[start : start + step]
            rows, columns = np.nonzero(numbers >= 0)
            needed, place = np.unique(numbers[rows, columns], return_inverse=True)
            stored = store.vectors([hashes[i] for i in needed])[:, : queries.shape[1]]
            documents = scoring.restored(scoring.rows(stored))
            scores = np.full(numbers.shape, -np.inf, dtype=np.float32)
            scores[rows, columns] = pair_scores(queries[start : start + step], documents, rows, place)
            places = np.where(numbers >= 0, order[numbers], len(order))
            best = np.lexsort((places, -scores), axis=1)
            numbers, scores = (np.take_along_axis(each, best, axis=1) for each in (numbers, scores))
            found.append((start, numbers, scores))
    parts = sorted((each for part in gather_objects(found) for each in part), key=lambda part: part[0])
    numbers, scores = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    return Nearest(numbers, scores)
