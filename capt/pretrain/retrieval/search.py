"""Exact search for the nearest documents, in blocks, over any number of ranks, with the same result on each of them.

Stored rows are vectors, compared by product or cosine, or those of a representation with a similarity of its own:
`Scoring` knows, and searches ask it.

Blocks of documents are scored in fp32. Every document that could belong to the best, given the error bound of such a
product, is scored again in float64 and rounded to fp32. So the result depends neither on the shape of a block, nor on
the number of ranks, nor on the device; equal documents have equal scores, and their ids decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int

from capt.pretrain.base.distributed import all_gather, device
from capt.pretrain.contrast.kernels import FP32
from capt.pretrain.contrast.similarity import Similarity, blockwise, paired

BLOCK = 8192
"""Documents in one product."""
_QUERIES = 512
"""Queries in one product."""
_GROUP = 16
"""Columns of a product that are looked at together."""
_PAIRS = 1 << 17
"""Numbers of one operand of a product in float64, at most: both stay in the cache of a core."""
_HELD_BYTES = 64 << 20
"""Candidates that are held, with their vectors."""
_ROWS = 256
"""Rows that become float64 together, for the same reason."""


@dataclass(frozen=True)
class Nearest:
    """The best documents of each query, the best first: their numbers (-1: there are no more) and their scores."""

    numbers: Int[np.ndarray, "q k"]
    scores: Float[np.ndarray, "q k"]


def unit_rows(vectors: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Vectors of length 1 in fp32; a vector of zeros stays."""
    out = np.empty(vectors.shape, dtype=np.float32)
    for start in range(0, len(vectors), _ROWS):
        part = vectors[start : start + _ROWS].astype(np.float64)
        norms = np.linalg.norm(part, axis=1, keepdims=True)
        np.divide(part, np.where(norms > 0, norms, 1), out=part)
        out[start : start + _ROWS] = part
    return out


def pair_scores(
    left: Float[np.ndarray, "m d"],
    right: Float[np.ndarray, "n d"],
    rows: Int[np.ndarray, " p"],
    columns: Int[np.ndarray, " p"],
) -> Float[np.ndarray, " p"]:
    """The product of ``left[rows[i]]`` and ``right[columns[i]]`` for each i: summed in float64, rounded to fp32."""
    out = np.empty(len(rows), dtype=np.float32)
    step = max(1, _PAIRS // left.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        out[part] = np.einsum(
            "pd,pd->p", left[rows[part]].astype(np.float64), right[columns[part]].astype(np.float64)
        ).astype(np.float32)
    return out


class _Held(NamedTuple):
    """Documents that may belong to the best: vectors and numbers, and pairs of query and document with products."""

    vectors: Float[np.ndarray, "c d"]
    numbers: Int[np.ndarray, " c"]
    queries: Int[np.ndarray, " p"]
    columns: Int[np.ndarray, " p"]
    products: Float[np.ndarray, " p"]


class TopK:
    """The ``k`` best documents of each query among those that were given to `update`.

    Args:
        queries: a vector for each query, fp32.
        k: documents to keep.
        order: for each document its place among equal scores, a permutation; the smallest comes first.
    """

    def __init__(self, queries: Float[np.ndarray, "q d"], k: int, order: Int[np.ndarray, " n"]) -> None:
        self._queries, self._order, self._k = np.ascontiguousarray(queries), order.astype(np.int64), k
        self._at_place = np.argsort(order)
        self._on_device = torch.from_numpy(self._queries).to(device())
        self._lengths = _lengths(self._queries)
        self._best = np.full((len(queries), k), _NONE, dtype=np.int64)
        self._products = np.full((len(queries), k), -np.inf, dtype=np.float32)
        self._longest = 0.0
        self._held: list[_Held] = []

    def update(self, first: int, vectors: Float[np.ndarray, "b d"]) -> None:
        """Take the documents ``first``, ``first + 1``, ... with the vectors ``vectors`` (fp32) into account.

        Candidates are held until they fill 64 MiB: fewer of them are left then, to be scored again.
        """
        if not len(vectors) or not len(self._queries):
            return
        # Documents go to the device block by block, queries stay there.
        documents = torch.from_numpy(np.ascontiguousarray(vectors)).to(device())
        self._longest = max(self._longest, float(_lengths(vectors).max()))
        with FP32.applied_on(device()):  # the bound of `_limit` is that of IEEE's fp32
            parts = [
                self._candidates(self._on_device[start : start + _QUERIES] @ documents.T, start)
                for start in range(0, len(self._queries), _QUERIES)
            ]
        queries, columns, products = (np.concatenate(each) for each in zip(*parts, strict=True))
        used = np.zeros(len(vectors), dtype=bool)
        used[columns] = True
        numbers = np.flatnonzero(used) + first
        self._held.append(_Held(vectors[used], numbers, queries, used.cumsum()[columns] - 1, products))
        if sum(part.nbytes for held in self._held for part in held) >= _HELD_BYTES:
            self._settle()

    def _candidates(
        self, products: Float[torch.Tensor, "m b"], start: int
    ) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " p"], Float[np.ndarray, " p"]]:
        """Queries (that of the first row is ``start``), columns and products that may belong to the best, by query.

        The largest of each group of columns is looked at first: most groups hold no candidate.
        """
        count, part = products.shape[1], slice(start, start + len(products))
        # Padded with -inf to whole groups, which `real` takes out again.
        if over := count % _GROUP:
            products = F.pad(products, (0, _GROUP - over), value=-torch.inf)
        # Group g has the columns g, g + n, g + 2 n, ...: their maximum reads memory in a row.
        groups = products.unflatten(1, (_GROUP, -1))
        largest = groups.amax(1)
        # The worst of the best so far: a document below it cannot be among them.
        floor = self._products[part].min(axis=1)
        if count >= self._k and np.isneginf(floor).any():  # later the best so far are floor enough
            # The best of each group are distinct columns, so the k-th of them is a floor as well, and cheaper to find.
            seen = largest if 4 * self._k <= largest.shape[1] else products
            floor = np.maximum(floor, torch.topk(seen, self._k, dim=1).values.amin(1).cpu().numpy())
        limit = torch.from_numpy(self._limit(floor, part)).to(device())
        rows, group = torch.nonzero(largest >= limit[:, None], as_tuple=True)
        near = groups[rows, :, group]
        hit, member = torch.nonzero(near >= limit[rows, None], as_tuple=True)
        columns = member * largest.shape[1] + group[hit]
        real = columns < count
        queries, columns, values = (x[real].cpu().numpy() for x in (rows[hit], columns, near[hit, member]))
        # Keep the k best products, by which later blocks are judged.
        touched, table = _beside(-self._products[part], queries, -values)
        self._products[start + touched] = -np.partition(table, self._k - 1, axis=1)[:, : self._k]
        return queries + start, columns, values

    def _limit(self, floor: Float[np.ndarray, " m"], queries: slice | Int[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
        """Return the product in fp32 that a document must reach to be one of the best, which reach ``floor``."""
        # |fl(x y) - x y| <= d u |x| |y|: once for the product itself, once for the floor
        slack = 2 * (self._queries.shape[1] + 2) * 2.0**-24 * self._longest * self._lengths[queries]
        limit: Float[np.ndarray, " m"] = np.nextafter((floor - slack).astype(np.float32), np.float32(-np.inf))
        return limit

    def _settle(self) -> None:
        """Score what is held in float64, as far as it may still belong to the best."""
        # The floor has risen since these were held: most need no float64 any more.
        limit = self._limit(self._products.min(axis=1), slice(None))
        for held in self._held:
            near = held.products >= limit[held.queries]
            queries, columns = held.queries[near], held.columns[near]
            scores = pair_scores(self._queries, held.vectors, queries, columns)
            touched, table = _beside(self._best, queries, keys_of(scores, self._order[held.numbers[columns]]))
            table.sort(axis=1)
            self._best[touched] = table[:, : self._k]
        self._held = []

    def result(self) -> Nearest:
        """The best of what all ranks have seen, alike on every rank. Collective: q x k x 8 bytes from each rank."""
        self._settle()
        # Keys of float64 scores: merging them needs no vectors, and gives the same on every rank.
        keys = all_gather(torch.from_numpy(self._best).to(device())).cpu().numpy()
        keys = np.sort(np.concatenate(list(keys), axis=1), axis=1)[:, : self._k]
        found = keys != _NONE
        numbers = np.full(keys.shape, -1, dtype=np.int64)
        numbers[found] = self._at_place[keys[found] & _PLACE]
        return Nearest(numbers, _scores(keys))


class SimilarityTopK(TopK):
    """The best documents by a similarity of rows, which is computed in float64 and rounded to fp32."""

    def __init__(
        self, queries: Float[np.ndarray, "q d"], k: int, order: Int[np.ndarray, " n"], similarity: Similarity
    ) -> None:
        super().__init__(queries, k, order)
        self._similarity = blockwise(similarity)

    def update(self, first: int, vectors: Float[np.ndarray, "b d"]) -> None:
        """Compare the documents ``first``, ``first + 1``, ... with all queries."""
        documents = torch.from_numpy(np.ascontiguousarray(vectors)).to(device()).double()
        places = self._order[first : first + len(vectors)]
        for start in range(0, len(self._queries) if len(vectors) else 0, _QUERIES):
            part = slice(start, start + _QUERIES)
            scores = self._similarity(self._on_device[part].double(), documents).float().cpu().numpy()
            keys = np.concatenate([self._best[part], keys_of(scores, np.broadcast_to(places, scores.shape))], axis=1)
            self._best[part] = np.sort(keys, axis=1)[:, : self._k]


@dataclass(frozen=True)
class Scoring:
    """The way in which stored rows are compared: by ``similarity``, or as vectors by cosine, or by plain product."""

    normalize: bool = True
    similarity: Similarity | None = None

    def rows(self, stored: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        """Stored rows as they are compared, which the other methods take."""
        return unit_rows(stored) if self.normalize and self.similarity is None else np.ascontiguousarray(stored)

    def best(self, queries: Float[np.ndarray, "q d"], k: int, order: Int[np.ndarray, " n"]) -> TopK:
        """A ranking of ``k`` documents for each query, still empty."""
        similarity = self.similarity
        return TopK(queries, k, order) if similarity is None else SimilarityTopK(queries, k, order, similarity)

    def pairs(
        self,
        left: Float[np.ndarray, "m d"],
        right: Float[np.ndarray, "n d"],
        rows: Int[np.ndarray, " p"],
        columns: Int[np.ndarray, " p"],
    ) -> Float[np.ndarray, " p"]:
        """The score of query ``left[rows[i]]`` and document ``right[columns[i]]`` for each i, as `pair_scores`."""
        if self.similarity is None:
            return pair_scores(left, right, rows, columns)
        first, second = (torch.from_numpy(each).double() for each in (left[rows], right[columns]))
        return paired(self.similarity, first, second).float().numpy()


def _beside(
    best: np.ndarray, queries: Int[np.ndarray, " p"], found: np.ndarray
) -> tuple[Int[np.ndarray, " t"], np.ndarray]:
    """The queries that have something new, by ``queries`` in ascending order, and their rows of ``best`` with it."""
    touched, starts, counts = np.unique(queries, return_index=True, return_counts=True)
    k, most = best.shape[1], int(counts.max(initial=0))
    empty = _NONE if best.dtype == np.int64 else np.inf
    table = np.full((len(touched), k + most), empty, dtype=best.dtype)
    table[:, :k] = best[touched]
    # Number of each new entry within its query.
    places = np.arange(len(queries)) - np.repeat(starts, counts)
    table[np.repeat(np.arange(len(touched)), counts), k + places] = found
    return touched, table


# A score and a place among equal scores as one number, of which the smallest is the best: sorting it is cheap.

_NONE = np.iinfo(np.int64).max
"""The key of no document, after all others."""
_PLACE = (1 << 32) - 1


def keys_of(scores: Float[np.ndarray, "*n"], places: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
    """Scores and places among equal scores, a number each."""
    bits = (scores + np.float32(0)).view(np.int32).astype(np.int64)  # + 0: there is one zero only
    # The bits of a float order as an integer, but for negative ones, whose order is reversed.
    ascending = np.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    # Inverted, so that the largest score has the smallest key; the place decides among equal ones.
    keys: Int[np.ndarray, "*n"] = (~ascending << 32) | places
    return keys


def _scores(keys: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    ascending = ~(keys >> 32)
    scores = np.where(ascending >= 0, ascending, ascending ^ 0x7FFFFFFF).astype(np.int32).view(np.float32)
    return np.where(keys == _NONE, np.float32(-np.inf), scores)


def _lengths(vectors: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
    """Euclidean lengths, in float64."""
    out = np.empty(len(vectors))
    for start in range(0, len(vectors), _ROWS):
        part = vectors[start : start + _ROWS].astype(np.float64)
        out[start : start + _ROWS] = np.einsum("nd,nd->n", part, part)
    return np.sqrt(out)


def by_id(names: Sequence[str]) -> Int[np.ndarray, " n"]:
    """The place of each document among equal scores: ids in descending order, as trec_eval has them."""
    places = np.empty(len(names), dtype=np.int64)
    places[sorted(range(len(names)), key=names.__getitem__, reverse=True)] = np.arange(len(names))
    return places
