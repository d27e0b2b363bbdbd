"""The training task that all fine-tuning shares: one module, one loss, metrics of whole data sets."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from capt.finetune.batches import RowSet, SizedRows, StepBatches, training_steps
from capt.finetune.config import FineTuningJob
from capt.finetune.evaluation import Objective, evaluate_sets
from capt.finetune.order import ExampleOrder
from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, quoted, shown
from capt.pretrain.base.randomness import derive
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.run_folder import read_best
from capt.pretrain.engine.task import Progress, StepMetrics

logger = logging.getLogger(__name__)


class Identity(NamedTuple):
    """A value that a resumed run must share with its checkpoint, and the key of the configuration that decides it."""

    value: str
    key: str


class FineTuningTask(ABC):
    """Fine-tuning of one module; a subclass supplies data sets, module, objective and FLOP
    (`capt.pretrain.engine.task`).

    Args:
        job: the job; what it gives in epochs is turned into steps here.
        name: what the log calls the data.
        train: the training set.
        validation: dev sets by the suffix that the names of their metrics get; ``""`` for the first.
        objective: the loss and the metrics.
        identity: what ``state.json`` keeps of the run and a resumed run must share, by name.
        bucketing: whether batches hold rows of like lengths.
        shuffle: whether an epoch has an order of its own; else it has the order of the rows, without bucketing.
    """

    def __init__(
        self,
        job: FineTuningJob,
        name: str,
        train: SizedRows,
        validation: Mapping[str, RowSet],
        objective: Objective,
        *,
        identity: Mapping[str, Identity] | None = None,
        bucketing: bool = True,
        shuffle: bool = True,
    ) -> None:
        self.status = ""
        self.train: Any = train  # a `RowSet`, or what a task with batches of its own takes in its place
        self.validation, self.objective = validation, objective
        self._identity = identity or {}
        self._bucketing, self._shuffle = bucketing and shuffle, shuffle
        self.job = job.with_steps(len(train))
        schedule = self.job.schedule
        logger.info(
            "%s: %d rows of %.1f tokens, %d steps (%d of warmup)",
            *(name, len(train), train.lengths.mean(), schedule.max_steps, schedule.warmup_steps),
        )

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The pretrained model under a new head; called after the seed of the initialisation has been set."""

    @abstractmethod
    def flops_per_row(self, length: float) -> float:
        """Forward FLOP of a row of ``length`` tokens, a multiply-add being 2."""

    def build_modules(self) -> Mapping[str, nn.Module]:
        """The model, whose new parts are initialised from the seed."""
        torch.manual_seed(derive(self.job.run.seed, "init"))
        return {"model": self.build_model()}

    def optimizers(self) -> Mapping[str, Any]:
        """No module has an optimizer of its own: ``job.optimizer`` says how the model is updated."""
        return {}

    def build_batches(self, progress: Progress) -> Iterator[StepBatches]:
        """This rank's micro-batches of each coming step."""
        size, seed = self.job.batch.global_, self.job.run.seed
        order = ExampleOrder(self.train.lengths, size, seed, bucketing=self._bucketing, shuffle=self._shuffle)
        steps = self.job.schedule.max_steps - progress.step
        starts = range(progress.samples, progress.samples + steps * size, size)
        world, rank = distributed.world_size(), distributed.rank()
        micro = self.job.micro_batch(world)
        return training_steps(self.train, order, starts, micro, world, rank, bucketing=self._bucketing)

    def step(self, engines: Mapping[str, Engine], batch: StepBatches, progress: Progress) -> StepMetrics:
        """Do one optimizer step on the mean loss of its examples (of all ranks and micro-batches)."""
        engine = engines["model"]
        total = torch.zeros((), device=engine.device)
        for part in batch.micro_batches:
            part = part.to(engine.device)
            loss = self.objective.loss(engine(*part.inputs), part.labels)
            engine.backward(loss)
            # The engine updates at the last micro-batch of the step.
            engine.step(loss)
            total += loss.detach() / len(batch.micro_batches)
        progress.samples += self.job.batch.global_
        progress.tokens += batch.tokens
        return {"loss": total, "grad_norm": engine.gradient_norm()}

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """The objective's metrics over every row of the dev sets, the same on every rank."""
        engine = engines["model"]
        size = 2 * self.job.micro_batch(distributed.world_size())  # no gradients: twice the rows fit
        return {**evaluate_sets(engine, self.validation, self.objective, size, engine.device)}

    def save_state(self, folder: Path) -> dict[str, Any]:
        """There is no state beside the parameters; the identity is kept, to be compared on resuming."""
        return {name: identity.value for name, identity in self._identity.items()}

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another identity, such as one of another data set or tokenizer.

        Raises:
            CheckpointError: the checkpoint's value differs, or is missing.
        """
        for name, (value, key) in self._identity.items():
            stored = state.get(name)
            if not isinstance(stored, str):
                raise CheckpointError(f"{folder / 'state.json'}: damaged: {name} must be text, it is {shown(stored)}")
            if stored != value:
                raise CheckpointError(
                    f"{folder}: trained on {stored[:200]}, this job's {key} is {value}; resume it with the "
                    "configuration that it began with, or start a run of its own"
                )

    def flops_per_step(self) -> float:
        """Forward and backward FLOP of a global batch of average length."""
        return 3.0 * self.job.batch.global_ * self.flops_per_row(float(self.train.lengths.mean()))

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Look at the dev metric, compare runs, and export the model."""
        measured = best_so_far(run_dir, self.job, len(self.train)) or self.objective.metric
        return [
            f"capt evaluate {quoted(run_dir)} ({measured} on the dev set)",
            f"capt report {quoted(run_dir)} (its curves; several runs: their table)",
            f"capt convert {quoted(run_dir)} OUT --to hf (for transformers)",
        ]

    def export_files(self) -> Mapping[str, Path]:
        """No file travels with the checkpoints; a task with a tokenizer or an answer table names them here."""
        return {}


def best_so_far(run_dir: Path, job: FineTuningJob, examples: int) -> str | None:
    """The dev metric and the epoch of a run's best checkpoint, for a training set of this size.

    None is returned for a run that has kept no best checkpoint.
    """
    best = read_best(run_dir)
    if best is None:
        return None
    epoch = best.step * job.batch.global_ / examples
    return f"best {best.metric} {best.value:.4f} at epoch {epoch:.3g}, step {best.step},"
