"""Exact search for the nearest documents, in blocks, over any number of ranks, with the same result on each of them.

Blocks of documents are scored in fp32. Every document that could belong to the best, given the error bound of such a
product, is scored again in float64 and rounded to fp32. So the result depends neither on the shape of a block, nor on
the number of ranks, nor on the device; equal documents have equal scores, and their ids decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int

from capt.pretrain.base.distributed import all_gather, device

BLOCK = 8192
"""Documents in one product."""
_QUERIES = 512
"""Queries in one product."""
_PAIRS = 1 << 22
"""Numbers of one operand of a product in float64, at most."""


@dataclass(frozen=True)
class Nearest:
    """The best documents of each query, the best first: their numbers (-1: there are no more) and their scores."""

    numbers: Int[np.ndarray, "q k"]
    scores: Float[np.ndarray, "q k"]


def unit_rows(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Rows of length 1 in fp32; a row of zeros stays."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(norms > 0, norms, 1)).astype(np.float32)


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


class TopK:
    """The ``k`` best documents of each query among those that were given to `update`.

    Args:
        queries: a vector for each query, fp32.
        k: documents to keep.
        order: for each document its place among equal scores; the smallest comes first.
    """

    def __init__(self, queries: Float[np.ndarray, "q d"], k: int, order: Int[np.ndarray, " n"]) -> None:
        self._queries, self._order, self._k = np.ascontiguousarray(queries), order, k
        self._on_device = torch.from_numpy(self._queries).to(device())
        self._lengths = np.linalg.norm(self._queries.astype(np.float64), axis=1)
        n = len(queries)
        self._scores = np.full((n, k), -np.inf, dtype=np.float32)
        self._numbers = np.full((n, k), -1, dtype=np.int64)

    def update(self, first: int, rows: Float[np.ndarray, "b d"]) -> None:
        """Take the documents ``first``, ``first + 1``, ... with the vectors ``rows`` (fp32) into account."""
        if not len(rows):
            return
        documents = torch.from_numpy(np.ascontiguousarray(rows)).to(device())
        longest = float(np.linalg.norm(rows.astype(np.float64), axis=1).max())
        for start in range(0, len(self._queries), _QUERIES):
            part = slice(start, start + _QUERIES)
            approximate = self._on_device[part] @ documents.T
            floor = self._scores[part, -1]
            if len(rows) >= self._k and np.isneginf(floor).any():  # later the best so far are floor enough
                floor = np.maximum(floor, torch.topk(approximate, self._k, dim=1).values[:, -1].cpu().numpy())
            # |fl(x y) - x y| <= d u |x| |y|: once for the product itself, once for the floor
            slack = 2 * (rows.shape[1] + 2) * 2.0**-24 * self._lengths[part] * longest
            limit = np.nextafter((floor - slack).astype(np.float32), np.float32(-np.inf))
            found = torch.nonzero(approximate >= torch.from_numpy(limit).to(device())[:, None], as_tuple=True)
            queries, columns = (each.cpu().numpy() for each in found)
            queries = queries + start
            self._merge(queries, columns + first, pair_scores(self._queries, rows, queries, columns))

    def _merge(
        self, queries: Int[np.ndarray, " p"], numbers: Int[np.ndarray, " p"], scores: Float[np.ndarray, " p"]
    ) -> None:
        """Take documents with their scores into account; each has not been seen before."""
        touched = np.unique(queries)
        kept = self._numbers[touched] >= 0
        queries = np.concatenate([np.repeat(touched, kept.sum(axis=1)), queries])
        numbers = np.concatenate([self._numbers[touched][kept], numbers])
        scores = np.concatenate([self._scores[touched][kept], scores])
        order = np.lexsort((self._order[numbers], -scores, queries))
        queries, numbers, scores = queries[order], numbers[order], scores[order]
        starts = np.searchsorted(queries, touched)
        place = np.arange(len(queries)) - np.repeat(starts, np.diff([*starts.tolist(), len(queries)]))
        inside = place < self._k
        self._numbers[touched], self._scores[touched] = -1, -np.inf
        self._numbers[queries[inside], place[inside]] = numbers[inside]
        self._scores[queries[inside], place[inside]] = scores[inside]

    def result(self) -> Nearest:
        """The best of what all ranks have seen, alike on every rank. Collective: q x k x 12 bytes from each rank."""
        numbers = all_gather(torch.from_numpy(self._numbers).to(device())).cpu().numpy()
        scores = all_gather(torch.from_numpy(self._scores).to(device())).cpu().numpy()
        if len(numbers) > 1:
            self._numbers, self._scores = np.full_like(self._numbers, -1), np.full_like(self._scores, -np.inf)
            world, found, places = np.nonzero(numbers >= 0)
            self._merge(found, numbers[world, found, places], scores[world, found, places])
        return Nearest(self._numbers, self._scores)


def by_id(names: Sequence[str]) -> Int[np.ndarray, " n"]:
    """The place of each document among equal scores: ids in descending order, as trec_eval has them."""
    places = np.empty(len(names), dtype=np.int64)
    places[sorted(range(len(names)), key=names.__getitem__, reverse=True)] = np.arange(len(names))
    return places
