"""A search over one's own documents: an index in a folder, which is built from files and answers questions."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, did_you_mean, shown
from capt.pretrain.base.files import is_utf8
from capt.pretrain.retrieval.bm25 import Bm25Index
from capt.pretrain.retrieval.encoders import TextEncoder, load_text_encoder
from capt.pretrain.retrieval.fusion import reciprocal_ranks
from capt.pretrain.retrieval.graph import VectorGraph
from capt.pretrain.retrieval.index_build import BuildOptions as BuildOptions
from capt.pretrain.retrieval.index_build import build_index as build_index
from capt.pretrain.retrieval.index_files import GRAPH, PASSAGES, VECTORS, WORDS, Generation, read_search_record
from capt.pretrain.retrieval.metrics import DEPTH
from capt.pretrain.retrieval.options import EncoderOptions
from capt.pretrain.retrieval.rerankers import RERANKED_HITS, PairScorer, ordered_by_score
from capt.pretrain.retrieval.search import BLOCK, TopK, pair_scores, unit_rows

logger = logging.getLogger(__name__)

MODES = ("hybrid", "dense", "bm25")
_AT_ONCE = 32
"""Queries that are encoded together."""
_MOST_NEAR = 16
"""Passages that a graph is asked for, for each document that is wanted."""

Ranked = list[tuple[int, float]]
"""Numbers of passages, each of another document, and their scores; the best first."""


@dataclass(frozen=True)
class Hit:
    """A document that was found, by the passage that was found best.

    Attributes:
        document: its id.
        file: where it is from.
        line: the first line of the passage there, or its row.
        passage: the text of the passage.
        number: which passage of the document it is, from 1.
        score: higher is better; what it is depends on the mode.
        fields: the other cells of the row.
    """

    document: str
    file: str
    line: int
    passage: str
    number: int
    score: float
    fields: dict[str, str]

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    def as_json(self) -> dict[str, Any]:
        """The hit as ``capt search --json`` prints it."""
        return {**asdict(self), "place": self.place}


class SearchIndex:
    """An index that answers questions; see `open`. The model is loaded with the first question that needs it."""

    def __init__(self, folder: Path, generation: Generation, model: Path) -> None:
        self.folder, self._generation, self._model = folder, generation, model
        self.record = generation.record
        # All files are mapped here: a later generation may take their place while this object lives.
        self.vectors, self._words = generation.map_vectors(), Bm25Index.load(generation.folder / WORDS)
        self._graph = VectorGraph.load(generation.folder / GRAPH) if generation.has_graph else None
        self._chosen: dict[tuple[tuple[str, str], ...], Bool[np.ndarray, " n"]] = {}

    @classmethod
    def open(cls, folder: Path | str, model: Path | None = None) -> SearchIndex:
        """Open the index that `build_index` has written into ``folder``.

        Args:
            folder: of the index.
            model: where the encoder is now, if it has moved.

        Raises:
            DataError: no index, or a damaged one.
        """
        folder = Path(folder)
        while True:
            record = read_search_record(folder)
            try:
                return cls(folder, Generation.map(folder, record), model or Path(record.model))
            except (DataError, FileNotFoundError):
                if read_search_record(folder) == record:  # no later generation has taken its place meanwhile
                    raise

    def __len__(self) -> int:
        return self.record.documents

    def documents(self) -> Iterator[dict[str, Any]]:
        """Yield the id, the place and the fields of each document."""
        return self._generation.documents()

    def passages(self) -> Iterator[dict[str, Any]]:
        """Yield the passages, with their documents, places and fields, in the order of ``vectors``."""
        return map(self._generation.passage, range(self.record.passages))

    def copy_to(self, folder: Path) -> None:
        """Copy the passages and their vectors into ``folder``, as ``passages.jsonl`` and ``vectors.npy``."""
        for name in (PASSAGES, VECTORS):
            shutil.copyfile(self._generation.folder / name, folder / name)

    @cached_property
    def encoder(self) -> TextEncoder:
        """The encoder of the passages, and of questions. Raises ``CheckpointError``: it is another one by now."""
        encoder = load_text_encoder(self._model, EncoderOptions(**self.record.encoder))
        if asdict(encoder.identity("document", self.record.identity["dtype"])) != self.record.identity:
            raise CheckpointError(
                f"{self._model}: not the model that {self.folder} was built with; name that one (--model), or build "
                "the index again with this one"
            )
        return encoder

    def search(
        self,
        queries: Sequence[str],
        top: int = 10,
        mode: str = "hybrid",
        *,
        where: Mapping[str, str] | None = None,
        reranker: PairScorer | None = None,
    ) -> list[list[Hit]]:
        """The best documents for each of ``queries``.

        Args:
            queries: questions.
            top: documents for each of them.
            mode: ``dense`` (vectors), ``bm25`` (words), or ``hybrid``: the first 100 of both, fused by reciprocal
                ranks. A document has the rank of its best passage.
            where: search only documents that have these values in these fields; ``file`` is one.
            reranker: its scores order the first 50 documents, or ``top`` of them, anew.

        Raises:
            ConfigError: no such mode or field.
            DataError: a question is empty, or not text, such as bytes of another encoding than UTF-8.
            CheckpointError: see `encoder`.
        """
        if mode not in MODES:
            raise ConfigError(f"--mode {mode}: choose from {', '.join(MODES)}")
        if top < 1:
            raise ConfigError(f"--top {top}: 1 or more")
        if wrong := [query for query in queries if not is_utf8(query)]:
            raise DataError(f"the question {shown(wrong[0])} is not UTF-8 text; write it in UTF-8")
        if any(not query.strip() for query in queries):
            raise DataError("a question is empty; write what is asked")
        asked = max(top, RERANKED_HITS) if reranker is not None else top
        depth, chosen = max(DEPTH, asked), self._where(where or {})
        rankings: list[list[Ranked]] = [[] for _ in queries]
        if mode != "bm25":
            for ranking, found in zip(rankings, self._by_vectors(queries, depth, chosen), strict=True):
                ranking.append(found)
        if mode != "dense":
            for query, ranking in zip(queries, rankings, strict=True):
                ranking.append(self._by_words(query, depth, chosen))
        fused = [self._fused(ranking)[:asked] if mode == "hybrid" else ranking[0][:asked] for ranking in rankings]
        hits = [[self._hit(number, score) for number, score in each] for each in fused]
        if reranker is not None:
            hits = [_reranked(reranker, query, each) for query, each in zip(queries, hits, strict=True)]
        return [each[:top] for each in hits]

    def _hit(self, number: int, score: float) -> Hit:
        row = self._generation.passage(number)
        return Hit(row["id"], row["file"], row["line"], row["text"], row["passage"], score, row["fields"])

    def _where(self, where: Mapping[str, str]) -> Bool[np.ndarray, " n"] | None:
        """Tell which passages are of documents that have the values ``where``; None = all."""
        if not where:
            return None
        known = ["file", *self.record.fields]
        for name in where:
            if name not in known:
                raise ConfigError(f"--where {name}: the documents have no such field; {did_you_mean(name, known)}")
        key = tuple(sorted(where.items()))
        if key not in self._chosen:
            rows = ({**row["fields"], "file": row["file"]} for row in self._generation.documents())
            documents = np.array([all(row.get(name) == value for name, value in key) for row in rows], dtype=bool)
            self._chosen[key] = documents[self._generation.document]
        return self._chosen[key]

    def _by_vectors(self, queries: Sequence[str], depth: int, chosen: Bool[np.ndarray, " n"] | None) -> list[Ranked]:
        rows = self._encoded(queries)
        numbers = np.arange(self.record.passages) if chosen is None else np.flatnonzero(chosen)
        # More passages than documents are asked for where a document has several.
        k = min(len(numbers), depth if self.record.passages == self.record.documents else 4 * depth)
        while True:
            found = [self._distinct(*each, depth) for each in self._nearest(rows, numbers, k)]
            is_enough = all(len(each) == depth for each in found)
            # A graph is not asked for all: its answers would be no better than those of the exact search, and later.
            if k == len(numbers) or is_enough or (self._graph is not None and k >= _MOST_NEAR * depth):
                return found
            k = min(len(numbers), 4 * k)

    def _encoded(self, queries: Sequence[str]) -> Float[np.ndarray, "q d"]:
        parts = [
            self.encoder.encode(queries[start : start + _AT_ONCE], "query")
            for start in range(0, len(queries), _AT_ONCE)
        ]
        rows = np.concatenate(parts) if parts else np.zeros((0, self.encoder.dimension), dtype=np.float32)
        return unit_rows(rows) if self.record.similarity == "cosine" else rows

    def _nearest(
        self, queries: Float[np.ndarray, "q d"], numbers: Int[np.ndarray, " m"], k: int
    ) -> Iterator[tuple[Int[np.ndarray, " k"], Float[np.ndarray, " k"]]]:
        """Yield the ``k`` best of the passages ``numbers`` for each query, with their scores."""
        if not k:
            yield from ((numbers, np.zeros(0, dtype=np.float32)) for _ in queries)
            return
        if self._graph is not None and len(numbers) == self.record.passages:
            yield from self._near(queries, self._graph.nearest(queries, k))
            return
        order = np.empty(len(numbers), dtype=np.int64)
        order[np.argsort(self._generation.order[numbers])] = np.arange(len(numbers))
        best = TopK(queries, k, order)
        for first in range(0, len(numbers), BLOCK):
            block = numbers[first : first + BLOCK]
            # Passages in a row are a slice, which copies nothing but what is converted.
            part = slice(block[0], block[-1] + 1) if block[-1] - block[0] == len(block) - 1 else block
            best.update(first, np.array(self.vectors[part], dtype=np.float32))
        nearest = best.result()
        for row, scores in zip(nearest.numbers, nearest.scores, strict=True):
            found = row >= 0
            yield numbers[row[found]], scores[found]

    def _near(
        self, queries: Float[np.ndarray, "q d"], found: Int[np.ndarray, "q k"]
    ) -> Iterator[tuple[Int[np.ndarray, " k"], Float[np.ndarray, " k"]]]:
        """Yield what a graph has found for each query, by scores that are computed as those of the exact search."""
        for number, row in enumerate(found):
            there = row[row >= 0]
            rows = np.ascontiguousarray(self.vectors[there], dtype=np.float32)
            scores = pair_scores(queries, rows, np.full(len(there), number), np.arange(len(there)))
            best = np.lexsort((self._generation.order[there], -scores))
            yield there[best], scores[best]

    def _by_words(self, query: str, depth: int, chosen: Bool[np.ndarray, " n"] | None) -> Ranked:
        scores = self._words.scores(query)
        numbers = np.flatnonzero(scores > 0 if chosen is None else (scores > 0) & chosen)
        best = np.lexsort((self._generation.order[numbers], -scores[numbers]))
        return self._distinct(numbers[best], scores[numbers][best], depth)

    def _distinct(self, numbers: Int[np.ndarray, " n"], scores: Float[np.ndarray, " n"], depth: int) -> Ranked:
        """The first passages of the first ``depth`` documents."""
        seen: set[int] = set()
        found: Ranked = []
        for number, score in zip(numbers, scores, strict=True):
            document = int(self._generation.document[number])
            if document not in seen:
                seen.add(document)
                found.append((int(number), float(score)))
                if len(found) == depth:
                    break
        return found

    def _fused(self, rankings: Sequence[Ranked]) -> Ranked:
        """Fuse the ranks of documents; a document is shown by the passage of its better rank."""
        passages: dict[int, tuple[int, int]] = {}
        documents = [[int(self._generation.document[number]) for number, _ in ranking] for ranking in rankings]
        for ranking, names in zip(rankings, documents, strict=True):
            for rank, ((number, _), document) in enumerate(zip(ranking, names, strict=True)):
                best = passages.get(document)
                if best is None or rank < best[0]:
                    passages[document] = (rank, number)
        # Passages of a document are neighbours in this order.
        place = {document: int(self._generation.order[number]) for document, (_, number) in passages.items()}
        return [(passages[document][1], score) for document, score in reciprocal_ranks(documents, place.__getitem__)]


def _reranked(reranker: PairScorer, query: str, hits: Sequence[Hit]) -> list[Hit]:
    """Order hits by the scores of a reranker; equal ones stay as they are."""
    ordered = ordered_by_score(reranker, query, [hit.passage for hit in hits])
    return [Hit(**{**vars(hits[number]), "score": score}) for number, score in ordered]
