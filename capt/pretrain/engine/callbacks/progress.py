"""Show progress to a person: a display that fits the terminal, or a line an interval; at the end the outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.table import Table
from rich.text import Text

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import printable
from capt.pretrain.config.load import flat_keys
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.callbacks.metrics import Metrics
from capt.pretrain.engine.judgement import best_of, direction, error_of, judge, judged_metric, series, trained_on
from capt.pretrain.engine.loop import NEVER, Callback, Run
from capt.pretrain.engine.metrics_file import METRICS, read_metrics
from capt.pretrain.engine.task import StepMetrics, is_logged

logger = logging.getLogger(__name__)

_BAR, _LONGEST_BAR, _LONGEST_NAME = 10, 40, 24
"""Columns that a bar has at least and at most, and a run's name at most."""
_SLOW = 5.0
"""Seconds of a first step from which on a log without a display says that training has begun."""


@dataclass
class ProgressView:
    """Picture of a run on a terminal: bar, step, total and time left in a line, and below it figures and remarks.

    Nothing is cut: the name and the bar shrink or go, and figures continue on the next line.
    """

    name: str
    total: int
    done: int = 0
    left: str = "-:--:--"
    figures: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def lines(self, width: int) -> list[Text]:
        """Lay it out in lines of at most ``width`` columns."""
        facts = [
            Text(f"{self.done}/{self.total}", "bold"),
            Text(f"{self._share():.0%}"),
            Text(f"eta {self.left}", "cyan"),
        ]
        name = Text(printable(self.name))
        name.truncate(min(_LONGEST_NAME, max(width // 4, 8)), overflow="ellipsis")
        head = [name, *facts]
        # Where not all fits, name and percentage go first.
        if _width(head) > width:
            head = [facts[0], facts[2]]
        figures = [Text(figure) for figure in self.figures]
        # All in one line where a bar still fits beside it; remarks have lines of their own.
        together = not self.remarks and _width([*head, *figures]) + 2 + _BAR <= width
        if together:
            head += figures
        room = min(width - _width(head) - 2, _LONGEST_BAR)
        if room >= _BAR and head[0] is name:
            head.insert(1, self._bar(room))
        lines = [Text("  ").join(head)]
        remarks = [Text(printable(remark), "bold yellow") for remark in self.remarks]
        for group in ([] if together else figures, remarks):
            lines += _wrapped(group, width)
        return lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self.lines(options.max_width):
            # A single fact that is wider than the terminal is folded, not cut.
            line.no_wrap, line.overflow = len(line) <= options.max_width, "fold"
            yield line

    def _share(self) -> float:
        return min(1.0, self.done / max(self.total, 1))

    def _bar(self, width: int) -> Text:
        full = round(width * self._share())
        return Text("━" * full, "green") + Text("━" * (width - full), "bright_black")


def _width(parts: Sequence[Text]) -> int:
    return sum(part.cell_len for part in parts) + 2 * (len(parts) - 1)


def _wrapped(parts: Sequence[Text], width: int) -> list[Text]:
    """Fill lines with whole parts, two spaces between them."""
    lines: list[list[Text]] = []
    for part in parts:
        if lines and _width([*lines[-1], part]) <= width:
            lines[-1].append(part)
        else:
            lines.append([part])
    return [Text("  ").join(line) for line in lines]


class ProgressDisplay(Callback):
    """Show the parts of the loss, temperature, learning rate, tokens per second and time left, every ``run.log_every``
    steps, and the values of each validation: as a table on a terminal, elsewhere as a line.

    The training loss itself is not shown where it has parts: their weights and the temperature change what it means.
    A terminal that was closed ends the display and not the run.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._live: Live | None = None
        self._shown_at = -1
        self._before: Mapping[str, float] = {}

    def on_start(self, run: Run) -> None:
        self._began, self._first = time.monotonic(), run.progress.step
        self._ready: float | None = self._began
        self._shown_at, self._before = run.validated_at, run.validation
        console = Console(stderr=True)
        if distributed.rank() == 0 and console.is_terminal:
            self._view = ProgressView(run.dir.name, run.job.schedule.max_steps, run.progress.step)
            self._live = Live(self._view, console=console, refresh_per_second=4)
            self._show(Live.start)

    def on_ready(self, run: Run) -> None:
        self._tell_validation(run)  # the baseline, before the figures of step 1
        self._ready = time.monotonic()

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if self._live is not None:
            self._view.done, self._view.left = run.progress.step, self._left(run)
        if is_logged(run.job, run.progress.step) and distributed.rank() == 0:
            self._tell_step(run)
        elif self._ready is not None and self._live is None and distributed.rank() == 0:
            self._tell_first(run, time.monotonic() - self._ready)
        self._ready = None
        self._tell_validation(run)

    def next_due(self, run: Run) -> int:
        return NEVER

    def _left(self, run: Run, seconds: float | None = None) -> str:
        """The time left at the pace so far; ``seconds`` is what the steps took, by default all since the start."""
        # By samples and not steps: batch.ramp makes later steps longer.
        samples_before = run.job.batch_sizes.samples_before
        done, first = samples_before(run.progress.step), samples_before(self._first)
        each = (time.monotonic() - self._began if seconds is None else seconds) / max(done - first, 1)
        return str(timedelta(seconds=round(each * (samples_before(run.job.schedule.max_steps) - done))))

    def _tell_first(self, run: Run, seconds: float) -> None:
        """Say how long the first step took and all would take, where the first figures are some way off."""
        if seconds >= _SLOW:
            logger.info(
                "step %d/%d took %.1f s, which makes %s for the others; figures come every %d steps (run.log_every)",
                run.progress.step, run.job.schedule.max_steps, seconds, self._left(run, seconds), run.job.run.log_every,
            )  # fmt: skip

    def _tell_step(self, run: Run) -> None:
        remarks = [text for text in (run.task.status, *run.remarks.values()) if text]
        if self._live is not None:
            self._view.figures, self._view.remarks = figures(self._metrics.latest), remarks
        if not self._show(Live.refresh):
            values = summary(self._metrics.latest, "  ".join(remarks))
            logger.info("step %d/%d eta %s %s", run.progress.step, run.job.schedule.max_steps, self._left(run), values)

    def on_end(self, run: Run) -> None:
        self._tell_validation(run)
        self.close(run)

    def _tell_validation(self, run: Run) -> None:
        if run.validated_at == self._shown_at:
            return
        self._shown_at = run.validated_at
        if run.validation and distributed.rank() == 0:
            table = validation_table(self._shown_at, run.validation, self._before, run.job)
            if not self._show(lambda live: live.console.print(table)):
                logger.info("step %d validation: %s", self._shown_at, validation_summary(run.validation, run.job))
            self._before = run.validation

    def close(self, run: Run) -> None:
        self._show(Live.stop)

    def _show(self, action: Callable[[Live], object]) -> bool:
        """Do it with the display; return whether there is one, for it goes when the terminal is gone."""
        if self._live is None:
            return False
        try:
            action(self._live)
        except OSError as error:
            live, self._live = self._live, None
            with suppress(OSError):
                live.stop()
            logger.warning("the terminal takes no more output (%s): no progress bar from here on", error.strerror)
        return self._live is not None


def figures(values: Mapping[str, float]) -> list[str]:
    """Return the metrics of a step, each as a short text that stays together."""
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
    return parts


def summary(values: Mapping[str, float], status: str = "") -> str:
    """Return the metrics of a step in one short line, with what the task and the guards remark."""
    return "  ".join([*figures(values), status] if status else figures(values))


def _shown(values: Mapping[str, float], job: Job) -> list[str]:
    """Return the names of the values that a person is shown, that of ``checkpoint.best`` first.

    Those of finer detail, with two slashes in their names, are in ``metrics.jsonl`` alone.
    """
    shown = [name for name in values if name.count("/") < 2 and name != "validation_samples"]
    return sorted(shown, key=lambda name: name != job.checkpoint.best)


def validation_summary(values: Mapping[str, float], job: Job) -> str:
    """Return the values of a validation in one line, that of ``checkpoint.best`` first."""
    return "  ".join(f"{name} {_with_error(values, name)}" for name in _shown(values, job))


def _with_error(values: Mapping[str, float], name: str) -> str:
    """Return a value with its standard error, where that is known."""
    error = values.get(error_of(name))
    return f"{values[name]:.4g}" + ("" if error is None else f" ±{error:.2g}")


def validation_table(step: int, values: Mapping[str, float], before: Mapping[str, float], job: Job) -> Table:
    """Return the values of a validation as a table, with the change since the one before: green where it is better."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(f"validation at step {step}", overflow="fold")
    for header in ("value", *(["change"] if before else [])):
        table.add_column(header, justify="right", no_wrap=True)
    for name in _shown(values, job):
        change = Text()
        if name in before:
            difference = values[name] - before[name]
            # Above 0 the change is for the better; 0 also where the name does not tell.
            sign = direction(name) * difference
            change = Text(f"{difference:+.2g}", "green" if sign > 0 else "yellow" if sign < 0 else "")
        table.add_row(Text(printable(name)), Text(_with_error(values, name)), *([change] if before else []))
    return table


# At the end of a finished run: what came of it, and the commands that its user may want next.


class NextSteps(Callback):
    """Log time, tokens, validation and a judgement, and each line of the task's ``next_steps``.

    It comes last, when the checkpoint is already there, and nothing in it can fail the run.
    """

    def on_start(self, run: Run) -> None:
        self._began, self._first = time.monotonic(), run.progress.step

    def next_due(self, run: Run) -> int:
        return NEVER

    def on_end(self, run: Run) -> None:
        if run.finished and distributed.rank() == 0:
            for line in self._outcome(run):
                logger.info("%s", line)
            for line in run.task.next_steps(run.dir):
                logger.info("next: %s", line)

    def _outcome(self, run: Run) -> Iterator[str]:
        took = timedelta(seconds=round(time.monotonic() - self._began))
        since = f" since step {self._first}" if self._first else ""
        tokens = f", {run.progress.tokens:,} tokens" if run.progress.tokens else ""
        yield f"done: step {run.progress.step}{tokens}; {took}{since}"
        try:
            rows = read_metrics(run.dir / METRICS)
        except (DataError, OSError) as error:
            logger.warning("%s; no judgement of the run", error)
            return
        best = run.job.checkpoint.best
        config = flat_keys(run.job)
        training, validation = (trained_on(part, config, best) for part in (rows.training, rows.validation))
        metric = judged_metric(validation, best)
        values = series(validation, metric) if metric else []
        if metric is not None and direction(metric) and values:
            step, value = best_of(values, metric)
            spread = series(validation, error_of(metric))
            about = f" ±{spread[-1][1]:.2g}" if spread else ""
            yield f"validation: {metric} {values[-1][1]:.4g}{about} at the end, best {value:.4g} at step {step}"
        yield f"judgement: {judge(training, validation, best)}"
