"""Retrieval evaluation of an encoder on data that is on disk: exact search, figures of trec_eval, BM25 beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from capt.pretrain.base.distributed import synchronize_errors
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.contrast.precisions import VectorPrecision
from capt.pretrain.engine.evaluations import Figures, Histograms, Section
from capt.pretrain.engine.provenance import used_versions
from capt.pretrain.retrieval.bm25 import require_bm25
from capt.pretrain.retrieval.data import Collection, read_sets
from capt.pretrain.retrieval.encode import embed, rows_of
from capt.pretrain.retrieval.encoders import TextEncoder, load_text_encoder
from capt.pretrain.retrieval.fusion import FUSION_K
from capt.pretrain.retrieval.metrics import DEPTH
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RetrievalSettings
from capt.pretrain.retrieval.precisions import precisions_of
from capt.pretrain.retrieval.rankings import (
    QuantizedSearch,
    Rankings,
    SearchCorpus,
    bm25_rankings,
    fused,
    vector_rankings,
)
from capt.pretrain.retrieval.results import (
    BM25,
    FUSION,
    about_bm25,
    about_set,
    figure_differences,
    figures_of,
    finished,
)
from capt.pretrain.retrieval.store import DTYPES, FLOATS, DType, Vectors, require_dtype

FULL = "full"
"""The name of the system that reads whole vectors, beside the numbers of cut ones."""

_SCORED, _EACH, _BINS = 1000, 10, 40
"""Queries whose scores are shown, documents of each kind for one query, bins."""


def evaluate(
    model: Path,
    sets: Sequence[Path],
    options: EncodeOptions,
    encoder_options: EncoderOptions,
    settings: RetrievalSettings,
    *,
    split: str | None = None,
    documents_by: Path | None = None,
    per_query: Path | None = None,
    out: Path | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Evaluate an encoder on retrieval data sets. Collective over all ranks.

    Args:
        model: see `load_text_encoder`.
        sets: see `read_sets`.
        options: how texts are encoded and kept.
        encoder_options: pooling, length and prompts, where they are not the model's own.
        settings: what is measured beside whole vectors.
        split: of BEIR folders.
        documents_by: the model of the documents, where it is another one than that of the queries.
        per_query: file of JSON lines for the figures of each query.
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
    kept = require_dtype(options.dtype, DTYPES)
    with synchronize_errors(patient=True):
        collections = read_sets(sets, split, "--retrieval")
        encoder = load_text_encoder(model, encoder_options)
        other = None
        if documents_by is not None:
            other = load_text_encoder(documents_by, replace(encoder_options, pooling=None, length=None))
            _require_one_space(encoder, other)
        wrong = [dim for dim in settings.dimensions if dim > encoder.dimension]
        if settings.dims:
            encoder.require_vectors("--dims cuts them")
        precisions = _precisions(encoder, kept, settings)
        if wrong:
            raise ConfigError(f"--dims {wrong[0]}: {model} gives {encoder.dimension} dimensions")
        if settings.bm25 or settings.fusion:
            require_bm25()
    # Wrong arguments have been refused by now: what follows may take hours.
    sections, lines = [], []
    for collection in collections:
        section, figures = _evaluate_set(encoder, other or encoder, collection, options, settings, precisions, progress)
        sections.append(section)
        lines += figures
    return finished(model, sections, lines, per_query, out)


def _precisions(encoder: TextEncoder, kept: DType, settings: RetrievalSettings) -> tuple[VectorPrecision, ...]:
    """Return the precisions that are measured. Raises ``ConfigError`` where the store or the model forbids one."""
    is_float = kept in FLOATS
    chosen = precisions_of(settings.precisions or (("float",) if is_float else (kept,)))
    quantized = [each for each in chosen if each != "float"]
    if quantized:
        encoder.require_vectors(f"--precision {quantized[0]} quantizes them")
    if not is_float and chosen != (kept,):
        other = next(each for each in chosen if each != kept)
        raise ConfigError(f"--precision {other}: --dtype {kept} keeps vectors in {kept} alone; leave --dtype out")
    if not is_float and settings.dims:
        raise ConfigError(
            f"--dims {settings.dimensions[0]}: --dtype {kept} keeps vectors in {kept} alone; leave --dtype out"
        )
    if settings.fusion and "float" not in chosen:
        raise ConfigError("--fusion takes the vectors in float: --precision must name float as well")
    if settings.rescore and not quantized:
        raise ConfigError(
            f"--rescore {settings.rescore} applies to a quantized search: give --precision int8 or binary"
        )
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
    quantized = QuantizedSearch(encoder.scoring, collection, documents, corpus, settings.rescore or 0)
    for dim in (encoder.dimension, *settings.dimensions):
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
    means, measured, lines = figures_of(collection, systems)
    with synchronize_errors(patient=True):
        scores = _score_histograms(encoder, collection, rows, documents, next(iter(systems.values())))
    protocol = [_protocol(encoder, other, collection, corpus, means), *dict.fromkeys(quantized.protocol.values())]
    section = Section(
        name=_section_name(encoder, other, collection, precisions), protocol="; ".join(protocol), systems=means,
        dimension=encoder.dimension, scores=scores,
        differences=figure_differences(measured, FUSION, (FULL, BM25) if settings.fusion else ()),
    )  # fmt: skip
    return section, lines


def _require_one_space(queries: TextEncoder, documents: TextEncoder) -> None:
    """Refuse two models whose vectors cannot be compared with each other."""
    for encoder in (queries, documents):
        encoder.require_vectors("--documents-by compares vectors of two models")
    if queries.dimension != documents.dimension:
        raise ConfigError(
            f"--documents-by {documents.name}: {documents.dimension} dimensions, and {queries.name} has "
            f"{queries.dimension}: train it with distillation.projection=export, which gives it the teacher's"
        )


def _section_name(
    encoder: TextEncoder, other: TextEncoder, collection: Collection, precisions: Sequence[VectorPrecision]
) -> str:
    """The name of the set, and what else is measured than the model's own vectors in float.

    A run keeps one section of a name, so that these do not take the place of each other.
    """
    name = collection.name
    if other is not encoder:
        name += f", documents by {Path(other.name).name}"
    return name if "float" in precisions else f"{name}, {' and '.join(precisions)}"


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
