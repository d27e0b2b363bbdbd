"""Evaluation of a reranker: candidates of a first stage, ordered anew by its scores, with the first stage beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.base.distributed import synchronize_errors
from capt.pretrain.base.errors import ConfigError, DataError, shown
from capt.pretrain.base.files import read_lines
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.engine.evaluations import Section
from capt.pretrain.engine.provenance import used_versions
from capt.pretrain.retrieval.data import Collection, read_sets
from capt.pretrain.retrieval.encode import embed, rows_of
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.metrics import DEPTH
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RerankSettings
from capt.pretrain.retrieval.rankings import Rankings, SearchCorpus, bm25_rankings, vector_rankings
from capt.pretrain.retrieval.rerankers import PairScorer, load_reranker, score_pairs
from capt.pretrain.retrieval.results import (
    BM25,
    RERANKED,
    about_bm25,
    about_set,
    figure_differences,
    figures_of,
    finished,
)
from capt.pretrain.retrieval.store import require_dtype

RUN, ENCODER = "run", "encoder"


def evaluate_reranker(
    model: Path,
    sets: Sequence[Path],
    options: EncodeOptions,
    settings: RerankSettings,
    *,
    split: str | None = None,
    per_query: Path | None = None,
    out: Path | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Evaluate a reranker on retrieval data sets. Collective over all ranks, and continued by the same call.

    A relevant document that is no candidate is a miss, and equal scores are ordered by document id, descending: the
    figures are those of trec_eval on a run of the scores. Scores are kept in the store.

    Args:
        model: see `load_reranker`.
        sets: see `read_sets`.
        options: where scores are kept, and tokens of a batch.
        settings: the first stage, and how many of its documents are scored.
        split: of BEIR folders.
        per_query: file of JSON lines for the figures of each query.
        out: JSON file to write the result to as well.
        progress: called with pairs scored.

    Raises:
        DataError: a data set or the run file cannot be used.
        CheckpointError: as `load_reranker`.
    """
    require_dtype(options.dtype)
    candidates, depth = settings.candidates or BM25, settings.depth or DEPTH
    with synchronize_errors(patient=True):
        collections = read_sets(sets, split, "--rerank")
        is_run = candidates != BM25 and Path(candidates).is_file()
        if is_run and len(collections) > 1:
            raise ConfigError(f"--candidates {candidates}: a run is of one data set; give one with --rerank")
        # The first stage is read before the model, and both before hours of scoring.
        run = read_trec_run(Path(candidates)) if is_run else None
        scorer = load_reranker(model)
    sections, lines = [], []
    for collection in collections:
        section, figures = _evaluate_set(scorer, collection, options, candidates, depth, run, progress)
        sections.append(section)
        lines += figures
    return finished(model, sections, lines, per_query, out)


def _evaluate_set(
    scorer: PairScorer,
    collection: Collection,
    options: EncodeOptions,
    candidates: str,
    depth: int,
    run: Mapping[str, Mapping[str, float]] | None,
    progress: ProgressCallback | None,
) -> tuple[Section, list[dict[str, Any]]]:
    with synchronize_errors(patient=True):
        corpus = SearchCorpus.of(collection)
    stage, about, first = _first_stage(collection, corpus, options, candidates, depth, run)
    with synchronize_errors(patient=True):
        wanted = {name for ranking in first for name in ranking}
        texts = {name: text for name, text in collection.documents() if name in wanted}
        queries = [query for _, query in collection.queries]
        pairs = [(query, texts[name]) for query, ranking in zip(queries, first, strict=True) for name in ranking]
    scores = iter(score_pairs(scorer, pairs, options, progress))
    reranked = [by_score({name: next(scores) for name in ranking}) for ranking in first]
    means, measured, lines = figures_of(collection, {RERANKED: reranked, stage: first})
    protocol = [
        *about_set(collection, corpus), f"the first {depth} of {about}", _misses(collection, first),
        f"reranked by {scorer.protocol()}", used_versions(),
    ]  # fmt: skip
    section = Section(
        name=collection.name, protocol="; ".join(protocol), systems=means,
        differences=figure_differences(measured, RERANKED, (stage,)),
    )  # fmt: skip
    return section, lines


def _first_stage(
    collection: Collection,
    corpus: SearchCorpus,
    options: EncodeOptions,
    candidates: str,
    depth: int,
    run: Mapping[str, Mapping[str, float]] | None,
) -> tuple[str, str, Rankings]:
    """Return the name of the first stage, what it is, and the candidates of each query, the best first."""
    if run is not None:
        with synchronize_errors(patient=True):
            return RUN, f"the run {candidates}", _of_run(run, candidates, depth, collection, corpus)
    if candidates == BM25:
        with synchronize_errors(patient=True):
            return BM25, about_bm25(), bm25_rankings(collection, corpus, depth)
    with synchronize_errors(patient=True):
        encoder = load_text_encoder(Path(candidates), EncoderOptions())
    asked = [text for _, text in collection.queries]
    queries = embed(encoder, asked, "query", options)
    documents = embed(
        encoder, (text for _, text in collection.documents()), "document", options, total=len(corpus.names)
    )
    rows = rows_of(queries, asked)
    found = vector_rankings(encoder, collection, rows, documents, corpus, encoder.dimension, depth)
    return ENCODER, f"{candidates}: {encoder.protocol()}", found


def _of_run(
    run: Mapping[str, Mapping[str, float]], where: str, depth: int, collection: Collection, corpus: SearchCorpus
) -> Rankings:
    known = set(corpus.names)
    if not any(name in run for name, _ in collection.queries):
        raise DataError(
            f"{where}: none of the queries of {collection.name} is in it: it has ids such as {shown(next(iter(run)))}, "
            f"the data set such as {shown(collection.queries[0][0])}"
        )
    for query, _ in collection.queries:
        if unknown := next((name for name in run.get(query, ()) if name not in known), None):
            raise DataError(f"{where}: the document {shown(unknown)} of query {shown(query)} is not in the corpus")
    return [corpus.others(query, by_score(run.get(query, {})))[:depth] for query, _ in collection.queries]


def _misses(collection: Collection, first: Rankings) -> str:
    """Say how many relevant documents are no candidates, and how many queries have none."""
    judged = [collection.judged[query].items() for query, _ in collection.queries]
    relevant = [{name for name, grade in grades if grade > 0} for grades in judged]
    total = sum(map(len, relevant))
    missing = sum(len(names.difference(ranking)) for names, ranking in zip(relevant, first, strict=True))
    asked = [each for each, names in zip(first, relevant, strict=True) if names]
    if without := sum(not ranking for ranking in asked):
        return (
            f"{missing} of {total} relevant documents are no candidates, and missed; {without} of {len(asked)} queries "
            "have no candidates, and zeros"
        )
    return f"{missing} of {total} relevant documents are no candidates, and missed"


def by_score(scores: Mapping[str, float]) -> list[str]:
    """Order documents as trec_eval does: by score in fp32, descending, and of equal scores by id, descending."""
    return sorted(scores, key=lambda name: (np.float32(scores[name]), name), reverse=True)


def read_trec_run(path: Path) -> dict[str, dict[str, float]]:
    """Read a run in TREC's form, ``query Q0 document rank score name`` a line: for each query scores by document.

    The rank is not read: trec_eval orders by score. Raises ``DataError``, with file and line.
    """
    run: dict[str, dict[str, float]] = {}
    for number, query, document, score in _run_lines(path):
        if document in run.setdefault(query, {}):
            raise DataError(f"{path}, line {number}: the document {shown(document)} again for query {shown(query)}")
        run[query][document] = score
    if not run:
        raise DataError(f"{path}: no lines; a run has lines such as 'q1 Q0 d7 1 12.5 bm25'")
    return run


def _run_lines(path: Path) -> Iterator[tuple[int, str, str, float]]:
    for number, line in enumerate(read_lines([path]), start=1):
        if not line.strip():
            continue
        cells = line.split()
        try:
            score = float(cells[4]) if len(cells) == 6 else float("nan")
        except ValueError:
            score = float("nan")
        if not np.isfinite(score):
            raise DataError(
                f"{path}, line {number}: query, Q0, document, rank, score and a name are expected, as "
                f"'q1 Q0 d7 1 12.5 bm25', not {shown(line, 60)}"
            )
        yield number, cells[0], cells[2], score
