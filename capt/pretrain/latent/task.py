"""The ``latent`` task: encoder, decoder and critics, each an engine of its own.

The step is in ``training``, the objectives of the paper's tables are in ``objectives``.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, FiniteFloat
from torch import nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, quoted
from capt.pretrain.base.overlap import report_overlap, rows_as_bytes, shared
from capt.pretrain.base.randomness import derive
from capt.pretrain.base.records import Count, Record, parse_record
from capt.pretrain.config.schema import Job
from capt.pretrain.contrast import ShardedQueue
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress, StepMetrics, to_float
from capt.pretrain.latent.batches import (
    Batches,
    LatentBatch,
    Rule,
    SampledBatch,
    StepNoise,
    cluster_batches,
    sample_batch,
)
from capt.pretrain.latent.config import LatentJob
from capt.pretrain.latent.corpus import (
    VOCABULARY,
    LatentVocabulary,
    Sentences,
    build_vocabulary,
    load_sentences,
    report_unknown,
)
from capt.pretrain.latent.evaluation.clusters import cluster_metrics, save_codes
from capt.pretrain.latent.evaluation.text import DrawCounts, text_metrics
from capt.pretrain.latent.models import LatentTextModel, build, optimizers
from capt.pretrain.latent.training import CriticDivergedError, beta_at, train_encoder_aggressively, train_step

logger = logging.getLogger(__name__)


def _other_vocabulary(folder: Path, words: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder}: trained with another vocabulary than that of this job's text; set data.vocabulary_file={words}"
    )


class _State(Record):
    """The task's part of ``state.json`` in a checkpoint."""

    vocabulary: Annotated[str, Field(max_length=200)] | None
    text: Annotated[str, Field(max_length=1000)] | None = None
    unknown_in_training: Count = 0
    aggressive: bool
    information: FiniteFloat = Field(strict=False)
    queue: Count = 0
    clamped: FiniteFloat = Field(0.0, strict=False)
    without_contrast: Count = 0
    status: str = Field("", max_length=10_000)


class LatentTask:
    """A latent-variable model of sentences, or of the synthetic clusters."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, LatentJob)
        self._folder = run_dir
        self.vocabulary: LatentVocabulary | None = None
        self._train: Batches | None = None
        self._validation: Batches | None = None
        self.queue: ShardedQueue | None = None
        self._text = ""
        self._unknown_in_training = 0
        self._batches_per_epoch = 1
        lengths: Rule = job.batch.lengths
        if job.data.clusters is None:
            self.vocabulary = build_vocabulary(job.data)
            self._check_vocabulary_of(run_dir)
            train = self._load(job, "train")
            # A resumed run compares it with the text that it finds.
            self._text = hashlib.sha256(train.tokens.tobytes()).hexdigest()
            self._train = Batches(train, job.batch.global_, job.run.seed, job.batch.lengths)
            # ``batch.lengths: auto`` is decided by the training text, and the validation text follows it.
            lengths = self._train.lengths
            validation = self._load(job, "validation")
            # Seed 0: the batches of the validation are the same for every run.
            self._validation = Batches(validation, job.batch.global_, 0, lengths)
            self._batches_per_epoch = len(self._train)
            self._unknown_in_training = train.count(self.vocabulary.unknown_id)
            logger.info(
                "%d sentences of %.1f scored tokens, %d words, %d batches of %s lengths per epoch", len(train),
                train.scored / len(train), len(self.vocabulary), len(self._train), lengths,
            )  # fmt: skip
            unknown = self.vocabulary.unknown_id
            texts = (rows_as_bytes(each.tokens, each.offsets) for each in (train, validation))
            report_overlap({"sentence": shared(*texts)}, train="training text", validation="validation text")
            report_unknown(train, "training text", unknown, None)
            report_unknown(validation, "validation text", unknown, self._unknown_in_training)
            if job.contrast.weight > 0 and self._train.alone:
                logger.warning(
                    "%d of %d batches hold one sentence, which has no contrast; batch.lengths=similar joins them",
                    self._train.alone, len(self._train),
                )  # fmt: skip
        # A batch of clusters is one draw for each class, repeated: its size is no choice.
        elif job.batch.global_ != job.data.clusters * job.data.repeats:
            raise ConfigError(
                f"batch.global {job.batch.global_} is not data.clusters x data.repeats = "
                f"{job.data.clusters} x {job.data.repeats} = {job.data.clusters * job.data.repeats}"
            )
        if job.model.compile:
            logger.warning("model.compile=true is no longer used: every step runs without torch.compile")
        self.job = job.completed(self._batches_per_epoch, lengths)
        self._aggressive = job.objective.aggressive_updates > 0
        self._last_information = -1.0
        self._clamped = 0.0
        self._without_contrast = 0
        self.status = ""

    def _check_vocabulary_of(self, folder: Path) -> None:
        """Refuse a vocabulary other than the one that a resumed run has in its folder: its weights would not fit."""
        assert self.vocabulary is not None
        path = folder / VOCABULARY
        if path.is_file() and LatentVocabulary.load(path).fingerprint != self.vocabulary.fingerprint:
            raise _other_vocabulary(folder, path)

    def _load(self, job: LatentJob, split: str) -> Sentences:
        assert self.vocabulary is not None
        sentences = load_sentences(job.data, split, self.vocabulary)
        if sentences is None:
            raise DataError(f"data.path {job.data.path}: no file whose name says {split}; set data.{split}")
        return sentences

    def build_modules(self) -> Mapping[str, nn.Module]:
        """Build ``encoder``, ``decoder`` and ``critics``, as far as the job has them, initialised from the seed."""
        world = distributed.world_size()
        if self.job.accumulation(world) != 1:
            raise ConfigError(
                f"batch.micro {self.job.batch.micro}: the losses of a latent job are over the whole batch in one pass; "
                f"with {world} ranks set batch.micro={self.job.batch.global_ // world}"
            )
        torch.manual_seed(derive(self.job.run.seed, "init"))
        section = self.job.contrast
        if section.weight > 0 and section.queue:
            width = self.job.model.latent if section.over == "z" else self.job.model.hidden
            self.queue = ShardedQueue(section.queue, width, device=distributed.device())
            self.queue.warn_if_smaller_than(self.job.batch.global_)
        return build(self.job, len(self.vocabulary) if self.vocabulary is not None else 0)

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """The critics have settings of their own."""
        return optimizers(self.job)

    def build_batches(self, progress: Progress) -> Iterator[SampledBatch]:
        """Yield this rank's rows of each coming batch with all random numbers of its step."""
        rank, world = distributed.rank(), distributed.world_size()
        if self._train is None:
            batches = cluster_batches(self.job, progress.step, rank, world)
        else:
            batches = self._train.train(progress.samples, rank, world)
        for step, batch in enumerate(batches, progress.step):
            yield self._sample(batch, "step", step)

    def _sample(self, batch: LatentBatch, *use: int | str) -> SampledBatch:
        device = distributed.device()
        noise = StepNoise(self.job.run.seed, use, batch.rows, batch.total, device)
        return sample_batch(self.job, batch.to(device), noise)

    def _random_batch(self, step: int, number: int) -> SampledBatch:
        assert self._train is not None
        chosen = derive(self.job.run.seed, "inner", step, number) % len(self._train)
        batch = self._train.take(chosen, distributed.rank(), distributed.world_size())
        return self._sample(batch, "inner", step, number)

    def step(self, engines: Mapping[str, Engine], batch: SampledBatch, progress: Progress) -> StepMetrics:
        """Update each module once, the critics ``critic.updates`` times."""
        beta = beta_at(progress.step, self._batches_per_epoch, self.job.objective)
        report: StepMetrics = {}
        aggressive = self._aggressive
        if aggressive:
            report["encoder_updates"] = train_encoder_aggressively(
                self.job, engines, lambda number: self._random_batch(progress.step, number), beta
            )
        report |= train_step(self.job, engines, batch, beta, self.queue, encoder_is_trained=not aggressive)
        if "critic/clamped" in report:
            self._clamped += to_float(report["critic/clamped"])
            report["critic/clamped_so_far"] = self._clamped
        if self.job.contrast.weight > 0:
            # ``with_contrast`` leaves the contrast out where a sentence has no other beside it.
            self._without_contrast += batch.total == 1
            report["contrast/left_out_so_far"] = float(self._without_contrast)
        progress.samples += batch.total
        progress.tokens += batch.scored if self._train is not None else 0
        return report

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """Measure bounds and active units on held-out sentences, or how clusters separate.

        ``loss`` is the bound ``nelbo_iw``; of an autoencoder, which has none, it is the reconstruction.
        """
        modules = {name: engine.module for name, engine in engines.items()}
        if self._validation is None:
            if distributed.rank() == 0:
                save_codes(self._folder, progress.step, self.job, modules["encoder"], distributed.device())
            return dict(cluster_metrics(self.job, modules, distributed.device()))
        batches = self._validation.evaluation(self.job.validate_.samples, distributed.rank(), distributed.world_size())
        assert self.vocabulary is not None
        counts = DrawCounts(samples=1, mixture=self.job.validate_.draws)
        figures = text_metrics(self.job, LatentTextModel.of(modules), batches, counts, self.vocabulary.unknown_id)
        self._watch(figures)
        return {**figures, "loss": figures.get("nelbo_iw", figures["rec"])}

    def _watch(self, figures: Mapping[str, float]) -> None:
        """Say what is wrong with a validation. Raises ``CriticDivergedError`` where a dual estimate is not finite."""
        for name in ("kl_dual", "kl_aggregate_dual"):
            if not math.isfinite(figures.get(name, 0.0)):
                raise CriticDivergedError(f"{name} of the validation is {figures[name]}", self.job.critic.lr)
        remarks = []
        if figures.get("au") == 0:
            remarks.append("COLLAPSED (AU 0)")
            logger.warning("collapsed: no unit of z is active (AU 0): its mean is the same for every sentence")
        if figures.get("kl_dual", 0.0) < 0:
            remarks.append(f"DUAL KL {figures['kl_dual']:.2f} < 0")
            logger.warning(
                "the dual estimate of the KL is %.3f: f has not converged (f = 0 gives 0)", figures["kl_dual"]
            )
        # He et al. 2019: aggressive training ends when the mutual information stops growing.
        if self._aggressive and figures["mi_batch"] < self._last_information:
            logger.info("mutual information has fallen to %.3f: the encoder is no longer trained ahead",
                        figures["mi_batch"])  # fmt: skip
            self._aggressive = False
        self._last_information = figures.get("mi_batch", -1.0)
        self.status = "  ".join(remarks)

    def guidance(self) -> object:
        """LagVAE's: whether its encoder is still trained ahead, and the information that decides it."""
        return (self._aggressive, self._last_information) if self.job.objective.aggressive_updates else None

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Save the queue's shard; vocabulary and text (as hashes) and LagVAE's progress go into the JSON state."""
        if self.queue is not None:
            self.queue.save_shard(folder)
        return {
            "vocabulary": self.vocabulary.fingerprint if self.vocabulary is not None else None,
            "text": self._text,
            "unknown_in_training": self._unknown_in_training,
            "aggressive": self._aggressive,
            "information": self._last_information,
            "queue": self.job.contrast.queue,
            "clamped": float(distributed.all_reduce_sum(torch.tensor(self._clamped))) / distributed.world_size(),
            "without_contrast": self._without_contrast,
            "status": self.status,
        }

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Load what :meth:`save_state` wrote.

        Raises:
            CheckpointError: the checkpoint has another vocabulary, or other text and ``data.allow_change`` is false.
        """
        own = self.vocabulary.fingerprint if self.vocabulary is not None else None
        stored = parse_record(_State, state, folder / "state.json", error=CheckpointError)
        if stored.vocabulary != own:
            raise _other_vocabulary(folder, folder / VOCABULARY)
        if stored.text not in (None, self._text) and not self.job.data.allow_change:
            raise CheckpointError(
                f"{folder}: trained on other text than this job reads; data.allow_change=true continues with this one"
            )
        self._aggressive, self._last_information = stored.aggressive, stored.information
        self._clamped, self._without_contrast = stored.clamped, stored.without_contrast
        self.status = stored.status
        if self.queue is not None and stored.queue:
            self.queue.load_shards(folder)

    def flops_per_step(self) -> float:
        """FLOP of an average batch: matrix products of encoder and decoder, forward and backward."""
        if self._train is None or self.vocabulary is None:
            return 0.0
        model = self.job.model
        tokens = self._train.mean_tokens * self.job.objective.views
        encoder = 0 if model.posterior == "none" else 8 * model.hidden * (model.embedding + model.hidden)
        decoder = 8 * model.hidden * (model.embedding + model.latent + model.hidden)
        return 3.0 * tokens * (encoder + decoder + 2 * model.hidden * len(self.vocabulary))

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Suggest to measure the model, or to draw the clusters, which have no text."""
        if self.vocabulary is None:
            return [f"capt report {quoted(run_dir)} (curves of how the clusters separate)"]
        writes = self.job.model.posterior != "none"
        return [
            *([f"capt latent sample {quoted(run_dir)} -n 20 (sentences)"] if writes else []),
            f"capt evaluate {quoted(run_dir)} (bounds, active units and information on the test split)",
            f"capt report {quoted(run_dir)} (curves)",
        ]

    def export_files(self) -> Mapping[str, Path]:
        """The vocabulary, which is copied into every checkpoint."""
        if self.vocabulary is None:
            return {}
        path = self._folder / VOCABULARY
        self.vocabulary.save(path)
        return {VOCABULARY: path}


TASK = LatentTask
