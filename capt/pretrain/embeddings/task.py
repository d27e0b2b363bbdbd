"""The ``ace`` task: tables of word vectors divided over the ranks, many short updates between two looks of the loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import normalize

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, quoted
from capt.pretrain.base.records import Record, parse_record
from capt.pretrain.base.verification import all_ranks
from capt.pretrain.config.schema import Job
from capt.pretrain.embeddings.adversarial import Adversarial
from capt.pretrain.embeddings.config import SEGMENT, EmbeddingJob
from capt.pretrain.embeddings.corpus import VOCABULARY, EncodedCorpus, WordVocabulary, open_corpus, other_vocabulary
from capt.pretrain.embeddings.initial import InitialVectors, build_tables, with_initial_width
from capt.pretrain.embeddings.positives import SegmentReader, Segments
from capt.pretrain.embeddings.skipgram import SkipGram, UpdateRule
from capt.pretrain.embeddings.tables import EmbeddingTables
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.judgement import NEAREST
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress, StepMetrics, Updates

logger = logging.getLogger(__name__)


class _State(Record):
    """The task's part of ``state.json`` in a checkpoint."""

    vocabulary: Annotated[str, Field(max_length=64)]
    text: Annotated[str, Field(max_length=64)]


class EmbeddingTask:
    """Learns two tables of word vectors from text."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, EmbeddingJob)
        self._initial = None if job.model.init is None else InitialVectors(job.model.init)
        if self._initial is not None:
            job = with_initial_width(job, self._initial)
        self._folder, ranks = run_dir, all_ranks()
        self.corpus = open_corpus(job.data, ranks=ranks)
        _check_text(self.corpus, job)
        # Rows of the tables: the words of the text, which negatives are drawn from, and after them those that stay as
        # they are.
        self.vocabulary: WordVocabulary = self.corpus.vocabulary
        if self._initial is not None:
            with ranks.synchronize_errors():
                keep = job.model.other_words == "keep"
                others = self._initial.words_beside(self.vocabulary.index, keep=keep)
                if others:
                    _check_resumed(run_dir, self.vocabulary)
            self.vocabulary = self.vocabulary.with_others(others)
            if len(set(ranks.gather(self.vocabulary.fingerprint))) > 1:
                raise DataError(f"model.init {self._initial.source}: its words differ from host to host; copy one file")
        self.segments = SegmentReader(self.corpus, job)
        self.job = job.completed(len(self.segments))
        self._rule = _rule_of(self.job, self.corpus.vocabulary, self.segments)
        self._raw_per_word = self.corpus.raw_words / len(self.corpus)

    @property
    def status(self) -> str:
        """The warning of the rule, that its generator has collapsed; else empty."""
        return self._rule.status

    def build_modules(self) -> Mapping[str, nn.Module]:
        """Build ``discriminator``, the tables, of which each rank holds some rows, and what else the rule has."""
        initial, self._initial = self._initial, None  # a run's vectors take as much memory as the tables
        return {
            "discriminator": build_tables(self.job, self.vocabulary.index, initial),
            **self._rule.modules(initial),
        }

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """The discriminator is updated as the job says, other modules as their rule does."""
        return self._rule.optimizers()

    def build_batches(self, progress: Progress) -> Iterator[Any]:
        """Yield what the rule makes of the segments of this rank in each coming update."""
        rank, world = distributed.rank(), distributed.world_size()
        begin, step, size = progress.samples, progress.step, self.job.batch.global_ // SEGMENT

        def read(update: int) -> Segments:
            # A run that resumes within a window reads the window's earlier updates again.
            numbers = self._segments_of_update(max(begin + (update - step) * size, 0))
            return self.segments.read(np.array_split(numbers, world)[rank])

        return iter(self._rule.batches(read, step))

    def _segments_of_update(self, start: int) -> np.ndarray:
        """The numbers of the segments of the update that begins at ``start``; the last epoch's last may be fewer."""
        end, epochs = start + self.job.batch.global_ // SEGMENT, self.job.schedule.epochs
        if epochs is not None:
            end = min(end, max(start + 1, round(epochs * len(self.segments))))
        return np.arange(start, end)

    def step(self, engines: Mapping[str, Engine], batch: Any, progress: Progress) -> StepMetrics:
        """Do one update."""
        return self._do(engines, [batch], progress)

    def step_many(self, engines: Mapping[str, Engine], updates: Updates, progress: Progress) -> StepMetrics:
        """Do a chunk of updates; the metrics are those of the last one, but ``words_per_second`` is of all of them."""
        return self._do(engines, updates, progress)

    def _do(self, engines: Mapping[str, Engine], updates: Updates | list[Any], progress: Progress) -> StepMetrics:
        begin, before, metrics = time.perf_counter(), progress.tokens, None
        for number, batch in enumerate(updates, 1):
            metrics = self._rule.update(engines, batch, progress.step, measure=number == len(updates))
            numbers = self._segments_of_update(progress.samples)
            progress.samples += len(numbers)
            progress.tokens += self.segments.words_of(numbers)
        assert metrics is not None, "a chunk has an update"
        words = (progress.tokens - before) * self._raw_per_word  # as gensim counts: those that were left out as well
        return {**metrics, "words_per_second": words / (time.perf_counter() - begin)}

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """Measure how alike the vectors are: of the frequent words the median cosine with the nearest of them.

        There is no held-out loss: word vectors are measured by `capt evaluate`.
        """
        count = min(_COMPARED, len(self.vocabulary))
        tables = engines["discriminator"].module
        assert isinstance(tables, EmbeddingTables)
        with torch.no_grad():
            rows = tables.rows("input", torch.arange(count, device=distributed.device()))
        unit = normalize(rows.double(), dim=1)
        cosines = (unit @ unit.T).fill_diagonal_(-1.0)
        return {NEAREST: float(cosines.max(1).values.median())}

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Hashes of the vocabulary and of the text."""
        return {"vocabulary": self.vocabulary.fingerprint, "text": self.corpus.fingerprint}

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Check what :meth:`save_state` wrote.

        Raises:
            CheckpointError: the checkpoint has another vocabulary, or other text and ``data.allow_change`` is false.
        """
        stored = parse_record(_State, state, folder / "state.json", error=CheckpointError)
        if stored.vocabulary != self.vocabulary.fingerprint:
            raise other_vocabulary(folder)
        if stored.text != self.corpus.fingerprint and not self.job.data.allow_change:
            raise CheckpointError(
                f"{folder}: trained on other text than this job reads; data.allow_change=true continues with this one"
            )

    def flops_per_step(self) -> float:
        """FLOP of the three products of an update, if subsampling kept every word."""
        negatives, data = self.job.negatives, self.job.data
        return (
            6.0 * self.job.batch.global_ * (negatives.block + 2 * data.window + negatives.shared) * self.job.model.dim
        )

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Suggest to look at neighbours and to measure word similarity."""
        return [
            f"capt embeddings neighbors {quoted(run_dir)} WORD (the nearest words)",
            f"capt evaluate {quoted(run_dir)} --word-similarity DIR (Spearman's correlation with people)",
        ]

    def export_files(self) -> Mapping[str, Path]:
        """The vocabulary, which is copied into every checkpoint."""
        path = self._folder / VOCABULARY
        self.vocabulary.save(path)
        return {VOCABULARY: path}


_COMPARED = 1000
"""Words, the most frequent, whose vectors are compared with one another."""


def _check_resumed(folder: Path, text: WordVocabulary) -> None:
    """Raise for a run whose tables hold the words of the text alone, as those of earlier versions do."""
    path = folder / VOCABULARY
    if path.is_file() and WordVocabulary.load(path).fingerprint == text.fingerprint:
        raise CheckpointError(
            f"{folder}: its tables hold the words of the text alone, not the others of model.init; "
            "model.other_words=drop continues it"
        )


def _check_text(corpus: EncodedCorpus, job: EmbeddingJob) -> None:
    """Raise where nothing could be learned from the text: too few words, or no two of them beside each other."""
    words, number = len(corpus.vocabulary), job.negatives.number
    if words <= number:
        raise ConfigError(
            f"negatives.number {number} is not less than the vocabulary of {words} words: lower it, lower "
            "data.min_count, raise data.max_vocabulary, or give more text"
        )
    if corpus.sentences == len(corpus):
        raise DataError(
            "data.files: no line has two words that are kept, so that no word has a neighbour; give a sentence a line, "
            "or lower data.min_count"
        )
    kept = float(corpus.vocabulary.counts @ corpus.vocabulary.keep_probability(job.data.subsample))
    if kept < 2:
        raise ConfigError(
            f"data.subsample {job.data.subsample} thins {len(corpus):,} words out to {kept:.2g}: raise it, or 0 = off"
        )


def _rule_of(job: EmbeddingJob, vocabulary: WordVocabulary, segments: SegmentReader) -> UpdateRule:
    if job.is_plain:
        return SkipGram(job.data.window, job.negatives.number)
    return Adversarial(job, vocabulary.index, segments.noise)


TASK = EmbeddingTask
