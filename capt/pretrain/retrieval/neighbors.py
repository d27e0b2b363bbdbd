"""Nearest-neighbour queries against an encoder: the quickest look at what a model has learnt."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from capt.pretrain.base.errors import DataError
from capt.pretrain.config.load import load_job
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.paths import resolve_paths
from capt.pretrain.data.prepare import tokenizer_corpus
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.retrieval.encode import embed, encode_in_batches, rows_of
from capt.pretrain.retrieval.encoders import TextEncoder, load_text_encoder
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions
from capt.pretrain.retrieval.rankings import search
from capt.pretrain.retrieval.rerankers import RERANKED_HITS, PairScorer, load_reranker, ordered_by_score
from capt.pretrain.retrieval.search import BLOCK, Nearest, Scoring

logger = logging.getLogger(__name__)
_MIN_CHARACTERS = 20


@dataclass(frozen=True)
class TextNeighbor:
    """A text and its similarity to the query: their cosine, what the encoder was made for, or a reranker's score."""

    text: str
    similarity: float


def candidates(run: Path | None, text: Sequence[Path], limit: int, column: str = "text") -> list[str]:
    """The distinct lines among the first ``limit`` of the files ``text``, or of the training text of ``run``.

    Of a table the lines are those of its ``column``.

    The log says how many are searched, and when there are more.

    Raises:
        DataError: neither gives a line of at least 20 characters.
    """
    lines: Iterable[str]
    if text:
        corpus = FileCorpus(resolve_paths([str(path) for path in text], "--text"), column, None)
        # At line feeds alone, as everywhere: a text may hold a form feed, or Unicode's own line separator.
        lines = (line for passage in corpus for line in passage.text.split("\n"))
    elif run is not None:
        lines = training_text(run)
    else:
        raise DataError("nothing to search in: give --text FILE or --run RUN")
    # One more than the limit, to know whether there are more.
    first = list(islice(_long_enough(lines), limit + 1))
    if not first:
        raise DataError(f"no line of {_MIN_CHARACTERS} characters or more to search in; give other texts")
    texts = list(dict.fromkeys(first[:limit]))
    more = f", of the first {limit:,} only: --lines takes more" if len(first) > limit else ""
    logger.info("searching %s different lines of %d characters or more%s", f"{len(texts):,}", _MIN_CHARACTERS, more)
    return texts


def training_text(run: Path) -> Iterator[str]:
    """Yield the lines of the training text of a run. Raises ``DataError`` where its task reads none."""
    job = load_job(run / "config.yaml", resolved=True)
    if not isinstance(job, LanguageJob):
        raise DataError(f"{run}: a {job.task.type} run has no text; give --text FILE")
    yield from tokenizer_corpus(job.data)


def _long_enough(lines: Iterable[str]) -> Iterator[str]:
    return (line.strip() for line in lines if len(line.strip()) >= _MIN_CHARACTERS)


def neighbors(
    model: Path,
    queries: Sequence[str],
    *,
    run: Path | None = None,
    text: Sequence[Path] = (),
    column: str = "text",
    top: int = 3,
    limit: int = 2000,
    store: Path | None = None,
    rerank: Path | None = None,
) -> list[list[TextNeighbor]]:
    """Answer ``queries`` from the first ``limit`` lines of text, by cosine.

    Args:
        model: see `load_text_encoder`.
        queries: sentences.
        run: a run whose training text is searched.
        text: files that are searched instead.
        column: where a table among them has its text.
        top: lines for each query.
        limit: lines at most.
        store: where vectors are kept for the next call; without it the store of this host.
        rerank: a reranker (`load_reranker`), whose scores order the 50 nearest lines anew, or ``top`` of them.

    Raises:
        CheckpointError: as `load_text_encoder`.
        DataError: as `candidates`.
    """
    texts = candidates(run, text, limit, column)
    encoder = load_text_encoder(model, EncoderOptions())
    scorer = None if rerank is None else load_reranker(rerank)
    options = EncodeOptions(None if store is None else str(store))
    rows = rows_of(embed(encoder, queries, "query", options), queries)
    documents = embed(encoder, texts, "document", options)
    # Equal scores keep the order of the lines.
    scoring = Scoring(similarity=encoder.compare)  # by cosine, also where a model was made for products
    wanted = min(top if scorer is None else max(top, RERANKED_HITS), len(texts))
    found = _named(search(rows, iter(texts), documents, wanted, np.arange(len(texts)), scoring), texts)
    if scorer is not None:
        found = [_reranked(scorer, query, near) for query, near in zip(queries, found, strict=True)]
    return [near[:top] for near in found]


def _reranked(scorer: PairScorer, query: str, near: Sequence[TextNeighbor]) -> list[TextNeighbor]:
    """Order lines by the scores of a reranker; equal ones stay as they are."""
    texts = [each.text for each in near]
    return [TextNeighbor(texts[number], score) for number, score in ordered_by_score(scorer, query, texts)]


def nearest_texts(
    encoder: TextEncoder, queries: Sequence[str], documents: Sequence[str], top: int
) -> list[list[TextNeighbor]]:
    """Return the ``top`` nearest of some texts in memory to each query, by the similarity of the encoder.

    The search is exact; equal scores keep the order of the documents.
    """
    if not queries or not documents:
        return [[] for _ in queries]
    rows = encode_in_batches(encoder, queries, "query")
    others = encode_in_batches(encoder, documents, "document")
    scoring = encoder.scoring
    rows, others = scoring.rows(rows), scoring.rows(others)
    best = scoring.best(rows, min(top, len(documents)), np.arange(len(documents)))
    for start in range(0, len(documents), BLOCK):
        best.update(start, others[start : start + BLOCK])
    return _named(best.result(), documents)


def _named(found: Nearest, texts: Sequence[str]) -> list[list[TextNeighbor]]:
    return [
        [TextNeighbor(texts[i], float(score)) for i, score in zip(numbers, scores, strict=True)]
        for numbers, scores in zip(found.numbers.tolist(), found.scores.tolist(), strict=True)
    ]
