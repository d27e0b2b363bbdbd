"""Retrieval on held-out pairs: each query searches its document among all of them, and each document its query."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from capt.pretrain.base import distributed
from capt.pretrain.contrast.masks import KnownPairs
from capt.pretrain.contrast.metrics import PairAccumulator, alignment, first_direction, uniformity
from capt.pretrain.contrast.similarity import Similarity, blockwise, paired, product
from capt.pretrain.data.sampler import validation_samples
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.judgement import error_of
from capt.pretrain.pairs.known import Pairs, known_pairs
from capt.pretrain.pairs.losses import GROUP
from capt.pretrain.pairs.metric_names import RECALLS, RETRIEVAL, at_width, of_teacher
from capt.pretrain.pairs.module import PairModule
from capt.pretrain.pairs.sources import SourceRows, Teacher
from capt.pretrain.pairs.texts import padded
from capt.pretrain.registry import load_entry

logger = logging.getLogger(__name__)

_TIES = 1e-9
"""Cosines nearer than this are equal: float64 rounding of equal rows is 1e-15."""
_BLOCK = 1 << 22
"""Cosines in memory at a time."""


@dataclass(frozen=True)
class Pool:
    """Held-out pairs: the tokens of each query and of its first positive, and the keys of both texts."""

    queries: list[np.ndarray]
    documents: list[np.ndarray]
    query_keys: Int64[np.ndarray, " n"]
    document_keys: Int64[np.ndarray, " n"]
    scores: Float[np.ndarray, " n"]
    """Similarity of the two; nan where it is not known."""
    known: Pairs
    """Pairs of its queries and documents that belong together, by all held-out rows, in the pool or not."""
    vectors: tuple[Float[np.ndarray, "n e"], Float[np.ndarray, "n e"]] | None = None
    """A teacher's vectors of the queries and of the documents."""

    def __len__(self) -> int:
        return len(self.queries)


@dataclass(frozen=True)
class Pools:
    """Data of validation: pairs that belong together, and pairs with a score."""

    pairs: Pool | None = None
    scored: Pool | None = None
    alone: Pool | None = None
    """Texts that a teacher's vectors alone train; queries and documents are the same."""
    figures: Mapping[str, str] = field(default_factory=dict)
    """Figures of the scored pairs, by the losses of their sources (`PairLoss.figures`)."""

    def __bool__(self) -> bool:
        return any(pool is not None for pool in self.each())

    def each(self) -> tuple[Pool | None, ...]:
        """All pools."""
        return self.pairs, self.scored, self.alone

    def keys(self) -> dict[str, list[np.ndarray]]:
        """The keys of all held-out texts, by ``query`` and ``document``; empty without any."""
        pools = [pool for pool in self.each() if pool is not None]
        if not pools:
            return {}
        return {"query": [pool.query_keys for pool in pools], "document": [pool.document_keys for pool in pools]}


def pools_of(sources: Sequence[SourceRows], limit: int, teacher: Teacher | None = None) -> Pools:
    """The pools of some held-out sources, each of at most ``limit`` pairs, with the vectors of a ``teacher``."""
    alone = [rows for rows in sources if rows.is_alone]
    pairs = [rows for rows in sources if rows.scores is None and not rows.is_alone]
    scored = [rows for rows in sources if rows.scores is not None]
    figures = {name: path for rows in scored for name, path in rows.loss.figures.items()}
    pools = [pool_of(rows, limit, teacher) if rows else None for rows in (pairs, scored, alone)]
    return Pools(pools[0], pools[1], pools[2], figures)


def pool_of(sources: Sequence[SourceRows], limit: int, teacher: Teacher | None = None) -> Pool:
    """A pool of at most ``limit`` pairs, of every source as large a share of its rows as of the others."""
    total = sum(map(len, sources))
    queries: list[np.ndarray] = []
    documents: list[np.ndarray] = []
    keys: list[tuple[np.ndarray, np.ndarray]] = []
    scores: list[np.ndarray] = []
    vectors: list[tuple[np.ndarray, np.ndarray]] = []
    # Evenly spread over all sources, so that each has its share.
    chosen = np.arange(total) if total <= limit else np.arange(limit) * total // limit
    first = 0
    for source in sources:
        rows = chosen[(chosen >= first) & (chosen < first + len(source))] - first
        first += len(source)
        texts, positives = source.query[rows], source.positives.values[source.positives.starts[rows]]
        if source.draw is None:
            queries += source.queries.tokens(texts)
            documents += source.documents.tokens(positives)
        else:  # the same spans in every validation and in every run
            for side, views in zip(
                (queries, documents), source.spans(texts, rows, np.zeros_like(rows), 0), strict=True
            ):
                side += views
        keys.append((source.queries.keys[texts], source.documents.keys[positives]))
        if teacher is not None:
            given = source.vectors(teacher, "query", texts), source.vectors(teacher, "document", positives)
            vectors.append(given)
        scores.append(np.full(len(rows), np.nan, np.float32) if source.scores is None else source.scores[rows])
    query_keys, document_keys = (np.concatenate(each) for each in zip(*keys, strict=True))
    known = known_pairs([source.known for source in sources], query_keys, document_keys)
    return Pool(
        queries, documents, query_keys, document_keys,
        np.concatenate(scores), known,
        None if teacher is None else (np.concatenate([q for q, _ in vectors]), np.concatenate([d for _, d in vectors])),
    )  # fmt: skip


def in_any(keys: Int64[np.ndarray, " n"], others: Sequence[Int64[np.ndarray, " _"]]) -> Bool[np.ndarray, " n"]:
    """Return which keys are in one of several long arrays, which are read in pieces."""
    found = np.zeros(len(keys), dtype=bool)
    for values in others:
        for first in range(0, len(values), _BLOCK):
            found |= np.isin(keys, values[first : first + _BLOCK])
    return found


@torch.no_grad()
def validate(
    engine: Engine | PairModule, pools: Pools, temperature: float, micro: int, pad_id: int, widths: Sequence[int] = (),
    similarity: Similarity | None = None,
) -> dict[str, float]:  # fmt: skip
    """Loss, Recall@1 and MRR in both directions, alignment and spread, equal on all ranks.

    Beside each recall over whole vectors is its `standard_error`. ``loss/pairs`` is InfoNCE of each query against all
    documents of the pool at ``temperature``; it grows with the pool, as the ranks do. Known positives of a query
    (:mod:`capt.pretrain.pairs.known`) are not candidates for it. Of vectors cut to each of ``widths`` there are
    Recall@1 and MRR as well. Over the scored pairs there are the figures of their losses; ``spearman`` is the rank
    correlation of cosines and scores. A ``similarity`` takes the place of the cosine; rows are then no vectors, and
    have neither alignment nor spread. Where the pools have a teacher's vectors, ``teacher/cosine`` is the cosine to
    them in the mean over all texts, and ``teacher/cosine_p5`` its 5th percentile; of the pairs there are the teacher's
    own figures of retrieval as well, and the share of its recall that is reached.
    """
    report: dict[str, float] = {"validation_samples": 0.0}
    cosines_to: list[Tensor] = []
    if pools.alone is not None:
        _, _, _, found = _encoded(engine, pools.alone, micro, pad_id, unit=True)
        cosines_to += found[:1]  # both sides are the same
        report["validation_samples"] += len(pools.alone)
    if pools.pairs is not None:
        q, d, order, found = _encoded(engine, pools.pairs, micro, pad_id, unit=similarity is None)
        cosines_to += found
        compare = product if similarity is None else blockwise(similarity)
        samples = report["validation_samples"]
        report |= _retrieval_report(q, d, order, pools.pairs, temperature, widths, compare)
        report["validation_samples"] += samples
        if pools.pairs.vectors is not None:
            report |= _teacher_report(report, pools.pairs, temperature, q.device)
        if similarity is None:
            report |= {"alignment": alignment(q, d), "uniformity": uniformity(q), "first_direction": first_direction(q)}
    if pools.scored is not None:
        q, d, order, found = _encoded(engine, pools.scored, micro, pad_id, unit=similarity is None)
        cosines_to += found
        cosines = ((q * d).sum(1) if similarity is None else paired(similarity, q, d)).cpu().numpy()
        for name, path in pools.figures.items():
            function = load_entry(path, GROUP, f"the figure {name}", "MODULE:FUNCTION")
            report[name] = function(cosines, pools.scored.scores[order])
        report["validation_samples"] += len(pools.scored)
    if cosines_to:
        every = torch.cat(cosines_to)
        report |= {"teacher/cosine": float(every.mean()), "teacher/cosine_p5": float(every.quantile(0.05))}
    return report


def _teacher_report(
    report: Mapping[str, float], pool: Pool, temperature: float, device: torch.device
) -> dict[str, float]:
    """The teacher's own figures of retrieval on a pool, and the share of its recall that ``report`` has."""
    assert pool.vectors is not None
    q, d = (normalize(torch.from_numpy(rows).to(device).double(), dim=1) for rows in pool.vectors)
    figures = _retrieval_report(q, d, np.arange(len(pool)), pool, temperature, (), product)
    found = {of_teacher(name): figures[name] for name in RETRIEVAL}
    own = sum(figures[name] for name in RECALLS)
    return found | ({"teacher/reached": sum(report[name] for name in RECALLS) / own} if own else {})


def log_reached(report: Mapping[str, float], step: int) -> None:
    """Log how near the teacher is, by what `validate` has reported."""
    if "teacher/cosine" not in report or distributed.rank():
        return
    recall = ""
    if "teacher/reached" in report:
        own = report[of_teacher("recall/to_document")]
        recall = (
            f"; recall@1 {report['recall/to_document']:.3f} to documents, the teacher's {own:.3f}: "
            f"{report['teacher/reached']:.1%} of the teacher is reached"
        )
    logger.info(
        "step %d: cosine to the teacher %.4f, 5th percentile %.4f%s",
        step, report["teacher/cosine"], report["teacher/cosine_p5"], recall,
    )  # fmt: skip


def _retrieval_report(
    q: Tensor,
    d: Tensor,
    order: Int64[np.ndarray, " n"],
    pool: Pool,
    temperature: float,
    widths: Sequence[int],
    compare: Similarity,
) -> dict[str, float]:
    sides = [torch.from_numpy(keys[order]).to(q.device) for keys in (pool.query_keys, pool.document_keys)]
    pairs = torch.from_numpy(pool.known).to(q.device)
    known = [KnownPairs.of(sides[0], sides[1], pairs), KnownPairs.of(sides[1], sides[0], pairs.flip(1))]
    loss = pool_loss(q, d, known[0], temperature=temperature, compare=compare)
    report = {"loss/pairs": loss, "validation_samples": float(len(pool))}
    for width in (None, *widths):
        # A cut vector is no unit row any more.
        cut = [rows if width is None else normalize(rows[:, :width], dim=1) for rows in (q, d)]
        # Queries are compared with documents, whichever of them is looked for.
        ways = {"to_document": (0, 1, compare), "to_query": (1, 0, lambda d, q: compare(q, d).T)}
        for name, (a, b, way) in ways.items():
            for metric, value in retrieval(cut[a], cut[b], known[a], way).items():
                report[f"{metric}/{name}" if width is None else at_width(f"{metric}/{name}", width)] = value
    return report | {error_of(name): standard_error(report[name], len(pool)) for name in RECALLS}


def standard_error(share: float, count: int) -> float:
    """The standard error of a share of ``count`` queries.

    It is that of two more hits and two more misses (Agresti and Coull 1998), so that it is not 0 where all are found.
    """
    adjusted = (share * count + 2) / (count + 4)
    return math.sqrt(adjusted * (1 - adjusted) / (count + 4))


def _encoded(
    engine: Engine | PairModule, pool: Pool, micro: int, pad_id: int, *, unit: bool
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"], Int64[np.ndarray, " n"], list[Float[Tensor, " n"]]]:
    """The rows of the pool's queries and documents in float64 (``unit``: normalized), which pair each is, and the
    cosines of both to the vectors of a teacher, where the pool has them.
    """
    found, taught, device = PairAccumulator(), PairAccumulator(), distributed.device()
    world, rank = distributed.world_size(), distributed.rank()
    for numbers, valid in validation_samples(len(pool), micro, world, rank):
        texts = [padded([side[i] for i in numbers.tolist()], pad_id, device) for side in (pool.queries, pool.documents)]
        output = engine(texts, step=0)
        found.update(*(rows[:valid] for rows in output.rows))
        if pool.vectors is not None:
            taught.update(*(rows[:valid] for rows in output.taught))
    q, d = (normalize(rows.double(), dim=1) if unit else rows.double() for rows in found.gather())
    # Rank `r` has the pairs r, r + world, ...; `gather` puts the ranks one after another.
    order = np.concatenate([np.arange(first, len(pool), world) for first in range(world)])
    cosines = []
    if pool.vectors is not None:
        for rows, theirs in zip(taught.gather(), pool.vectors, strict=True):
            teacher = torch.from_numpy(theirs[order]).to(rows.device)
            # Of another width, where only the order of the texts is learnt, there is no cosine to it.
            if rows.shape[1] == teacher.shape[1]:
                cosines.append(cosine_similarity(rows.double(), teacher.double(), dim=1))
    return q, d, order, cosines


def rank_correlation(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> float:
    """Spearman's rho, equal values sharing their mean rank; 0 where one side has no two different values."""
    if len(np.unique(a)) < 2 or len(np.unique(b)) < 2:
        return 0.0
    return float(spearmanr(a, b).statistic)


def retrieval(
    queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"], known: KnownPairs, compare: Similarity = product
) -> dict[str, float]:
    """Recall@1 and the mean reciprocal rank of row ``i`` of ``keys`` for row ``i`` of ``queries``, by cosine.

    Rows that are known to belong to row ``i`` are not candidates for it. Among ``k`` equal cosines the right one counts
    as found in ``1 / k`` of all orders, and its rank is the middle one, so that the order of the rows does not matter.
    """
    hits = reciprocal = 0.0
    for rows, scores in _blocks(queries, keys, known, compare):
        own = scores[torch.arange(len(scores)), torch.arange(rows.start, rows.start + len(scores))][:, None]
        better = (scores > own + _TIES).sum(1)
        equal = ((scores - own).abs() <= _TIES).sum(1)  # itself included
        hits += float(((better == 0) / equal).sum())
        reciprocal += float((1 / (better + (equal + 1) / 2)).sum())
    return {"recall": hits / len(queries), "mrr": reciprocal / len(queries)}


def pool_loss(
    queries: Float[Tensor, "n d"], documents: Float[Tensor, "n d"], known: KnownPairs, *, temperature: float,
    compare: Similarity = product,
) -> float:  # fmt: skip
    """InfoNCE of each query against all documents that are its candidates, in the mean."""
    total = 0.0
    for rows, scores in _blocks(queries, documents, known, compare):
        own = scores[torch.arange(len(scores)), torch.arange(rows.start, rows.start + len(scores))]
        total += float(((scores / temperature).logsumexp(1) - own / temperature).sum())
    return total / len(queries)


def _blocks(queries: Tensor, keys: Tensor, known: KnownPairs, compare: Similarity) -> Iterator[tuple[slice, Tensor]]:
    """Similarities of some queries with all keys; -inf where a key is no candidate."""
    size = max(1, _BLOCK // max(1, len(keys)))
    for start in range(0, len(queries), size):
        rows = slice(start, start + size)
        same: Bool[Tensor, "m n"] = known.block(rows, slice(len(keys))).negative_mask == 0
        own = torch.arange(len(same), device=queries.device)
        # A pair is known itself, and is the right answer.
        same[own, own + start] = False
        yield rows, compare(queries[rows], keys).masked_fill(same, -torch.inf)
