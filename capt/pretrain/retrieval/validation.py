"""Retrieval at the validations of a training: BEIR folders, exact search, all ranks share the work."""

from __future__ import annotations

import hashlib
import heapq
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from capt.pretrain.base.distributed import all_reduce_sum, device, rank, synchronize_errors, world_size
from capt.pretrain.base.errors import DataError
from capt.pretrain.config.retrieval import METRICS, RetrievalSection
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Role, TextTask
from capt.pretrain.retrieval.data import Collection, Document, read_collections
from capt.pretrain.retrieval.encode import TOKENS, batches
from capt.pretrain.retrieval.metrics import DEPTH, mean_metrics, query_metrics
from capt.pretrain.retrieval.rankings import SearchCorpus
from capt.pretrain.retrieval.search import BLOCK, Scoring, by_id

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Texts:
    """Texts as ids, in batches, which are the same on any number of ranks."""

    ids: list[list[int]]
    batches: list[list[int]]

    @classmethod
    def of(cls, task: TextTask, texts: Sequence[str], role: Role) -> _Texts:
        ids = task.text_ids(texts, role)
        lengths = list(map(len, ids))
        # The index breaks ties, so that batches are alike on all ranks.
        order = sorted(range(len(ids)), key=lambda i: (-lengths[i], i))
        return cls(ids, list(batches(order, lengths, TOKENS[device().type])))

    def own(self, of: int) -> list[int]:
        """The texts of rank ``of``, in the order of its batches."""
        return [i for batch in self.batches[of :: world_size()] for i in batch]

    def vectors(self, task: TextTask, engines: Mapping[str, Engine]) -> Float[Tensor, "n d"]:
        """The vectors of this rank's texts. All ranks make the same number of passes: ZeRO 3 gathers in each."""
        rows = []
        for start in range(0, len(self.batches), world_size()):
            mine = start + rank()
            # A rank without a batch of its own goes through the last one again, and drops the rows.
            batch = self.batches[min(mine, len(self.batches) - 1)]
            found = task.text_vectors(engines, [self.ids[i] for i in batch])
            rows.append(found.float() if mine < len(self.batches) else found.float()[:0])
        return torch.cat(rows)


@dataclass(frozen=True)
class _Set:
    collection: Collection
    corpus: SearchCorpus
    queries: _Texts
    documents: _Texts
    teacher: Mapping[str, float] | None = None
    """The figures of a teacher's vectors, where the task has them of all texts."""

    def figures(self, task: TextTask, engines: Mapping[str, Engine]) -> dict[str, float]:
        """The means over the queries, equal on all ranks; as `capt.pretrain.retrieval.evaluate` has them."""
        own = self.queries.vectors(task, engines)
        queries = own.new_zeros((len(self.queries.ids), own.shape[1]), dtype=torch.float32)
        # Each rank knows the vectors of its own queries; the others are zeros until they are summed.
        queries[self.queries.own(rank())] = own
        sides = [self.documents.own(each) for each in range(world_size())]
        # Documents are numbered rank by rank, as their vectors lie; ties are still broken by id.
        order = [i for side in sides for i in side]
        scoring = Scoring(similarity=task.similarity)
        best = scoring.best(
            scoring.rows(all_reduce_sum(queries).cpu().numpy()),
            DEPTH + bool(self.corpus.selves),
            by_id(self.corpus.names)[order],
        )
        # The vectors stay on their rank: only the best of each query travel.
        first = sum(map(len, sides[: rank()]))
        rows: Float[np.ndarray, "n d"] = scoring.rows(self.documents.vectors(task, engines).cpu().numpy())
        for start in range(0, len(rows), BLOCK):
            best.update(first + start, rows[start : start + BLOCK])
        numbers: Int[np.ndarray, "q k"] = best.result().numbers
        return self.measured(np.where(numbers >= 0, np.array(order)[numbers], -1))

    def measured(self, found: Int[np.ndarray, "q k"]) -> dict[str, float]:
        """The figures of the numbers of the documents that were found for each query."""
        figures = [
            query_metrics(self.corpus.without_self(name, row), self.collection.judged[name])
            for (name, _), row in zip(self.collection.queries, found.tolist(), strict=True)
        ]
        return {name: value for name, value in mean_metrics(figures).items() if value is not None}

    def of_teacher(
        self, rows: Callable[[Sequence[str], Role], Float[np.ndarray, "n e"] | None]
    ) -> dict[str, float] | None:
        """The figures of a teacher's vectors of all texts; None where one of them has none."""
        queries = rows([text for _, text in self.collection.queries], "query")
        documents = rows([text for _, text in self.collection.documents()], "document")
        if queries is None or documents is None:
            return None
        scoring = Scoring()
        best = scoring.best(scoring.rows(queries), DEPTH + bool(self.corpus.selves), by_id(self.corpus.names))
        # Each rank brings blocks of its own: `result` merges what all have seen.
        for start in range(rank() * BLOCK, len(documents), world_size() * BLOCK):
            best.update(start, scoring.rows(documents[start : start + BLOCK]))
        return self.measured(best.result().numbers)


class RetrievalValidation:
    """The folders of ``validate.retrieval``, read once and measured at validations.

    Args:
        section: which folders, and how much of each.

    Raises:
        DataError: a folder cannot be used.
    """

    def __init__(self, section: RetrievalSection) -> None:
        self._section = section
        with synchronize_errors(patient=True):
            self._parts = [part_of(_one(path, section.split), section) for path in section.folders]
        self._sets: list[_Set] = []

    def is_due(self, step: int, last: int) -> bool:
        """Return whether the validation after ``step`` steps has these figures; that of the last step always has."""
        return self._section.every is None or step % self._section.every == 0 or step >= last

    def measure(self, task: TextTask, engines: Mapping[str, Engine]) -> dict[str, float]:
        """The figures, equal on all ranks; see `RetrievalSection.metric_names`. Collective."""
        begin, is_first = time.monotonic(), not self._sets
        with synchronize_errors(patient=True):
            # Tokenized at the first validation, and kept for all others.
            self._sets = self._sets or [self._tokenized(task, part) for part in self._parts]
        each = {one.collection.name: one.figures(task, engines) for one in self._sets}
        if rank() == 0 and is_first:
            texts = sum(len(one.queries.ids) + len(one.documents.ids) for one in self._sets)
            logger.info("validate.retrieval: %s texts in %.1f s", f"{texts:,}", time.monotonic() - begin)
        report = {name: sum(figures[name] for figures in each.values()) / len(each) for name in METRICS}
        if len(each) > 1:
            report |= {f"{name}/{of}": figures[name] for of, figures in each.items() for name in METRICS}
        return report | self._reached(report)

    def _reached(self, report: Mapping[str, float]) -> dict[str, float]:
        """The teacher's own figures, and the share of its nDCG@10 that is reached; nothing without a teacher."""
        theirs = [one.teacher for one in self._sets if one.teacher is not None]
        if len(theirs) < len(self._sets) or not theirs:
            return {}
        own = {name: sum(figures[name] for figures in theirs) / len(theirs) for name in METRICS}
        found = {f"teacher/{name}": value for name, value in own.items()}
        if not own["ndcg@10"]:
            return found
        share = report["ndcg@10"] / own["ndcg@10"]
        if rank() == 0:
            logger.info(
                "validate.retrieval: nDCG@10 %.4f, the teacher's %.4f: %.1f%% of the teacher is reached",
                report["ndcg@10"], own["ndcg@10"], 100 * share,
            )  # fmt: skip
        return {**found, "teacher/reached": share}

    def _tokenized(self, task: TextTask, part: Collection) -> _Set:
        documents = [text for _, text in part.documents()]
        made = _Set(
            part,
            SearchCorpus.of(part),
            _Texts.of(task, [text for _, text in part.queries], "query"),
            _Texts.of(task, documents, "document"),
        )
        rows = getattr(task, "teacher_rows", None)
        return made if rows is None else replace(made, teacher=made.of_teacher(rows))


def _one(path: Path, split: str | None) -> Collection:
    (collection,) = read_collections(path, split)
    return collection


def part_of(collection: Collection, section: RetrievalSection) -> Collection:
    """The queries and documents of a data set that ``section`` leaves, in memory, and the same at every call.

    Queries with a relevant document are taken in the order of the hashes of their ids. Every document that is judged
    for one of them is kept, and others by hash until the corpus is full. A query whose judged documents find no room
    ends the choice.

    Raises:
        DataError: the judged documents of the first query are more than ``documents``.
    """
    judged = collection.judged
    answerable = [each for each in collection.queries if max(judged[each[0]].values()) > 0]
    kept: list[Document] = []
    needed: set[str] = set()
    # By hash: the choice does not depend on the order of the file, and a larger number keeps the same queries.
    for name, text in sorted(answerable, key=lambda each: _place(each[0])):
        more = needed | judged[name].keys()
        if len(kept) == section.queries or len(more) > section.documents:
            break
        kept.append((name, text))
        needed = more
    if not kept:
        raise DataError(
            f"{collection.name}: more than validate.retrieval.documents {section.documents} are judged for one query; "
            "allow more"
        )
    names = {name for name, _ in kept}
    chosen: dict[str, str] = {}
    others: list[tuple[int, str, str]] = []  # a heap with the largest place on top
    total = 0
    for name, text in collection.documents():
        total += 1
        if name in needed:
            chosen[name] = text
        elif len(needed) + len(others) < section.documents:
            # The documents of the smallest hashes, in one pass: the heap holds the largest of them on top.
            heapq.heappush(others, (-_place(name), name, text))
        elif others:
            heapq.heappushpop(others, (-_place(name), name, text))
    chosen |= {name: text for _, name, text in others}
    documents = [(name, chosen[name]) for name in sorted(chosen)]
    if rank() == 0:
        logger.info(
            "validate.retrieval: %s of %s queries and %s of %s documents of %s",
            *(f"{number:,}" for number in (len(kept), len(answerable), len(documents), total)), collection.name,
        )  # fmt: skip
    return replace(
        collection, documents=lambda: iter(documents), queries=[each for each in collection.queries if each[0] in names]
    )


def _place(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8], "big")
