"""The base of pretraining tasks with the CAPT loss: micro-batches, the optimizer step over them, their state."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Int64
from pydantic import Field
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, counted
from capt.pretrain.base.process import host_memory
from capt.pretrain.base.randomness import EPOCHS, derive
from capt.pretrain.base.records import Count, Record, parse_record
from capt.pretrain.base.traits import traits
from capt.pretrain.base.verification import digest_of
from capt.pretrain.config.ramp import BatchSizeSchedule
from capt.pretrain.config.schema import Job
from capt.pretrain.contrast.info_nce import capt_loss
from capt.pretrain.contrast.kernels import check_precision
from capt.pretrain.contrast.metrics import ContrastStats
from capt.pretrain.contrast.similarity import Similarity
from capt.pretrain.contrastive.collapse import CollapseState, CollapseWatch, Figures
from capt.pretrain.contrastive.term import ContrastTerm, StepDiagnostics
from capt.pretrain.contrastive.views import CachedContrast, KeptGraphs, Losses, Views
from capt.pretrain.data.sampler import micro_batch_weights, micro_batches
from capt.pretrain.engine.engines.base import Engine, averaged_weights
from capt.pretrain.engine.judgement import SOLVED, START
from capt.pretrain.engine.loading import training_batches
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress, Rows, SampleOrder, StepMetrics, is_logged, to_float

logger = logging.getLogger(__name__)

BatchT = TypeVar("BatchT")
Assemble = Callable[[Int64[np.ndarray, " n"]], BatchT]
"""Makes the micro-batch of any list of sample numbers; a pure function of them."""


@dataclass(frozen=True)
class HeldOut(Generic[BatchT]):
    """The first ``samples`` held-out samples of a source, by its assembler; without a mixture it has no name."""

    source: str
    assembler: Assemble[BatchT]
    samples: int


Scales = Mapping[str, Tensor]
"""The factor of each loss's sum over a micro-batch. The engine averages over ranks and micro-batches; with the factor
that makes a mean over what the whole step holds, on all ranks and in all micro-batches. The factor of a loss of
which the step holds nothing is 0."""


def masked_scale(masked_here: int, micro_batches: int, device: torch.device) -> Tensor:
    """The factor of a sum over masked tokens (`Scales`); this rank's step has ``masked_here`` of them. Collective.

    They may be any other things that the ranks have different numbers of.
    """
    # Counted on the host and filled in on the device: to copy a number to a device would mean to wait for it.
    masked = distributed.all_reduce_sum(torch.full((), masked_here, dtype=torch.float64, device=device))
    masked = torch.where(masked > 0, masked, torch.inf)  # the factor of no token is 0, which says so
    return distributed.world_size() * micro_batches / masked


def _joined(seen: Sequence[Views]) -> Views:
    """Return the views of some micro-batches as those of one."""
    views: Views = type(seen[0]).joined(
        seen, [torch.cat(rows) for rows in zip(*(each.tensors() for each in seen), strict=True)]
    )
    return views


def noise_digest(job: Job, names: Sequence[str]) -> str:
    """Return the digest of the sections that say how samples are corrupted; removed keys are in it as they were."""
    sections = {name: getattr(job, name) for name in names}
    return digest_of({name: {**each.removed, **each.model_dump(mode="json")} for name, each in sections.items()})


class ContrastState(Record):
    """The part of ``state.json`` that `ContrastTask.save_state` writes: the tokenizer's digest, the queue's length,
    what a collapse is measured by, and the accuracy of the contrast before training, until it is logged.

    A task adds the digests of its data, under the names of `ContrastTask.digests`. None is data of an unknown digest.
    """

    tokenizer: Annotated[str, Field(pattern="^[0-9a-f]{32,64}$")]
    queue: Count
    collapse: CollapseState = CollapseState()
    pretext: Annotated[float, Field(ge=0, le=1)] | None = None


class ContrastTask(ABC, Generic[BatchT]):
    """Training of one module, ``model``, on micro-batches with the task's losses and, at a weight above 0, CAPT's.

    Args:
        job: with the sections ``contrast``, ``loader`` and ``data.sequence_length``.
    """

    State: type[ContrastState]
    """The record of the task in ``state.json``."""
    data_name: str
    """The name of the training data in error messages."""
    noise: tuple[str, ...]
    """The sections of the job that say how samples are corrupted."""
    contrast_loss = "loss/capt"
    """The name of the contrast's loss in the metrics."""
    similarity: Similarity | None = None
    """The similarity of two rows; None: they are unit vectors, compared by their product."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.batch_sizes: BatchSizeSchedule = job.batch_sizes
        self.collapse = CollapseWatch(job.contrast)
        self.contrasts: bool = job.contrast.weight > 0
        if self.contrasts:
            check_precision(job.contrast.precision, distributed.device())
        self.contrast: ContrastTerm | None = None
        self._module: Any = None
        self._kept: KeptGraphs | None = None
        self._said_alone = False
        self._pretext: float | None = None

    @property
    def pretext(self) -> str:
        """Description of the way in which both views of one text are made; empty if the views are two given texts."""
        return ""

    @property
    def views_differ(self) -> bool:
        """True where both views of a text differ without dropout."""
        return True

    @property
    def status(self) -> str:
        """A note that the representations have collapsed, or empty."""
        return self.collapse.status

    @property
    @abstractmethod
    def samples(self) -> int:
        """The number of samples of the training data."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Columns of the representations that are contrasted."""

    @abstractmethod
    def build_module(self) -> nn.Module:
        """The module to train, whose ``temperature(step)`` is that of the contrast."""

    @abstractmethod
    def assembler(self, split: str) -> Assemble[BatchT]:
        """The function that makes the micro-batches of ``train`` or ``validation``."""

    def micro_batch(self, assembler: Assemble[BatchT], samples: Int64[np.ndarray, " n"], step: int) -> BatchT:
        """The micro-batch of these samples in update ``step`` (0-based)."""
        return assembler(samples)

    @abstractmethod
    def scales(self, batch: list[BatchT], device: torch.device) -> Scales:
        """The factors of the losses of a step. Called once a step, on all ranks."""

    @abstractmethod
    def losses(self, engine: Engine, batch: BatchT, scales: Scales, step: int) -> Losses:
        """Return the views of a micro-batch (None without contrast), the sum of its other losses, and its metrics."""

    @abstractmethod
    def represent(self, engine: Engine, batch: BatchT, step: int) -> Views:
        """Return the views of a micro-batch alone, drawn with the same random numbers as in `losses`."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """The digest of the tokenizer."""

    @abstractmethod
    def digests(self) -> Mapping[str, tuple[str, str]]:
        """Return the digests of the data: the name in ``state.json`` -> (its name in messages, its digest)."""

    @abstractmethod
    def rows(self, batch: BatchT) -> Rows:
        """The ids of the samples of a micro-batch (their places in the data), and both views of each."""

    def sample_order(self) -> SampleOrder:
        """The order of the samples (`capt.pretrain.data.sampler.Sampler`), and digests of the data and of their noise.

        Another text, tokenizer or length of samples has another digest.
        """
        data = {name: digest for name, (_, digest) in self.digests().items()}
        kept = {**data, "tokenizer": self.fingerprint, "length": self.job.data.sequence_length}
        return SampleOrder(self.samples, self.job.run.seed, digest_of(kept), noise_digest(self.job, self.noise))

    def consumed(self, batch: list[BatchT]) -> list[Rows]:
        """The rows of every micro-batch."""
        return [self.rows(part) for part in batch]

    def build_modules(self) -> Mapping[str, nn.Module]:
        """The module with its heads (and the temperature, when learned), from the seed or ``model.init``."""
        # A plan has neither the memory nor the data.
        if self.contrasts and traits().is_here:
            self._require_memory()
            self.require_negatives()
        # All ranks draw the same weights.
        torch.manual_seed(derive(self.job.run.seed, "init"))
        self._module = self.build_module()
        if self.contrasts:
            self.contrast = self.build_term()
        return {"model": self._module}

    def require_negatives(self) -> None:
        """Refuse a job whose contrast compares one sample with nothing. Raises ``ConfigError``, ``DataError``."""
        if self.samples < 2:
            raise DataError(
                f"the {self.data_name} holds one sample, which has no negative: give more data, or set "
                "contrast.weight=0"
            )
        if self.fewest_contrasted < 2 and not self.job.contrast.queue:
            raise ConfigError(
                f"{self.lonely_batch} compares a sample with no other one and has no negative, so that its contrast is "
                "0 and teaches nothing: set batch.global to 2 or more with contrast.cached=auto and "
                "contrast.in_batch=global, or contrast.queue"
            )

    @property
    def fewest_contrasted(self) -> int:
        """Samples that one contrast compares with each other, in the smallest step of the job."""
        world, section = distributed.world_size(), self.job.contrast
        fewest = []
        for stage in self.batch_sizes.stages:
            parts = self.job.accumulation(world, stage.batch)
            by_budget = getattr(self.job.batch, "micro_tokens", None) is not None
            of_ranks = 1 if by_budget or section.is_cached(parts) else parts
            # Sizes of micro-batches and of ranks differ by one at most: the larger ones decide.
            fewest.append(-(-stage.batch // (of_ranks * (world if section.in_batch == "local" else 1))))
        return min(fewest)

    @property
    def lonely_batch(self) -> str:
        """The name of a batch that is too small, in messages."""
        smallest = min(stage.batch for stage in self.batch_sizes.stages)
        if smallest == 1:
            return "batch.global=1" if self.job.batch.global_ == 1 else "batch.ramp: a step of 1"
        section = self.job.contrast
        return (
            f"a contrast of one sample (contrast.cached={str(section.cached).lower()}, "
            f"contrast.in_batch={section.in_batch})"
        )

    def _require_memory(self) -> None:
        """Refuse a queue beyond this machine's memory, before the operating system ends a process for it."""
        section, device = self.job.contrast, distributed.device()
        if not section.queue:
            return
        where, ranks = ("its GPU", 1) if device.type == "cuda" else ("this host", distributed.local_world_size())
        need = ranks * section.queue_bytes(self.width) / distributed.world_size()
        have = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory()
        if need > have:
            fits = int(section.queue * have / need)
            raise ConfigError(
                f"contrast.queue {section.queue:,}: {counted(ranks, 'rank')} of {distributed.world_size()} take "
                f"{need / 2**30:,.1f} GiB for {self.width} numbers a row, and {where} has {have / 2**30:,.1f}; take "
                f"fewer than {fits:,} rows"
                + (", or contrast.queue_dtype=bf16" if section.queue_dtype == "fp32" else "")
            )

    def build_term(self) -> ContrastTerm:
        """The contrast of the job, with its queue."""
        return ContrastTerm(self.job.contrast, self.width, self.job.batch.global_)

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """The settings of the job's optimizer, which with ``contrast.momentum`` keeps an average of the weights."""
        if not self.contrasts or self.job.contrast.momentum is None:
            return {}
        return {"model": ModuleOptimizer(self.job.optimizer, average=self.job.contrast.momentum)}

    def build_batches(self, progress: Progress) -> Iterator[list[BatchT]]:
        """This rank's micro-batches of each coming step."""
        if progress.samples // self.samples >= EPOCHS:
            raise CheckpointError(
                f"state.json: {progress.samples} samples are over {EPOCHS:,} epochs of this {self.data_name}"
            )
        world = distributed.world_size()
        sizes, first = self.batch_sizes, progress.step
        # `batch.ramp` has steps of several sizes, each with a number of micro-batches of its own.
        make = {
            size: self.step_assembler(size, self.job.accumulation(world, size), world, distributed.rank())
            for size in {stage.batch for stage in sizes.stages}
        }
        # samples that were left out, or that another schedule of batch sizes had taken by now
        shift = progress.samples - sizes.samples_before(first)

        def assemble(step: int) -> Sequence[BatchT]:
            return make[sizes.size(step)](shift + sizes.samples_before(step), step)

        return training_batches(assemble, range(first, self.job.schedule.max_steps), self.job.loader)

    def step_assembler(self, batch: int, parts: int, world: int, rank: int) -> Callable[[int, int], Sequence[BatchT]]:
        """The function from the first sample and the number of a step to the ``parts`` micro-batches of ``rank``."""
        assembler = self.assembler("train")

        def assemble(start: int, step: int) -> list[BatchT]:
            shares = micro_batches(start, batch, parts, world, rank)
            return [self.micro_batch(assembler, samples, step) for samples in shares]

        return assemble

    def tokens(self, batch: list[BatchT], sequences: int) -> int:
        """Tokens of a step of ``sequences`` over all ranks."""
        return int(sequences * self.job.data.sequence_length)

    def step(self, engines: Mapping[str, Engine], batch: list[BatchT], progress: Progress) -> StepMetrics:
        """Do one optimizer step over the micro-batches of ``batch``.

        A task's own losses are means over the whole step (all ranks, all micro-batches), and so is CAPT with
        ``contrast.cached``: Eq. 4's mean form over one batch, whatever the micro-batches are. Otherwise CAPT is the
        mean over micro-batches of that form, each micro-batch being one batch over all ranks, and each sample having
        the same weight.

        A cached contrast encodes each micro-batch a second time, but for those of `KeptGraphs`.

        With ``contrast.momentum`` the averaged encoder sees the step first, and its rows are queued at the end.
        """
        engine, step, sequences = engines["model"], progress.step, self.batch_sizes.size(progress.step)
        engine.accumulate(len(batch))  # batch.ramp and batch.micro_tokens change their number
        assert self._module is not None
        temperature = self._module.temperature(step)
        # Diagnostics cost one more pass over the logits: only steps that are logged have them.
        shown = is_logged(self.job, step + 1)
        is_start = step == 0 and traits().is_here and self.pretext != ""
        diagnostics = StepDiagnostics(of_vectors=self.similarity is None) if self.contrasts and shown else None
        if is_start and self.contrasts:
            self._pretext = self._start_accuracy(engine, batch)
            self._tell_start(self._pretext, "of the first step")
        scales = self.scales(batch, engine.device)
        # The averaged encoder sees the step before the update, and its rows enter the queue after the loss.
        averaged = self._averaged_views(engine, batch, step)
        report = self._accumulate(engine, batch, scales, diagnostics, step)
        if averaged is not None:
            assert self.contrast is not None
            self.contrast.push(averaged)
        if self._kept is not None:
            self._kept.end_step(engine.update_was_skipped)
        # Values stay on the device: what is reported is read by the host only where a step is logged.
        progress.samples += sequences
        progress.tokens += self.tokens(batch, sequences)
        report["grad_norm"] = engine.gradient_norm()
        if self.contrasts:
            report["temperature"] = temperature.detach() if isinstance(temperature, Tensor) else temperature
        if is_logged(self.job, step + 1):
            # This reads the factors, for which the host waits: on logged steps alone.
            self._leave_out_unmeasured(report, scales)
        if diagnostics is not None:
            self._add_diagnostics(report, diagnostics.compute(), step + 1)
        if shown and self._pretext is not None:
            report[START], self._pretext = self._pretext, None
        return report

    @torch.no_grad()
    def _start_accuracy(self, engine: Engine, batch: list[BatchT]) -> float | None:
        """Return the share of the samples of a step that find their other view in it; None without one. Collective.

        Without dropout where the views differ without it: it hides what new encoders find, whose texts are all nearly
        one point.
        """
        devices = [engine.device] if engine.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            if self.views_differ:
                engine.eval()
            views = _joined([self.represent(engine, part, 0) for part in batch])
            engine.train()
        stats = ContrastStats()
        capt_loss(views.s, views.s_hat, temperature=1.0, ids=views.ids, stats=stats)
        whole = stats.over_ranks()
        return whole.top1 if whole.anchors else None

    def _tell_start(self, accuracy: float | None, which: str) -> None:
        """Log what the contrast finds before the first update, and that it has little to teach where that is all."""
        if accuracy is None or distributed.rank():
            return
        logger.info(
            "before training %.1f%% of the samples %s find their other view (%s)", 100 * accuracy, which, self.pretext
        )
        if accuracy >= SOLVED:
            logger.warning(
                "the start already finds %.1f%% of the samples by their other view (%s), so that the contrast has "
                "little left to teach: two spans of a passage are harder (data.view=neighbour or crop), shorter ones "
                "more so (data.spans.share)", 100 * accuracy, self.pretext,
            )  # fmt: skip

    def _accumulate(
        self, engine: Engine, batch: list[BatchT], scales: Scales, diagnostics: StepDiagnostics | None, step: int
    ) -> StepMetrics:
        """Forward and backward of every micro-batch, and the update after the last; return means of their metrics."""
        sequences, weight = self.batch_sizes.size(step), self.job.contrast.weight

        def contrast(views: Views) -> Tensor:
            assert self.contrast is not None
            if diagnostics is not None:
                diagnostics.update(views)
            stats = None if diagnostics is None else diagnostics.stats
            return self.contrast.loss(views, step=step, batch=sequences, stats=stats)

        losses = [functools.partial(self.losses, engine, part, scales, step) for part in batch]
        cached = None
        if self.contrasts and self.job.contrast.is_cached(len(batch)):
            represent = [functools.partial(self.represent, engine, part, step) for part in batch]
            cached = CachedContrast(represent, losses, contrast, self._kept_graphs(engine, sequences))
        totals: dict[str, Tensor] = {}
        # Micro-batches of unequal sizes count by their samples; each is a mean over its own.
        shares = micro_batch_weights(sequences, len(batch), distributed.world_size())
        for number in range(len(batch)):
            views, loss, metrics = losses[number]() if cached is None else cached.losses(number)
            metrics["loss"] = loss
            if views is not None:
                contrasted = shares[number] * contrast(views) if cached is None else cached.loss
                metrics[self.contrast_loss] = contrasted
                metrics["loss"] = loss + weight * contrasted
                # With a cached contrast the gradient reaches the encoder through the surrogate; its value is no loss.
                surrogate = contrasted if cached is None else cached.surrogate(number, views)
                loss = loss + weight * surrogate
            engine.backward(loss)
            # The loss itself and not the surrogate: a guard judges by it.
            engine.step(metrics["loss"])
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value.detach() / len(batch)
        return {**totals}

    @staticmethod
    def _leave_out_unmeasured(report: StepMetrics, scales: Scales) -> None:
        """Remove the losses of which the step held nothing: they have no value, on any rank."""
        for name in [name for name, scale in scales.items() if not scale]:
            report.pop(f"loss/{name}", None)
            report.pop(f"accuracy/{name}", None)

    def _add_diagnostics(self, report: StepMetrics, figures: Mapping[str, float], step: int) -> None:
        """Add the figures of the contrast, and look for a collapse; a step without a contrast has no loss of it."""
        report |= figures
        # The first steps of a queue have none yet.
        is_early = self.job.contrast.queue > 0 and step <= self.job.contrast.queue_start + 1
        if figures.get("contrast/effective_negatives") == 0 and not is_early and not self._said_alone:
            self._said_alone = True
            if distributed.rank() == 0:
                logger.warning(
                    "step %d: no sample has a negative, so that its contrast is 0 and teaches nothing: all that it is "
                    "compared with shows the same (said once; contrast/effective_negatives has each logged step)", step
                )  # fmt: skip
        if "contrast/accuracy" not in figures:
            report.pop(self.contrast_loss, None)
            return
        if self.similarity is None:
            self.collapse.look("training", step, Figures(
                figures["contrast/accuracy"], figures["contrast/uniformity"], figures["contrast/first_direction"]
            ))  # fmt: skip

    def _kept_graphs(self, engine: Engine, sequences: int) -> KeptGraphs:
        """Return the graphs that the coming step keeps: none at ZeRO 3, which gathers weights for one pass only."""
        if self._kept is None:
            keep = self.job.contrast.keep
            if engine.zero_stage == 3 and keep not in ("auto", 0):
                raise ConfigError(
                    f"contrast.keep={keep}: ZeRO 3 gathers weights for one pass at a time and keeps no graph; set "
                    "contrast.keep=auto, or engine.zero_stage to 0, 1 or 2"
                )
            self._kept = KeptGraphs(0 if engine.zero_stage == 3 else keep, engine.device)
        self._kept.begin_step(sequences)
        return self._kept

    def validated(self, report: StepMetrics, progress: Progress) -> StepMetrics:
        """``report`` of a validation at ``progress``, after a look at whether the representations have collapsed."""
        if self.contrasts:
            retrieval = sum(to_float(report[f"retrieval/to_{view}"]) for view in ("corrupted", "original")) / 2
            if progress.step == 0 and self.pretext:
                self._tell_start(retrieval, "that are held out")
            self.collapse.look("validation", progress.step, Figures(
                retrieval, to_float(report["uniformity"]), to_float(report["first_direction"])
            ))  # fmt: skip
        return report

    @torch.no_grad()
    def _averaged_views(self, engine: Engine, batch: list[BatchT], step: int) -> Views | None:
        """Both views of the samples of a step, encoded by the averaged weights, for the queue; None without these.

        Dropout is on, and the random numbers are drawn again by the pass with a graph.
        """
        if not self.contrasts or self.job.contrast.momentum is None:
            return None
        devices = [engine.device] if engine.device.type == "cuda" else []
        with torch.random.fork_rng(devices), averaged_weights(engine):
            seen = [self.represent(engine, part, step) for part in batch]
        return _joined(seen)

    def shared_numbers(self) -> Mapping[str, int | float | str]:
        """Numbers of the queue that are the same on every rank: its size, and the rows that each has pushed so far."""
        queue = None if self.contrast is None else self.contrast.queue
        if queue is None:
            return {}
        # Ranks push equal numbers of rows only where every batch is shared out evenly.
        even = all(stage.batch % distributed.world_size() == 0 for stage in self.batch_sizes.stages)
        return {"queue capacity": queue.capacity, **({"rows pushed into the queue": queue.pushed} if even else {})}

    def loss_changes(self, step: int) -> bool:
        """The queue joins the contrast at ``contrast.queue_start``, and ``batch.ramp`` adds negatives."""
        section = self.job.contrast
        # ``step`` is the one just done, counted from 1: the first that the queue took part in.
        joins = section.queue and step == section.queue_start + 1
        return bool(self.contrasts and (joins or self.batch_sizes.begins_at(step - 1)))

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Save this rank's queue shard; the JSON state names tokenizer and data by their digests."""
        if self.contrast is not None:
            self.contrast.save(folder)
        data = {name: digest for name, (_, digest) in self.digests().items()}
        state = {"tokenizer": self.fingerprint, **data, "queue": self.job.contrast.queue}
        kept = {} if self._pretext is None else {"pretext": self._pretext}
        return {**state, **kept, "collapse": self.collapse.state.model_dump(mode="json")}

    def state_bytes(self) -> int:
        """Bytes of this rank's rows of a full queue."""
        queue = None if self.contrast is None else self.contrast.queue
        return 0 if queue is None else queue.nbytes

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Reload the queue for this world size; refuse another tokenizer, and other data unless it is meant.

        Raises:
            CheckpointError: the checkpoint was trained with another tokenizer, or on other data.
        """
        stored = parse_record(self.State, state, folder / "state.json", error=CheckpointError)
        self.compare(stored, folder)
        self.collapse.state, self._pretext = stored.collapse, stored.pretext
        if self.contrast is not None and stored.queue:
            self.contrast.load(folder)

    def compare(self, stored: Any, folder: Path) -> None:
        """Refuse what the ``stored`` state of the checkpoint ``folder`` forbids; see `load_state`."""
        if stored.tokenizer != self.fingerprint:
            raise CheckpointError(
                f"{folder}: trained with tokenizer {stored.tokenizer[:12]}, this job has {self.fingerprint[:12]}; set "
                f"tokenizer.* as it was, or tokenizer.path to a copy of {folder / 'tokenizer'}"
            )
        for name, (what, digest) in self.digests().items():
            if getattr(stored, name) not in (None, digest) and not self.job.data.allow_change:
                raise CheckpointError(
                    f"{folder}: trained on other {what} than this job reads (files or data.* options have changed"
                    " since); data.allow_change=true continues with what there is now"
                )
