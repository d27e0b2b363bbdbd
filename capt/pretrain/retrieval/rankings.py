"""Rankings of the documents of a collection for its queries: by vectors, whole, cut and quantized, and by BM25."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from capt.pretrain.base.distributed import rank, synchronize_errors, world_size
from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.base.parallel import batched
from capt.pretrain.contrast.precisions import VectorPrecision
from capt.pretrain.retrieval.bm25 import Bm25Index
from capt.pretrain.retrieval.data import Collection
from capt.pretrain.retrieval.encoders import TextEncoder
from capt.pretrain.retrieval.fusion import reciprocal_ranks
from capt.pretrain.retrieval.metrics import DEPTH
from capt.pretrain.retrieval.precisions import QuantizedScoring, ranges_of, rescored
from capt.pretrain.retrieval.search import BLOCK, Nearest, Scoring, by_id
from capt.pretrain.retrieval.store import FLOATS, Vectors

Rankings = list[list[str]]
"""For each query the ids of the documents found, the best first."""


@dataclass(frozen=True)
class SearchCorpus:
    """The ids of all documents, and those of them that are a query itself, and not judged relevant to it."""

    names: list[str]
    selves: frozenset[str]

    @classmethod
    def of(cls, collection: Collection) -> SearchCorpus:
        """Read the corpus once. Raises ``DataError``: it is empty, has an id twice, or nothing relevant."""
        queries = {name: " ".join(text.split()) for name, text in collection.queries}
        names, selves, seen = [], set(), dict[str, int]()
        for number, (name, text) in enumerate(collection.documents(), start=1):
            if (first := seen.setdefault(name, number)) != number:
                raise DataError(
                    f"{collection.name}: the document {shown(name)} is there twice, as number {first:,} and as number "
                    f"{number:,} of the corpus; leave one of the two out"
                )
            names.append(name)
            relevant = collection.judged.get(name, {}).get(name, 0) > 0
            # Sets such as ArguAna and Quora search documents by documents: one must not find itself.
            if queries.get(name) and not relevant and queries[name] in " ".join(text.split()):
                selves.add(name)
        if not names:
            raise DataError(f"{collection.name}: an empty corpus")
        asked = {query: collection.judged[query] for query in queries}
        wanted = [name for grades in asked.values() for name, grade in grades.items() if grade > 0]
        if not any(name in seen for name in wanted):
            raise DataError(
                f"{collection.name}: none of the relevant documents is in the corpus: the judgements have ids such as "
                f"{shown(wanted[0])}, the corpus such as {shown(names[0])}; they must be equal"
            )
        return cls(names, frozenset(selves))

    def looked_at(self, depth: int = DEPTH) -> int:
        """Documents to search for ``depth``: one more where a query may find itself, which is then left out."""
        return depth + bool(self.selves)

    def rankings(self, collection: Collection, nearest: Nearest, depth: int = DEPTH) -> Rankings:
        """The ids that a search has found for each query of the collection; never the query itself."""
        return [
            self.without_self(name, row, depth)
            for (name, _), row in zip(collection.queries, nearest.numbers.tolist(), strict=True)
        ]

    def without_self(self, query: str, numbers: Iterable[int], depth: int = DEPTH) -> list[str]:
        """The ids of ``numbers`` (-1 is none), without the query's own where that is the query itself."""
        return self.others(query, (self.names[i] for i in numbers if i >= 0))[:depth]

    def others(self, query: str, names: Iterable[str]) -> list[str]:
        """The ``names`` of documents without the query's own where that is the query itself."""
        return [name for name in names if name != query or name not in self.selves]


def vector_rankings(
    encoder: TextEncoder,
    collection: Collection,
    queries: Float[np.ndarray, "q d"],
    documents: Vectors,
    corpus: SearchCorpus,
    dim: int,
    depth: int = DEPTH,
) -> Rankings:
    """The best documents of each query by the first ``dim`` numbers of the vectors; never the query itself."""
    nearest = search(
        queries[:, :dim],
        (text for _, text in collection.documents()),
        documents,
        corpus.looked_at(depth),
        by_id(corpus.names),
        encoder.scoring,
    )
    return corpus.rankings(collection, nearest, depth)


class QuantizedSearch:
    """Searches of the documents of a collection by vectors in int8 and in bits."""

    def __init__(
        self, scoring: Scoring, collection: Collection, documents: Vectors, corpus: SearchCorpus, rescore: int
    ) -> None:
        self._scoring, self._collection, self._documents, self._corpus = scoring, collection, documents, corpus
        self._rescore, self._order = rescore, by_id(corpus.names)
        self._hashes: list[bytes] = []
        self.protocol: dict[str, str] = {}
        """A line for each system: how its vectors are compared."""

    def found(self, queries: Float[np.ndarray, "q d"], precision: VectorPrecision) -> Iterator[tuple[str, Nearest]]:
        """Yield the name of a system and the best documents of each query: of the search, and scored again."""
        scoring, depth = self._quantized(queries.shape[1], precision), self._corpus.looked_at()
        unit = self._scoring.rows(queries)
        texts = (text for _, text in self._collection.documents())
        # Those that are scored again begin with those that are not. A corpus may have fewer.
        wanted = min(depth * max(1, self._rescore), len(self._corpus.names))
        nearest = search(unit, texts, self._documents, wanted, self._order, scoring)
        yield precision, Nearest(nearest.numbers[:, :depth], nearest.scores[:, :depth])
        if self._rescore:
            again = rescored(nearest, unit, self._documents, self._names(), self._order, scoring)
            name = f"{precision} x{self._rescore}"
            self.protocol[name] = (
                f"x{self._rescore} = the first {depth * self._rescore} scored again by queries in float"
            )
            yield name, Nearest(again.numbers[:, :depth], again.scores[:, :depth])

    def _quantized(self, dim: int, precision: VectorPrecision) -> QuantizedScoring:
        # What a store has quantized is not normalized again: it would have other codes.
        normalize = self._scoring.normalize and self._documents.identity.dtype in FLOATS
        ranges = None
        if precision == "int8":
            ranges = self._documents.ranges or ranges_of(self._documents, self._names(), dim, Scoring(normalize), BLOCK)
            self.protocol[precision] = f"int8 = integer products, ranges of {ranges.count} documents"
        else:
            self.protocol[precision] = "binary = Hamming distance of signs"
        return QuantizedScoring(normalize, None, precision, dim, ranges)

    def _names(self) -> list[bytes]:
        """The hash of the text of each document."""
        if not self._hashes:
            with synchronize_errors(patient=True):
                self._hashes = [text_hash(text) for _, text in self._collection.documents()]
        return self._hashes


def search(
    queries: Float[np.ndarray, "q d"],
    texts: Iterator[str],
    store: Vectors,
    k: int,
    order: Int[np.ndarray, " n"],
    scoring: Scoring,
) -> Nearest:
    """The ``k`` best texts of each query, alike on every rank. Collective.

    Blocks of texts are dealt to the ranks in turn.

    Args:
        queries: their rows; those of the texts are cut to the same number of columns.
        texts: all of them are in the store.
        store: their rows.
        k: how many.
        order: for each text its place among equal scores.
        scoring: the way in which rows are compared.
    """
    dim = queries.shape[1]
    best = scoring.best(scoring.rows(queries), k, order)
    with synchronize_errors(patient=True):
        for number, hashes in enumerate(batched(map(text_hash, texts), BLOCK)):
            # Blocks in turn, by number: which rank scores a block does not change a score.
            if number % world_size() == rank():
                rows = store.vectors(hashes)[:, :dim]
                best.update(number * BLOCK, scoring.rows(rows))
    return best.result()


def bm25_rankings(collection: Collection, corpus: SearchCorpus, depth: int = DEPTH) -> Rankings:
    """Rankings by BM25; see `Bm25Index`."""
    index = Bm25Index.of(text for _, text in collection.documents())
    order, rankings = by_id(corpus.names), []
    for name, query in collection.queries:
        scores = index.scores(query)
        # Equal scores are ordered by id, as in `TopK`.
        best = np.lexsort((order, -scores))[: depth + 1]
        rankings.append(corpus.without_self(name, (i for i in best.tolist() if scores[i] > 0), depth))
    return rankings


def fused(first: Rankings, second: Rankings) -> Rankings:
    """The rankings of two systems fused by reciprocal ranks; equal scores ordered by id, descending."""
    rankings = []
    for both in zip(first, second, strict=True):
        places = {name: place for place, name in enumerate(sorted({*both[0], *both[1]}, reverse=True))}
        rankings.append([name for name, _ in reciprocal_ranks(both, places.__getitem__)][:DEPTH])
    return rankings
