"""Shows progress to a person: a bar on a terminal, elsewhere one line for each logging interval."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from pretrain.config.schema import Job
from pretrain.engine import distributed
from pretrain.engine.callbacks.metrics import Metrics
from pretrain.engine.loop import NEVER, Callback, Run
from pretrain.engine.task import StepMetrics, is_logged

logger = logging.getLogger(__name__)


class ProgressDisplay(Callback):
    """Shows the parts of the loss, temperature, learning rate, tokens per second, time left; every ``run.log_every``
    steps, and after each validation a line with its values.

    The training loss itself is not shown where it has parts: their weights and the temperature change what it means.
    A terminal that was closed ends the bar and not the run.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._bar: Bar | None = None
        self._told = -1

    def on_start(self, run: Run) -> None:
        self._began, self._first = time.monotonic(), run.progress.step
        self._told = run.validated_at
        console = Console(stderr=True)
        if distributed.rank() == 0 and console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[values]}"), console=console,
            )  # fmt: skip
            total = run.job.schedule.max_steps
            self._id = self._bar.add_task(run.dir.name, total=total, completed=run.progress.step, values="")
            self._show(Bar.start)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        due = is_logged(run.job, run.progress.step)
        self._show(lambda bar: bar.update(self._id, completed=run.progress.step))
        if due and distributed.rank() == 0:
            self._tell_step(run)
        self._tell_validation(run)

    def next_due(self, run: Run) -> int:
        return NEVER

    def _tell_step(self, run: Run) -> None:
        values = summary(self._metrics.latest, "  ".join(filter(None, (run.task.status, *run.remarks.values()))))
        if not self._show(lambda bar: bar.update(self._id, values=values)):
            done, total = run.progress.step, run.job.schedule.max_steps
            left = (time.monotonic() - self._began) / max(done - self._first, 1) * (total - done)
            logger.info("step %d/%d eta %s %s", done, total, timedelta(seconds=round(left)), values)

    def on_end(self, run: Run) -> None:
        self._tell_validation(run)
        self.close(run)

    def _tell_validation(self, run: Run) -> None:
        if run.validated_at == self._told:
            return
        self._told = run.validated_at
        if run.validation and distributed.rank() == 0:
            line = f"step {self._told} validation: {validation_summary(run.validation, run.job)}"
            if not self._show(lambda bar: bar.console.print(line, markup=False, highlight=False, soft_wrap=True)):
                logger.info("%s", line)

    def close(self, run: Run) -> None:
        self._show(Bar.stop)

    def _show(self, action: Callable[[Bar], object]) -> bool:
        """Do it with the bar, and return whether there is one. Where the terminal is gone there is none any more."""
        if self._bar is None:
            return False
        try:
            action(self._bar)
        except OSError as error:
            bar, self._bar = self._bar, None
            with suppress(OSError):
                bar.stop()
            logger.warning("the terminal takes no more output (%s): no progress bar from here on", error.strerror)
        return self._bar is not None


def summary(values: dict[str, float], status: str = "") -> str:
    """Return the metrics of a step in one short line, with what the task and the guards remark."""
    parts = [f"{name.removeprefix('loss/')} {value:.4f}" for name, value in values.items() if name.startswith("loss/")]
    if not parts and "loss" in values:
        parts = [f"loss {values['loss']:.4f}"]
    for name, label, form in (
        ("temperature", "tau", ".3f"),
        ("lr", "lr", ".2e"),
        ("grad_norm", "norm", ".2f"),
        ("tokens_per_second", "tok/s", ",.0f"),
        ("mfu", "mfu", ".1%"),
    ):
        if name in values and (values[name] or name != "tokens_per_second"):  # a job without tokens has none a second
            parts.append(f"{label} {values[name]:{form}}")
    return "  ".join([*parts, status] if status else parts)


def validation_summary(values: Mapping[str, float], job: Job) -> str:
    """Return the values of a validation in one line, that of ``checkpoint.best`` first.

    Those of finer detail, with two slashes in their names, are in ``metrics.jsonl`` alone.
    """
    shown = [name for name in values if name.count("/") < 2 and name != "validation_samples"]
    shown.sort(key=lambda name: name != job.checkpoint.best)
    return "  ".join(f"{name} {values[name]:.4g}" for name in shown)
