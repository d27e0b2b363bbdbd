"""Retrieval evaluation of an encoder on data that is on disk: exact search, figures of trec_eval, BM25 beside it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from capt.pretrain.base.distributed import rank, synchronize_errors, world_size
from capt.pretrain.base.errors import ConfigError, DataError, did_you_mean, repeated, shown
from capt.pretrain.base.files import write_text
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.base.paired import paired_difference
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.config.retrieval import METRICS
from capt.pretrain.contrast.precisions import VectorPrecision
from capt.pretrain.convert.card import with_earlier
from capt.pretrain.data.formats import ReadOptions
from capt.pretrain.data.tables import read_file
from capt.pretrain.engine.checkpoint import find_best
from capt.pretrain.engine.provenance import provenance, used_versions
from capt.pretrain.engine.run_folder import (
    EVALUATION,
    Figures,
    Histograms,
    Section,
    run_of,
    save_artifact,
    sections_as_text,
    write_result,
)
from capt.pretrain.retrieval.bm25 import Bm25Index
from capt.pretrain.retrieval.data import Collection, read_collections
from capt.pretrain.retrieval.encode import EncodeOptions, embed, rows_of
from capt.pretrain.retrieval.encoders import TextEncoder, load_text_encoder
from capt.pretrain.retrieval.fusion import FUSION_K, reciprocal_ranks
from capt.pretrain.retrieval.metrics import DEPTH, PROTOCOL, mean_metrics, query_metrics
from capt.pretrain.retrieval.options import EncoderOptions
from capt.pretrain.retrieval.precisions import QuantizedScoring, precisions_of, ranges_of, rescored
from capt.pretrain.retrieval.search import BLOCK, Nearest, Scoring, by_id
from capt.pretrain.retrieval.store import FLOATS, Vectors

logger = logging.getLogger(__name__)

BM25, FUSION, RERANKED = "bm25", "fusion", "reranked"
FULL = "full"
"""The name of the system that reads whole vectors, beside the numbers of cut ones."""

_SCORED, _EACH, _BINS = 1000, 10, 40
"""Queries whose scores are shown, documents of each kind for one query, bins."""

Rankings = list[list[str]]
"""For each query the ids of the documents found, the best first."""


@dataclass(frozen=True)
class RetrievalSettings:
    """Settings of an evaluation: what is measured beside whole vectors, and where per-query figures go.

    A fusion is that of the whole vectors and BM25, which is measured as well. Without precisions that of the store is
    measured. With ``rescore`` the first documents of a quantized search, this many times the usual number, are scored
    again by the queries in float.
    """

    dims: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ()
    rescore: int = 0
    bm25: bool = False
    fusion: bool = False
    split: str | None = None
    per_query: Path | None = None
    documents_by: Path | None = None
    """The model of the documents, where it is another one than that of the queries."""


def evaluate(
    model: Path,
    sets: Sequence[Path],
    options: EncodeOptions,
    encoder_options: EncoderOptions,
    settings: RetrievalSettings,
    *,
    out: Path | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Evaluate an encoder on retrieval data sets. Collective over all ranks.

    Args:
        model: see `load_text_encoder`.
        sets: see `read_collections`.
        options: how texts are encoded and kept.
        encoder_options: pooling, length and prompts, where they are not the model's own.
        settings: dimensions, precisions, BM25, split, file for the figures of each query.
        out: JSON file to write the result to as well.
        progress: called with documents encoded.

    Returns:
        ``checkpoint``, ``versions`` and ``sections``, one for each data set, as `capt.pretrain.language.evaluate` has
        them.

    Raises:
        DataError: a data set cannot be used.
        CheckpointError: as `load_text_encoder`.
        ConfigError: a dimension that the model does not have.
    """
    with synchronize_errors(patient=True):
        collections = [each for path in sets for each in read_collections(path, settings.split)]
        if twice := repeated(collection.name for collection in collections):
            raise ConfigError(f"--retrieval: two data sets are called {twice!r}; rename a folder or file")
        encoder = load_text_encoder(model, encoder_options)
        other = None
        if settings.documents_by is not None:
            other = load_text_encoder(settings.documents_by, replace(encoder_options, pooling=None, length=None))
            _require_one_space(encoder, other)
        wrong = [dim for dim in settings.dims if not 0 < dim <= encoder.dimension]
        if settings.dims:
            encoder.require_vectors("--dims cuts them")
        precisions = _precisions(encoder, options, settings)
        if wrong:
            raise ConfigError(f"--dims {wrong[0]}: {model} gives {encoder.dimension} dimensions")
    # Wrong arguments have been refused by now: what follows may take hours.
    sections, lines = [], []
    for collection in collections:
        section, figures = _evaluate_set(encoder, other or encoder, collection, options, settings, precisions, progress)
        sections.append(section)
        lines += figures
    return finished(model, sections, lines, settings.per_query, out)


def finished(
    model: Path,
    sections: Sequence[Section],
    lines: Sequence[Mapping[str, Any]],
    per_query: Path | None,
    out: Path | None,
) -> dict[str, Any]:
    """Return the result of an evaluation, and write it where it is wanted, and into the run of ``model``. Collective.

    Args:
        model: what was measured.
        sections: one for each data set.
        lines: the figures of each query, for ``per_query``.
        per_query: file of JSON lines to write.
        out: JSON file to write the result to.
    """
    result: dict[str, Any] = {
        "checkpoint": str(model),
        "versions": provenance(),
        "sections": [section.model_dump() for section in sections],
    }
    with synchronize_errors():
        if rank() == 0:
            if per_query is not None:
                write_text(per_query, "".join(f"{json.dumps(line)}\n" for line in lines))
            if out is not None:
                write_result(out, result)
            # The run keeps the figures for reports and for the model card of an export.
            if run_of(model) is not None:
                checkpoint = find_best(model)
                kept = {**result, "sections": with_earlier(checkpoint, result["sections"])}
                save_artifact(checkpoint, EVALUATION.format(checkpoint=checkpoint.name), kept)
    return result


def _precisions(
    encoder: TextEncoder, options: EncodeOptions, settings: RetrievalSettings
) -> tuple[VectorPrecision, ...]:
    """Return the precisions that are measured. Raises ``ConfigError`` where the store or the model forbids one."""
    kept, is_float = options.dtype, options.dtype in FLOATS
    chosen = precisions_of(settings.precisions or (("float",) if is_float else (kept,)))
    quantized = [each for each in chosen if each != "float"]
    if quantized:
        encoder.require_vectors(f"--precision {quantized[0]} quantizes them")
    if not is_float and chosen != (kept,):
        other = next(each for each in chosen if each != kept)
        raise ConfigError(f"--precision {other}: --dtype {kept} keeps vectors in {kept} alone; leave --dtype out")
    if not is_float and settings.dims:
        raise ConfigError(f"--dims {settings.dims[0]}: --dtype {kept} keeps vectors in {kept} alone; leave --dtype out")
    if settings.fusion and "float" not in chosen:
        raise ConfigError("--fusion is of the vectors in float: --precision must name float as well")
    if settings.rescore and not quantized:
        raise ConfigError(f"--rescore {settings.rescore} is of a quantized search: give --precision int8 or binary")
    return chosen


def _evaluate_set(
    encoder: TextEncoder,
    other: TextEncoder,
    collection: Collection,
    options: EncodeOptions,
    settings: RetrievalSettings,
    precisions: Sequence[VectorPrecision],
    progress: ProgressCallback | None,
) -> tuple[Section, list[dict[str, Any]]]:
    # The corpus is read once for its ids, before hours of encoding.
    with synchronize_errors(patient=True):
        corpus = SearchCorpus.of(collection)
    # Queries are quantized by the ranges of the documents, and score again in float.
    in_float = options if options.dtype in FLOATS else replace(options, dtype="fp32")
    queries = embed(encoder, (text for _, text in collection.queries), "query", in_float)
    documents = embed(
        other, (text for _, text in collection.documents()), "document", options, progress, total=len(corpus.names)
    )
    rows = rows_of(queries, (text for _, text in collection.queries))
    # One ranking for each system: the vectors in each precision, whole and cut, and BM25.
    systems: dict[str, Rankings] = {}
    quantized = _QuantizedSearch(encoder.scoring, collection, documents, corpus, settings.rescore)
    for dim in (encoder.dimension, *settings.dims):
        whole = dim == encoder.dimension
        for precision in precisions:
            if precision == "float":
                systems[FULL if whole else str(dim)] = vector_rankings(
                    encoder, collection, rows, documents, corpus, dim
                )
                continue
            for name, nearest in quantized.found(rows[:, :dim], precision):
                systems[name if whole else f"{dim} {name}"] = corpus.rankings(collection, nearest)
    if settings.bm25 or settings.fusion:
        with synchronize_errors(patient=True):
            systems[BM25] = bm25_rankings(collection, corpus)
    if settings.fusion:
        systems[FUSION] = fused(systems[FULL], systems[BM25])
    poolers, measured, lines = figures_of(collection, systems)
    with synchronize_errors(patient=True):
        scores = _score_histograms(encoder, collection, rows, documents, next(iter(systems.values())))
    protocol = [_protocol(encoder, other, collection, corpus, poolers), *dict.fromkeys(quantized.protocol.values())]
    section = Section(
        name=collection.name, protocol="; ".join(protocol), poolers=poolers,
        dimension=encoder.dimension, scores=scores,
        differences=figure_differences(measured, FUSION, (FULL, BM25) if settings.fusion else ()),
    )  # fmt: skip
    return section, lines


def figures_of(
    collection: Collection, systems: Mapping[str, Rankings]
) -> tuple[dict[str, Figures], dict[str, list[dict[str, float]]], list[dict[str, Any]]]:
    """Return the mean figures of each system, those of each query, and these as lines of a file.

    A query without a relevant document has no part in any of them, as in trec_eval.
    """
    poolers: dict[str, Figures] = {}
    measured: dict[str, list[dict[str, float]]] = {}
    lines: list[dict[str, Any]] = []
    answerable = [max(collection.judged[name].values()) > 0 for name, _ in collection.queries]
    names = [name for (name, _), counts in zip(collection.queries, answerable, strict=True) if counts]
    for system, rankings in systems.items():
        chosen = [ranking for ranking, counts in zip(rankings, answerable, strict=True) if counts]
        figures = [query_metrics(ranking, collection.judged[name]) for name, ranking in zip(names, chosen, strict=True)]
        poolers[system], measured[system] = mean_metrics(figures), figures
        lines += [
            {"set": collection.name, "split": collection.split, "system": system, "query": name, **each}
            for name, each in zip(names, figures, strict=True)
        ]
    return poolers, measured, lines


def _require_one_space(queries: TextEncoder, documents: TextEncoder) -> None:
    """Refuse two models whose vectors cannot be compared with each other."""
    for encoder in (queries, documents):
        encoder.require_vectors("--documents-by compares vectors of two models")
    if queries.dimension != documents.dimension:
        raise ConfigError(
            f"--documents-by {documents.name}: {documents.dimension} dimensions, and {queries.name} has "
            f"{queries.dimension}: train it with distillation.projection=export, which gives it the teacher's"
        )


def figure_differences(
    figures: Mapping[str, Sequence[Mapping[str, float]]], system: str, others: Sequence[str]
) -> dict[str, Figures]:
    """By how much ``system`` is above each of the ``others`` in each figure, on the same queries."""
    found: dict[str, Figures] = {}
    for other in others:
        for metric in METRICS:
            a, b = ([each[metric] for each in figures[name]] for name in (other, system))
            found[f"{system} - {other}, {metric}"] = paired_difference(a, b)._asdict()
    return found


def _score_histograms(
    encoder: TextEncoder,
    collection: Collection,
    queries: Float[np.ndarray, "q d"],
    documents: Vectors,
    rankings: Rankings,
) -> Histograms | None:
    """Scores of the first queries with their relevant documents, with the best others, and with random documents."""
    chosen = [(i, name) for i, (name, _) in enumerate(collection.queries) if max(collection.judged[name].values()) > 0]
    chosen = chosen[:_SCORED]
    pools: dict[str, list[tuple[int, str]]] = {"positives": [], "hard negatives": []}
    for i, name in chosen:
        relevant = {document for document, grade in collection.judged[name].items() if grade > 0}
        pools["positives"] += [(i, document) for document in sorted(relevant)[:_EACH]]
        pools["hard negatives"] += [(i, each) for each in rankings[i][: 2 * _EACH] if each not in relevant][:_EACH]
    needed = {document for pairs in pools.values() for _, document in pairs}
    hashes: dict[str, bytes] = {}
    drawn: list[bytes] = []  # a uniform sample of the corpus (reservoir), the same on every rank
    generator = np.random.default_rng(0)
    for number, (name, text) in enumerate(collection.documents()):
        if name in needed:
            hashes[name] = text_hash(text)
        place = number if number < _SCORED else int(generator.integers(0, number + 1))
        # Reservoir sampling: each document takes a random place, which is beyond the reservoir more and more often.
        if place < _SCORED:
            drawn[place : place + 1] = [text_hash(text)]
    pairs = {
        kind: [(i, hashes[document]) for i, document in each if document in hashes] for kind, each in pools.items()
    }
    pairs["random negatives"] = [
        (i, drawn[int(generator.integers(len(drawn)))]) for i, _ in chosen for _ in range(_EACH)
    ]
    if not all(pairs.values()):
        return None
    left, scores = encoder.scoring.rows(queries), {}
    for kind, each in pairs.items():
        right = encoder.scoring.rows(documents.vectors([text for _, text in each]))
        rows = np.array([i for i, _ in each])
        scores[kind] = encoder.scoring.pairs(left, right, rows, np.arange(len(each)))
    # Common edges, so that the three histograms can be laid over each other.
    edges = np.histogram_bin_edges(np.concatenate(list(scores.values())).astype(np.float64), _BINS)
    counts = {kind: np.histogram(values, edges)[0].tolist() for kind, values in scores.items()}
    return Histograms(edges=edges.tolist(), counts=counts)


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


class _QuantizedSearch:
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
        first = 0
        while hashes := [text_hash(text) for text in islice(texts, BLOCK)]:
            # Blocks in turn, by number: which rank scores a block does not change a score.
            if first // BLOCK % world_size() == rank():
                rows = store.vectors(hashes)[:, :dim]
                best.update(first, scoring.rows(rows))
            first += len(hashes)
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


def _protocol(
    encoder: TextEncoder,
    other: TextEncoder,
    collection: Collection,
    corpus: SearchCorpus,
    systems: Mapping[str, Figures],
) -> str:
    parts = [*about_set(collection, corpus), encoder.protocol()]
    if other is not encoder:
        parts.append(f"documents by {other.name}: {other.protocol()}")
    if BM25 in systems:
        parts.append(about_bm25())
    if FUSION in systems:
        parts.append(f"fusion = reciprocal ranks of the first {DEPTH} of both, k {FUSION_K}")
    parts.append(used_versions())
    return "; ".join(parts)


def about_set(collection: Collection, corpus: SearchCorpus) -> list[str]:
    """The parts of a protocol that say what was asked of what, and which figures there are."""
    judged = [collection.judged[name] for name, _ in collection.queries]
    without = sum(max(each.values()) <= 0 for each in judged)
    found = set(corpus.names)
    missing = sum(document not in found for each in judged for document in each)
    return [
        f"{len(judged) - without} queries of {collection.split}, {len(corpus.names)} documents",
        *([f"{without} queries without a relevant document left out"] if without else []),
        *([f"{missing} judged documents are not in the corpus"] if missing else []),
        *collection.remarks,
        PROTOCOL,
        *([f"{len(corpus.selves)} queries are documents, each left out of its own ranking"] if corpus.selves else []),
    ]


def about_bm25() -> str:
    """The part of a protocol that says what BM25 is."""
    from importlib.metadata import version

    return f"bm25 = bm25s {version('bm25s')}, lucene, k1 1.5, b 0.75, no stop words, no stemming"


def as_text(result: dict[str, Any]) -> str:
    """The result of `evaluate` for people: a row for each figure, a column for each system."""
    return sections_as_text(result, "model", ".4f")


def compare(first: str, second: str, *, samples: int = 10_000, seed: int = 1) -> list[dict[str, Any]]:
    """Compare two systems on the queries that `evaluate` has kept of each; see `paired_difference`.

    Args:
        first: a file of per-query figures, or ``FILE:SYSTEM`` for a row beside the model (``bm25``, ``256``).
        second: the same.
        samples: sign flips that are drawn where there are too many to try them all.
        seed: of the draws.

    Returns:
        For each data set and figure the mean of both, and what `paired_difference` says.

    Raises:
        DataError: a file is not of the kind, or the two have not the same queries.
    """
    left, right = _figures(first), _figures(second)
    if left.keys() != right.keys():
        odd = min(left.keys() ^ right.keys())
        missing = second if odd in left else first
        raise DataError(f"{missing}: no query {odd[1]!r} of {odd[0]}, which the other file has")
    rows = []
    for name in dict.fromkeys(each for each, _ in left):
        keys = [key for key in left if key[0] == name]
        for metric in METRICS:
            a, b = ([side[key][metric] for key in keys] for side in (left, right))
            figures = {"first": float(np.mean(a)), "second": float(np.mean(b))}
            found = paired_difference(a, b, draws=samples, seed=seed)
            rows.append({"set": name, "metric": metric, "queries": len(keys), **figures, **found._asdict()})
    return rows


def _figures(given: str) -> dict[tuple[str, str], dict[str, float]]:
    path, system = Path(given), ""
    # FILE:SYSTEM, unless a file has that name.
    if not path.exists() and ":" in given:
        name, _, system = given.rpartition(":")
        path = Path(name)
    found: dict[tuple[str, str], dict[str, float]] = {}
    systems: set[str] = set()
    for where, _, row in read_file(path, ReadOptions(keys=METRICS)):
        try:
            systems.add(str(row["system"]))
            # The model comes first, and then what is beside it.
            system = system or str(row["system"])
            if row["system"] == system:
                key = f"{row['set']} {row['split']}", str(row["query"])
                if key in found:
                    raise DataError(f"{where}: query {shown(key[1])} of {key[0]} again; a file is of one evaluation")
                found[key] = {metric: float(row[metric]) for metric in METRICS}
                for metric, value in found[key].items():
                    if not np.isfinite(value):
                        raise DataError(f"{where}: {metric} is {value}; a finite number is expected")
        except DataError:
            raise
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{where}: not a line of capt evaluate --per-query") from None
    if not found:
        raise DataError(f"{path}: no figures of {system!r}; {did_you_mean(system, sorted(systems), 'it has')}")
    return found
