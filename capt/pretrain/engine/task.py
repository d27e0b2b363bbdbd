"""The one seam: what the loop asks of a job. The loop knows no model, no data and no objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from capt.pretrain.config.schema import Job
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.optim.settings import ModuleOptimizer

Metric = Tensor | float | int | Callable[[], Tensor | float]
"""A scalar; or, where it costs something, how to find it: called in steps that are logged, on all ranks alike.

``loss`` and ``grad_norm``, which are looked at in every step, are scalars; as tensors on the device they are looked at
there, and the host does not wait for them.
"""

StepMetrics = dict[str, Metric]
"""The metrics of a step by name. The MEAN OVER RANKS of a value is its global value."""


def is_logged(job: Job, step: int) -> bool:
    """Return whether the metrics of ``step`` (counted from 1) are written down; in other steps nobody looks at them."""
    return step % job.run.log_every == 0 or step >= job.schedule.max_steps


def to_float(metric: Metric) -> float:
    """Return the metric's value on this rank."""
    return float(metric() if callable(metric) else metric)


@dataclass
class Progress:
    """Progress of a run. ``step`` counts finished optimizer steps, ``samples`` and ``tokens`` are global counts."""

    step: int = 0
    samples: int = 0
    tokens: int = 0

    def to_json(self) -> dict[str, int]:
        """The counters as a plain mapping."""
        return asdict(self)


@runtime_checkable
class Updates(Protocol):
    """The updates of a chunk: iterating gives the batch of each, with learning rates and random seeds set for it."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


@runtime_checkable
class Task(Protocol):
    """A job: its modules, its data, its step. Implementations live in ``pretrain.<task>.task`` as ``TASK``.

    Life of a task: ``TASK(job, run_dir)`` -> ``build_modules`` -> (the loop builds engines, loads) ->
    ``load_state`` when resuming -> ``build_batches(progress)`` -> ``step`` ... ``validate`` ... ``save_state``.
    """

    job: Job
    """The job as it runs: as given, with what only the data decide filled in (steps from epochs)."""

    status: str
    """Text of the progress line after the figures, such as ``COLLAPSED (AU 0)``; mostly empty."""

    def __init__(self, job: Job, run_dir: Path) -> None: ...

    def build_modules(self) -> Mapping[str, nn.Module]:
        """Build one module per engine, freshly initialised from ``job.run.seed`` (the same on every rank)."""
        ...

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """Name the optimizer of each module that has its own; the others are updated as ``job.optimizer`` says."""
        ...

    def build_batches(self, progress: Progress) -> Iterator[Any]:
        """Yield what this rank consumes from ``progress`` on: one item per step, for any number of workers."""
        ...

    def step(self, engines: Mapping[str, Engine], batch: Any, progress: Progress) -> StepMetrics:
        """Do forward, backward and optimizer step(s) on ``batch``; advances ``progress.samples`` and ``.tokens``."""
        ...

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """Return validation metrics, measured in evaluation mode, with the same result on every rank."""
        ...

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write this rank's part of what is not a parameter into ``folder``; return JSON state (rank 0's is kept)."""
        ...

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Read back what ``save_state`` wrote, at any world size."""
        ...

    def flops_per_step(self) -> float:
        """Return the model FLOP of a step of ``batch.global`` over all ranks (for MFU), without recomputation."""
        ...

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Return what a user may do with the finished run: one command with its purpose on each line."""
        ...

    def export_files(self) -> Mapping[str, Path]:
        """Name files or folders to copy into every checkpoint (name there -> source), such as the tokenizer."""
        ...


@runtime_checkable
class SharedNumbers(Protocol):
    """A task that keeps, beside parameters, numbers that are the same on every rank; they are compared now and then."""

    def shared_numbers(self) -> Mapping[str, int | float | str]:
        """Name the numbers that every rank must hold alike."""
        ...


@runtime_checkable
class CheckedValidation(Protocol):
    """A task that knows before the first step whether its validation can work."""

    def validation_fault(self) -> str:
        """Return why nothing can be validated, with the remedy; empty where validation works. The same on all ranks."""
        ...


@runtime_checkable
class GuidedTask(Protocol):
    """A task whose training continues in another way after some validations, which its checkpoint has to hold."""

    def guidance(self) -> object:
        """Return what the validations so far have decided."""
        ...


Role = Literal["query", "document", "text"]
"""Role of a text in a search: it decides its prompt and its length."""


@runtime_checkable
class TextTask(Protocol):
    """A task whose model makes a row of numbers of each text, so that retrieval can be validated
    (``validate.retrieval``).
    """

    similarity: Callable[[Tensor, Tensor], Tensor] | None
    """The similarity of rows of queries with rows of documents; None: the rows are vectors, whose cosines are compared.
    """

    def text_ids(self, texts: Sequence[str], role: Role) -> list[list[int]]:
        """Return the ids of each text as the model reads it: prompt, special tokens, cut to its length."""
        ...

    def text_vectors(self, engines: Mapping[str, Engine], ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the row of each text of a batch. All ranks call it alike."""
        ...


@runtime_checkable
class ChangingLoss(Protocol):
    """A task whose loss becomes another one at some steps, so that a jump there is no spike (``guard.spike``)."""

    def loss_changes(self, step: int) -> bool:
        """Return whether the loss of ``step`` (counted from 1) is not comparable with those before."""
        ...


@runtime_checkable
class ChunkedTask(Task, Protocol):
    """A task whose updates are so short that the loop's look at each of them would cost as much as the update.

    The loop then asks in one call for the updates that fit before the next step at which a callback has something to do
    (a row of metrics, a validation, a checkpoint). All else is as for any task.
    """

    def step_many(self, engines: Mapping[str, Engine], updates: Updates, progress: Progress) -> StepMetrics:
        """Do all ``updates`` (``for batch in updates: ...``) and return the metrics of the last one.

        ``progress.step`` counts along; the task advances ``progress.samples`` and ``.tokens``. Divergence is judged by
        the returned ``loss`` and ``grad_norm`` alone: where a model could recover from a loss that is not finite, the
        task returns that loss.
        """
        ...


@runtime_checkable
class SizedTask(Task, Protocol):
    """A task with a large state beside its parameters, for which room must be found before it is saved."""

    def state_bytes(self) -> int:
        """Return how many bytes of files ``save_state`` writes on this rank, at most."""
        ...


@dataclass(frozen=True)
class SampleOrder:
    """Map of samples to rows (`capt.pretrain.data.sampler.Sampler`); rank ``g % world`` takes sample ``g``.

    Attributes:
        samples: rows of the data, each of which has its number as its id; an epoch is all of them once.
        seed: of the order of the epochs.
        data: a digest of what the ids represent; with another one they are other rows.
        noise: a digest of the settings by which rows are corrupted.
        shuffle: whether an epoch has an order of its own.
        sizes: rows of each source, where several take turns by blocks
            (`capt.pretrain.data.sampler.BlockMixtureSampler`); else empty.
        weights: the share of each source.
        block: samples of a turn; with ``at_once`` the rows of a shard.
        mixed: whether a turn has samples of several sources.
        at_once: shards whose rows are shuffled with each other (`capt.pretrain.data.sampler.GroupedSampler`); 0 = all.
        names: of the sources of a mixture (`capt.pretrain.data.mixture.MixtureSampler`), whose other fields follow.
        course: points of the schedule of the weights.
        limits: samples that each source has at most; 0 = any number.
        blocks: rows of a shard of each source, with ``at_once``.
    """

    samples: int
    seed: int
    data: str
    noise: str = ""
    shuffle: bool = True
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    block: int = 0
    mixed: bool = False
    at_once: int = 0
    names: tuple[str, ...] = ()
    course: tuple[tuple[float, ...], ...] = ()
    limits: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()


class Rows(NamedTuple):
    """Rows that were fed to the model: their ids, and arrays of what was made of them, a row each."""

    ids: np.ndarray
    contents: Sequence[np.ndarray]


@runtime_checkable
class RecordedTask(Task, Protocol):
    """A task whose samples are numbered, so that the ledger can record and check which were used (``capt ledger``)."""

    def sample_order(self) -> SampleOrder:
        """Describe the order of the training samples."""
        ...

    def consumed(self, batch: Any) -> Sequence[Rows]:
        """Return the rows that are in ``batch``, an item of ``build_batches``, and not those that should be."""
        ...
