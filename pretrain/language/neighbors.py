"""Nearest-neighbour queries against an exported encoder: the quickest look at what a model has learnt."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.base.errors import DataError
from capt.pretrain.config.load import load_job
from capt.pretrain.data.files import FileCorpus, resolve_paths
from capt.pretrain.data.prepare import tokenizer_corpus
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.sentence_folder import load_sentence_model

logger = logging.getLogger(__name__)
_MIN_CHARACTERS = 20


@dataclass(frozen=True)
class Neighbor:
    """A text and its cosine similarity to the query."""

    text: str
    similarity: float


def candidates(run: Path | None, text: Sequence[Path], limit: int) -> list[str]:
    """The distinct lines among the first ``limit`` of the files ``text``, or of the training text of ``run``.

    The log says how many are searched, and when there are more.

    Raises:
        DataError: neither gives a line of at least 20 characters.
    """
    lines: Iterable[str]
    if text:
        corpus = FileCorpus(resolve_paths([str(path) for path in text], "--text"), "text", None)
        lines = (line for passage in corpus for line in passage.text.splitlines())
    elif run is not None:
        job = load_job(run / "config.yaml", resolved=True)
        if not isinstance(job, LanguageJob):
            raise DataError(f"{run}: a {job.task.type} run has no text; give --text FILE")
        lines = tokenizer_corpus(job.data)
    else:
        raise DataError("nothing to search in: give --text FILE or --run RUN")
    first = list(islice(_long_enough(lines), limit + 1))
    if not first:
        raise DataError(f"no line of {_MIN_CHARACTERS} characters or more to search in")
    texts = list(dict.fromkeys(first[:limit]))
    more = f", of the first {limit:,} only: --lines takes more" if len(first) > limit else ""
    logger.info("searching %s different lines of %d characters or more%s", f"{len(texts):,}", _MIN_CHARACTERS, more)
    return texts


def _long_enough(lines: Iterable[str]) -> Iterator[str]:
    return (line.strip() for line in lines if len(line.strip()) >= _MIN_CHARACTERS)


def nearest(model: Any, queries: Sequence[str], texts: Sequence[str], top: int) -> list[list[Neighbor]]:
    """The ``top`` texts by cosine for each query; ``model`` has sentence-transformers' ``encode``."""
    keys = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False, batch_size=64)
    rows = model.encode(list(queries), normalize_embeddings=True, show_progress_bar=False)
    similarity = np.asarray(rows) @ np.asarray(keys).T
    order = np.argsort(-similarity, axis=1)[:, :top]
    return [
        [Neighbor(texts[i], float(similarity[row, i])) for i in columns] for row, columns in enumerate(order.tolist())
    ]


def neighbors(
    folder: Path,
    queries: Sequence[str],
    *,
    run: Path | None = None,
    text: Sequence[Path] = (),
    top: int = 3,
    limit: int = 2000,
) -> list[list[Neighbor]]:
    """Load a sentence-transformers folder (or hub id) and answer ``queries`` from the first ``limit`` lines of text.

    Raises:
        CheckpointError: as `load_sentence_model`.
        DataError: as `candidates`.
    """
    model = load_sentence_model(folder)
    return nearest(model, queries, candidates(run, text, limit), top)
