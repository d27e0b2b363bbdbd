"""The ``glue`` task: cross entropy (or squared error for STS-B) on one optimizer step, metrics on the whole dev set."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn

from finetune.backbone import load_backbone
from finetune.batches import Step, training_steps
from finetune.glue.config import GlueJob
from finetune.glue.data import dev_rows, train_rows
from finetune.glue.outputs import all_logits, loss_of, metrics_of
from finetune.glue.restore import classifier_on
from finetune.glue.tasks import GlueTask, glue_task
from finetune.order import Order
from pretrain.base.errors import CheckpointError
from pretrain.base.records import Record, parse_record
from pretrain.config.schema import Job
from pretrain.engine import distributed
from pretrain.engine.engines.base import Engine
from pretrain.engine.optim.settings import ModuleOptimizer
from pretrain.engine.run_folder import read_best
from pretrain.engine.seeding import derive
from pretrain.engine.task import Progress, StepMetrics

logger = logging.getLogger(__name__)


class _State(Record):
    """What :meth:`GlueFineTuning.save_state` puts into ``state.json``: the tokenizer's fingerprint, the task's name."""

    tokenizer: str = Field(max_length=200)
    task: str = Field(max_length=200)


class GlueFineTuning:
    """A classifier on a pretrained encoder (Liu et al. 2019, section 5.1)."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, GlueJob)
        self.task: GlueTask = glue_task(job.data.task)
        torch.manual_seed(derive(job.run.seed, "init"))
        section = job.model
        self._backbone = load_backbone(
            section.init,
            dropout=section.dropout,
            attention_dropout=section.attention_dropout,
            allow_missing=section.allow_missing,
        )
        self.tokenizer, encoder = self._backbone.tokenizer, self._backbone.encoder
        length = job.longest(encoder.max_positions)
        options: dict[str, Any] = {"types": encoder.reads_types}
        self.train = train_rows(job.data, self.task, self.tokenizer, length, **options)
        self.dev = dev_rows(job.data, self.task, self.tokenizer, length, **options)
        self.status = ""
        self.job = job.completed(len(self.train), self._backbone.hf_config, encoder.max_positions)
        schedule = self.job.schedule
        logger.info(
            "%s: %d rows of %.1f tokens, %d steps (%d of warmup)", self.task.folder, len(self.train),
            self.train.lengths.mean(), schedule.max_steps, schedule.warmup_steps,
        )  # fmt: skip
        self._tokenizer_folder = run_dir / "tokenizer"

    def build_modules(self) -> Mapping[str, nn.Module]:
        """The pretrained encoder under a new head, which is initialised from the seed."""
        torch.manual_seed(derive(self.job.run.seed, "init"))
        return {"model": classifier_on(self._backbone.encoder, self.job)}

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """None of its own."""
        return {}

    def build_batches(self, progress: Progress) -> Iterator[Step]:
        """This rank's micro-batches of each coming step."""
        batch, data = self.job.batch, self.job.data
        bucketing = data.bucketing and data.shuffle
        order = Order(self.train.lengths, batch.global_, self.job.run.seed, bucketing=bucketing, shuffle=data.shuffle)
        steps = self.job.schedule.max_steps - progress.step
        starts = range(progress.samples, progress.samples + steps * batch.global_, batch.global_)
        world, rank = distributed.world_size(), distributed.rank()
        return training_steps(self.train, order, starts, batch.micro, world, rank, bucketing=bucketing)

    def step(self, engines: Mapping[str, Engine], batch: Step, progress: Progress) -> StepMetrics:
        """One optimizer step on the mean loss of its examples (all ranks, all micro-batches)."""
        engine = engines["model"]
        total = torch.zeros((), device=engine.device)
        for part in batch.parts:
            part = part.to(engine.device)
            assert part.labels is not None
            loss = loss_of(self.task, engine(part.tokens, part.types, part.padded), part.labels)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(batch.parts)
        progress.samples += self.job.batch.global_
        progress.tokens += batch.tokens
        return {"loss": total, "grad_norm": engine.gradient_norm()}

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """The task's metrics over the whole dev set, ``loss``, ``degenerate`` and ``baseline`` (`measure`).

        MNLI's are of the matched set; those of the other end in ``_mismatched``.
        """
        engine = engines["model"]
        report: StepMetrics = {}
        for suffix, rows in self.dev.items():
            logits = all_logits(engine, rows, 2 * self.job.batch.micro, engine.device)
            assert rows.labels is not None
            found = metrics_of(self.task, logits, rows.labels)
            report |= {f"{name}{suffix}": value for name, value in found.items()}
        return report

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Nothing beside the parameters; the tokenizer's fingerprint and the task are compared on resuming."""
        return {"tokenizer": self.tokenizer.fingerprint, "task": self.task.name}

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Refuse another task's checkpoint, or one trained with another tokenizer.

        Raises:
            CheckpointError: it is one of these.
        """
        stored = parse_record(_State, state, folder / "state.json", error=CheckpointError)
        if stored.task != self.task.name:
            raise CheckpointError(f"{folder}: trained on {stored.task}, this job's data.task is {self.task.name}")
        if stored.tokenizer != self.tokenizer.fingerprint:
            raise CheckpointError(f"{folder}: trained with another tokenizer than that of {self.job.model.init}")

    def flops_per_step(self) -> float:
        """Forward and backward FLOP of a global batch of average length."""
        length = float(self.train.lengths.mean())
        return 3.0 * self.job.batch.global_ * self._backbone.encoder.flops(length, read=1.0)

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Look at the dev metric, and compare runs."""
        measured = best_so_far(run_dir, self.job, len(self.train)) or self.task.metric
        return [
            f"capt evaluate {run_dir} ({measured} on the dev set)",
            f"capt report {run_dir} (its curves; several runs: their table)",
        ]

    def export_files(self) -> Mapping[str, Path]:
        """The tokenizer travels with every checkpoint."""
        self.tokenizer.save(self._tokenizer_folder)
        return {"tokenizer": self._tokenizer_folder}


def best_so_far(run_dir: Path, job: GlueJob, examples: int) -> str | None:
    """The dev metric of the best checkpoint of a run over so many rows, and its epoch; None where none is kept."""
    best = read_best(run_dir)
    if best is None:
        return None
    epoch = best.step * job.batch.global_ / examples
    return f"best {best.metric} {best.value:.4f} at epoch {epoch:.3g}, step {best.step},"


TASK = GlueFineTuning
