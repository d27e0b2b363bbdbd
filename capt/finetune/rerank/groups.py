"""Queries with their candidates: rows of pairs or of grades as groups, what a visit draws of them, and their tokens."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int64

from capt.finetune.batches import Batch, TextInputs, TextRows
from capt.finetune.encoding import join_pairs
from capt.finetune.order import RowNumbers
from capt.finetune.rerank.config import RerankData, RerankJob
from capt.finetune.rerank.losses import LOSSES
from capt.pretrain.base import distributed
from capt.pretrain.base.errors import DataError, counted
from capt.pretrain.base.randomness import stream_key
from capt.pretrain.pairs.draws import any_of
from capt.pretrain.pairs.sources import Lists, SourceRows
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)

Numbers = Int64[np.ndarray, " _"]


@dataclass(frozen=True)
class CandidateList:
    """Candidates of some queries, those of a query one after another.

    Attributes:
        groups: which of the queries each belongs to, from 0.
        queries: number of the query's text.
        documents: number of the document's text.
        positive: whether it is a positive.
        gains: its grade; where rows have none 1 of a positive, 0 of a negative.
        teacher: a teacher's score; nan where there is none.
        lengths: tokens of the pair.
    """

    groups: Numbers
    queries: Numbers
    documents: Numbers
    positive: Bool[np.ndarray, " _"]
    gains: Float[np.ndarray, " _"]
    teacher: Float[np.ndarray, " _"]
    lengths: Numbers

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, places: Numbers) -> CandidateList:
        """Some of them."""
        return CandidateList(*(values[places] for values in vars(self).values()))


class Groups:
    """The queries of a split, each with its candidates, as training draws them.

    Args:
        rows: what is stored.
        job: how many are drawn.
        tokenizer: of the encoder.
        length: tokens of a pair at most, special tokens included.
        types: whether the encoder reads token types.
        is_graded: whether the scores of the candidates are grades of the rows.
    """

    def __init__(
        self, rows: SourceRows, job: RerankJob, tokenizer: TextTokenizer, length: int, *, types: bool, is_graded: bool
    ) -> None:
        self.rows, self.is_graded = rows, is_graded
        self._data, self._seed = job.data, job.run.seed
        self._tokenizer, self._length, self._types = tokenizer, length, types
        numbers = np.arange(len(rows))
        data = job.data
        counts = np.minimum(rows.positives.counts(numbers), data.positives)
        counts = counts + np.minimum(rows.negatives.counts(numbers), data.negatives)
        documents = (self.rows.documents.lengths(self._every(numbers)[1]) - 2).astype(np.float64)
        owners = self._every(numbers)[0]
        mean = np.bincount(owners, documents, len(rows)) / np.bincount(owners, minlength=len(rows))
        self._counts = counts
        pair = self._joined(rows.queries.lengths(rows.query) - 2, np.ceil(mean).astype(np.int64))
        self._lengths: Numbers = counts * pair

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Numbers:
        """Tokens of the candidates of each query in a step, about."""
        return self._lengths

    @property
    def candidates(self) -> float:
        """Candidates of a query in a step, in the mean."""
        return float(self._counts.mean())

    @property
    def texts(self) -> Iterator[bytes]:
        """The tokens of each query."""
        for tokens in self.rows.queries.tokens(self.rows.query):
            yield tokens.tobytes()

    def draw(self, rows: RowNumbers, visits: Numbers) -> CandidateList:
        """The candidates of some queries in a visit of each, counted from 0; a pure function of both and the seed."""
        source, data = self.rows, self._data
        begin = stream_key("rerank/visit", self._seed) % 2**31 + rows
        number = np.minimum(source.positives.counts(rows), data.positives)
        positives = source.positives.places(rows, begin + visits * number, number)
        fewer = np.minimum(source.negatives.counts(rows), data.negatives)
        if data.draw == "random":
            negatives = any_of(source.negatives, rows, visits, fewer, stream_key("rerank/draw", self._seed))
        else:
            negatives = source.negatives.places(rows, begin + visits * fewer, fewer)
        return self._candidates(rows, (positives, number), (negatives, fewer))

    def every(self, rows: RowNumbers) -> CandidateList:
        """All candidates of some queries."""
        lists = (self.rows.positives, self.rows.negatives)
        both = [(each.places(rows, np.zeros_like(rows), each.counts(rows)), each.counts(rows)) for each in lists]
        return self._candidates(rows, *both)

    def _every(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """The owner and the number of every document of some rows."""
        source = self.rows
        owners = [np.repeat(rows, each.counts(rows)) for each in (source.positives, source.negatives)]
        return np.concatenate(owners), np.concatenate([source.positives.values, source.negatives.values])

    def _candidates(
        self, rows: Numbers, positives: tuple[Numbers, Numbers], negatives: tuple[Numbers, Numbers]
    ) -> CandidateList:
        """The candidates at places of both lists, and their number of each row."""
        source = self.rows
        owners = np.concatenate([np.repeat(np.arange(len(rows)), number) for _, number in (positives, negatives)])
        order = np.argsort(owners, kind="stable")
        owners = owners[order]
        places = positives[0], negatives[0]
        lists = ((source.positives, source.positive_scores), (source.negatives, source.negative_scores))
        documents = np.concatenate([each.values[at] for (each, _), at in zip(lists, places, strict=True)])[order]
        teacher = np.concatenate([
            np.full(len(at), np.nan) if scores is None else scores[at].astype(np.float64)
            for (_, scores), at in zip(lists, places, strict=True)
        ])[order]  # fmt: skip
        positive = order < len(places[0])
        queries = source.query[rows[owners]]
        lengths = self._joined(source.queries.lengths(queries) - 2, source.documents.lengths(documents) - 2)
        gains = teacher if self.is_graded else positive.astype(np.float64)
        return CandidateList(owners, queries, documents, positive, gains, teacher, lengths)

    def _joined(self, queries: Numbers, documents: Numbers) -> Numbers:
        """Tokens of pairs of texts of these lengths."""
        found: Numbers = np.minimum(queries + documents + self._tokenizer.pair.added, self._length)
        return found

    def inputs(self, candidates: CandidateList) -> TextInputs:
        """The tokens of the pairs, padded to the longest of them."""
        # 1:-1: each text is stored between `<s>` and `</s>`.
        queries = [text[1:-1] for text in self.rows.queries.tokens(candidates.queries)]
        documents = [text[1:-1] for text in self.rows.documents.tokens(candidates.documents)]
        encoded = join_pairs(queries, documents, self._tokenizer.pair, self._length, types=self._types)
        rows = TextRows(encoded, None, self._tokenizer.special.pad, types=self._types)
        return rows.batch(np.arange(len(candidates))).inputs


class CandidateRows:
    """Every candidate of held-out queries as a row (`capt.finetune.batches.RowSet`)."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.candidates = groups.every(np.arange(len(groups)))
        self.is_scored = not groups.is_graded and not np.isnan(self.candidates.teacher).any()
        self.queries = len(groups)

    @property
    def texts(self) -> Iterator[bytes]:
        """The tokens of each query."""
        return self._groups.texts

    @property
    def lengths(self) -> Numbers:
        """Tokens of each pair."""
        return self.candidates.lengths

    def __len__(self) -> int:
        return len(self.candidates)

    def batch(self, numbers: RowNumbers) -> Batch[TextInputs]:
        """The pairs with these numbers."""
        return Batch(self._groups.inputs(self.candidates.take(numbers)))


# What is stored, as groups.


def grouped(rows: SourceRows, data: RerankData) -> SourceRows:
    """Pairs with grades as queries with candidates, whose scores are the grades; other rows as they are."""
    if rows.scores is None:
        return rows
    scores = np.asarray(rows.scores, dtype=np.float64)
    # A query comes in several rows, in any order. A pair that comes twice has the grade of its last row.
    document = rows.positives.values[rows.positives.starts[:-1]]
    order = np.lexsort((np.arange(len(rows)), document, rows.query))
    last = np.append((np.diff(rows.query[order]) != 0) | (np.diff(document[order]) != 0), True)
    order = order[last]
    query, document, scores = rows.query[order], document[order], scores[order]
    names, number = np.unique(query, return_inverse=True)
    positive = scores > data.positive_above
    lists, given = [], []
    for mask in (positive, ~positive):
        starts = np.concatenate([[0], np.cumsum(np.bincount(number[mask], minlength=len(names)))]).astype(np.int64)
        # Negatives of the highest grades first: their ranks are those of the grades.
        best = np.lexsort((-scores[mask], number[mask]))
        lists.append(Lists(document[mask][best], starts))
        given.append(scores[mask][best])
    return replace(
        rows, query=names, positives=lists[0], negatives=lists[1], scores=None, positive_scores=given[0],
        negative_scores=given[1], digest=_digest(rows.digest, "grades", data.positive_above), index=None,
    )  # fmt: skip


def usable(
    rows: SourceRows,
    job: RerankJob,
    what: str,
    ranks: tuple[int, int | None] = (0, None),
    *,
    needs_teacher: bool = True,
) -> SourceRows:
    """The rows without negatives of other ``ranks``, or that are known positives of their query, and without queries
    that the loss cannot use.

    Raises:
        DataError: no query is left, or the loss needs a teacher's scores, which are missing (``needs_teacher``).
    """
    loss = LOSSES[job.loss.type]
    numbers = np.arange(len(rows))
    counts = rows.negatives.counts(numbers)
    owners = np.repeat(numbers, counts)
    rank = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    first, end = ranks
    in_range = (rank >= first) & (rank < (len(owners) if end is None else end))
    kept = in_range & ~_known(rows, owners)
    scores = rows.negative_scores
    starts = np.concatenate([[0], np.cumsum(np.bincount(owners[kept], minlength=len(rows)))]).astype(np.int64)
    found = replace(
        rows, negatives=Lists(rows.negatives.values[kept], starts),
        negative_scores=None if scores is None else np.asarray(scores)[kept],
        digest=_digest(rows.digest, ranks, int(kept.sum())),
    )  # fmt: skip
    if needs_teacher and "teacher" in loss.needs:
        _require_scores(found, job, what)
    lacking = {
        "a positive": ("positive" in loss.needs) & (found.positives.counts(numbers) == 0),
        "a negative": ("negative" in loss.needs) & (found.negatives.counts(numbers) == 0),
    }
    if not loss.needs & {"positive", "negative"}:
        lacking["a candidate"] = found.positives.counts(numbers) + found.negatives.counts(numbers) == 0
    whole = ~np.logical_or.reduce(list(lacking.values()))
    if not whole.any():
        raise _none_has(what, next(name for name, mask in lacking.items() if mask.any()), job)
    for name, mask in lacking.items():
        if mask.any() and distributed.rank() == 0:
            logger.warning(
                "%s: %s without %s left out, which teach nothing by loss.type=%s",
                what, counted(int(mask.sum()), "query"), name, job.loss.type,
            )  # fmt: skip
    return found if whole.all() else _rows(found, numbers[whole])


def require_both(rows: SourceRows, job: RerankJob) -> None:
    """Raise ``DataError`` where all candidates that are trained on are positives, or all negatives, and the loss knows
    no more of them."""
    if "teacher" not in LOSSES[job.loss.type].needs:
        for name, lists in (("a positive", rows.positives), ("a negative", rows.negatives)):
            if not len(lists.values):
                raise _none_has("data.train", name, job)


def _none_has(what: str, name: str, job: RerankJob) -> DataError:
    hint = ""
    if name == "a negative":
        hint = ": capt mine writes hard negatives, data.columns='{score: NAME}' names grades; data.ranks may leave none"
    return DataError(f"{what}: no query has {name} among its candidates, which loss.type={job.loss.type} needs{hint}")


def some_queries(rows: SourceRows, numbers: Numbers) -> SourceRows:
    """Some queries of a split."""
    return rows if len(numbers) == len(rows) else _rows(rows, numbers)


def _rows(rows: SourceRows, numbers: Numbers) -> SourceRows:
    """Some rows, with their lists and scores."""
    lists, scores = [], []
    both = ((rows.positives, rows.positive_scores), (rows.negatives, rows.negative_scores))
    for each, given in both:
        places = each.places(numbers, np.zeros_like(numbers), each.counts(numbers))
        starts = np.concatenate([[0], np.cumsum(each.counts(numbers))]).astype(np.int64)
        lists.append(Lists(each.values[places], starts))
        scores.append(None if given is None else np.asarray(given)[places])
    return replace(
        rows, query=rows.query[numbers], positives=lists[0], negatives=lists[1], positive_scores=scores[0],
        negative_scores=scores[1], digest=_digest(rows.digest, len(numbers)),
    )  # fmt: skip


def _known(rows: SourceRows, owners: Numbers) -> Bool[np.ndarray, " k"]:
    """The negatives that another row has as a positive of the same query."""
    known = rows.known
    queries = rows.queries.keys[rows.query[owners]]
    documents = rows.documents.keys[rows.negatives.values]
    of_pairs = np.repeat(known.queries, np.diff(known.starts)).astype(np.int64)
    # A pair of keys as one value, so that they are looked up together.
    pairs = np.stack([of_pairs, known.documents], 1).astype(np.int64)
    asked = np.stack([queries, documents], 1).astype(np.int64)
    as_one = np.dtype([("query", np.int64), ("document", np.int64)])
    left, right = (np.ascontiguousarray(each).view(as_one)[:, 0] for each in (asked, pairs))
    found: np.ndarray = np.isin(left, right)
    return found


def _require_scores(rows: SourceRows, job: RerankJob, what: str) -> None:
    given = (rows.positive_scores, rows.negative_scores)
    if any(scores is None or bool(np.isnan(scores).any()) for scores in given):
        raise DataError(
            f"{what}: loss.type={job.loss.type} needs a teacher's score of every candidate (pos_scores, neg_scores); "
            "capt mine --cross-encoder writes them, or set loss.type=infonce"
        )


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
