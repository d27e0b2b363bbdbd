"""Runs the task's validation every ``validate.every`` steps and at the end, when the last checkpoint is written."""

from __future__ import annotations

import logging

import torch

from pretrain.base import distributed
from pretrain.base.errors import ConfigError
from pretrain.engine import heartbeat
from pretrain.engine.callbacks.metrics import Metrics
from pretrain.engine.loop import Callback, Run, next_multiple
from pretrain.engine.task import CheckedValidation, StepMetrics

logger = logging.getLogger(__name__)


class Validator(Callback):
    """Validates. The rows of a validation carry ``"split": "validation"`` in ``metrics.jsonl``."""

    follows = ("Agreement", "Replicas", "Metrics")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._off = False

    def on_start(self, run: Run) -> None:
        with distributed.synchronize_errors():
            fault = run.task.validation_fault() if isinstance(run.task, CheckedValidation) else ""
            if fault and run.job.checkpoint.best is not None:
                raise ConfigError(f"checkpoint.best {run.job.checkpoint.best}: nothing can be validated: {fault}")
        self._off = bool(fault)
        if fault and distributed.rank() == 0:
            logger.warning("validation is off: %s", fault)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        every = run.job.validate_.every
        if every and run.progress.step % every == 0 and not run.finished:
            self._validate(run)

    def next_due(self, run: Run) -> int:
        return next_multiple(run.progress.step, run.job.validate_.every)

    def on_end(self, run: Run) -> None:
        if run.finished:
            self._validate(run)

    def _validate(self, run: Run) -> None:
        if self._off or run.validated_at == run.progress.step:
            return
        run.settle()  # of a state that has diverged there is nothing to measure
        before = heartbeat.enter("validation")
        for engine in run.engines.values():
            engine.eval()
        with torch.no_grad():
            report = run.task.validate(run.engines, run.progress)
        for engine in run.engines.values():
            engine.train()
        run.validation = self._metrics.write(run, report, split="validation") if report else {}
        run.validated_at = run.progress.step
        heartbeat.enter(before)
