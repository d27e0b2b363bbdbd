"""Validation; rank 0's ``metrics.jsonl`` (an object a line, null for a number that is not finite) and TensorBoard."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import finite
from capt.pretrain.engine import heartbeat
from capt.pretrain.engine.durable import GrowingFile, is_full
from capt.pretrain.engine.loop import Callback, Run, next_multiple
from capt.pretrain.engine.metrics_file import METRICS, drop_rows_after
from capt.pretrain.engine.task import CheckedValidation, Metric, StepMetrics, TextTask, is_logged, to_float
from capt.pretrain.registry import retrieval_validation

logger = logging.getLogger(__name__)


def global_means(report: Mapping[str, Metric]) -> dict[str, float]:
    """Average every metric of a report over the ranks, in one collective (the names are the same on all ranks)."""
    names = sorted(report)
    values = torch.tensor([to_float(report[name]) for name in names], dtype=torch.float64)
    if distributed.world_size() > 1:
        values = distributed.all_reduce_sum(values.to(distributed.device())).cpu() / distributed.world_size()
    return dict(zip(names, values.tolist(), strict=True))


class Metrics(Callback):
    """Logs every ``run.log_every`` steps. A resumed run first drops rows of steps that will be done again.

    A full disk does not stop the training: the rows wait until there is space, TensorBoard is given up. Before a
    checkpoint the rows are made durable, so that a host which loses its power keeps those of every step in it.
    ``listeners`` are told of every row, on every rank.
    """

    follows = ("Throughput", "Stragglers")  # which add to the report that is logged

    def __init__(self, listeners: Sequence[Callback] = ()) -> None:
        self._listeners = listeners
        self._file: GrowingFile | None = None
        self._board: Any = None
        self._warned = False
        self.latest: dict[str, float] = {}
        """The last logged training values, averaged over the ranks."""

    def on_start(self, run: Run) -> None:

        def make_durable() -> None:
            with distributed.synchronize_errors():
                if self._file is not None:
                    self._file.sync()

        # On every rank, for it is collective; the file is rank 0's.
        run.records.append(make_durable)
        if distributed.rank() != 0:
            return
        path = run.dir / METRICS
        drop_rows_after(path, run.progress.step)
        self._file = GrowingFile(path)
        if run.job.run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard then drops what it has of the steps that are done again.
            self._board = SummaryWriter(run.dir / "tensorboard", purge_step=run.progress.step + 1)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if is_logged(run.job, run.progress.step):
            self.latest = self.write(run, report)

    def next_due(self, run: Run) -> int:
        return next_multiple(run.progress.step, run.job.run.log_every)

    def write(self, run: Run, report: StepMetrics, split: str | None = None) -> dict[str, float]:
        """Average a report over the ranks and append it; returns the averaged values (on every rank)."""
        values = global_means(report)
        if self._file is not None:
            head: dict[str, Any] = {"step": run.progress.step} | ({"split": split} if split else {})
            lost = {"failed_saves": run.failed_saves} if run.failed_saves else {}
            row = head | run.progress.to_json() | values | lost
            try:
                self._file.append(json.dumps(finite(row), allow_nan=False).encode() + b"\n")
            except OSError as error:
                self._tolerate(error, "training continues, and what is not written waits")
        if self._board is not None:
            self._draw({f"{split}/{name}" if split else name: value for name, value in values.items()}, run)
        for listener in self._listeners:
            listener.on_metrics(run, values, split)
        return values

    def _draw(self, values: Mapping[str, float], run: Run) -> None:
        try:
            for name, value in values.items():
                self._board.add_scalar(name, value, run.progress.step)
        except OSError as error:  # of its thread, which is over
            self._board, self._warned = None, False
            self._tolerate(error, "training continues without TensorBoard")

    def _tolerate(self, error: OSError, what: str) -> None:
        """Say once that the disk is full. Another error is raised."""
        if not is_full(error):
            raise error
        if not self._warned:
            logger.warning("%s; %s", error, what)
        self._warned = True

    def close(self, run: Run) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            with suppress(OSError):  # a full disk
                self._board.close()


# Runs the task's validation every ``validate.every`` steps, after those of ``validate.also``, and at the end, when the
# last checkpoint is written.
#
# With ``validate.first`` it also runs before the first step, so that the table of a run has its baseline. With
# ``validate.retrieval`` it measures retrieval as well, of a task that makes vectors of texts.


class Validator(Callback):
    """Validates. The rows of a validation carry ``"split": "validation"`` in ``metrics.jsonl``."""

    follows = ("Agreement", "Replicas", "Metrics")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._off = False
        self._retrieval: Any = None

    def on_start(self, run: Run) -> None:
        section = getattr(run.job.validate_, "retrieval", None)
        best = run.job.checkpoint.best
        with distributed.synchronize_errors():
            fault = run.task.validation_fault() if isinstance(run.task, CheckedValidation) else ""
            # Retrieval has texts of its own, so that the best checkpoint may be chosen by it without validation data.
            searched = section is not None and best in section.metric_names()
            if fault and best is not None and not searched:
                raise ConfigError(f"checkpoint.best {best}: nothing can be validated: {fault}")
        self._off = bool(fault)
        if fault and distributed.rank() == 0:
            logger.warning("validation is off: %s", fault)
        if section is not None and section.folders and isinstance(run.task, TextTask):
            self._retrieval = retrieval_validation(section)

    def on_ready(self, run: Run) -> None:
        if run.job.validate_.first and run.progress.step == 0:
            self._validate(run)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        section, step = run.job.validate_, run.progress.step
        due = step in section.also or (section.every > 0 and step % section.every == 0)
        # The validation after the last step is in on_end, when that step is saved.
        if due and not run.finished:
            self._validate(run)

    def next_due(self, run: Run) -> int:
        section, step = run.job.validate_, run.progress.step
        return min([next_multiple(step, section.every), *(at for at in section.also if at > step)])

    def on_end(self, run: Run) -> None:
        if run.finished:
            self._validate(run)

    def _validate(self, run: Run) -> None:
        searches = self._retrieval is not None and self._retrieval.is_due(run.progress.step, run.job.schedule.max_steps)
        if (self._off and not searches) or run.validated_at == run.progress.step:
            return
        run.settle()  # of a state that has diverged there is nothing to measure
        before = heartbeat.enter("validation")
        with run.pause():
            for engine in run.engines.values():
                engine.eval()
            with torch.no_grad():
                report = {} if self._off else run.task.validate(run.engines, run.progress)
                if searches:
                    heartbeat.enter("retrieval")
                    report |= self._retrieval.measure(run.task, run.engines)
            for engine in run.engines.values():
                engine.train()
        run.validation = self._metrics.write(run, report, split="validation") if report else {}
        run.validated_at = run.progress.step
        heartbeat.enter(before)
