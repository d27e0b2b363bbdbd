"""All ranks end a run after the same step: for a signal, for ``schedule.stop_after``, or because it has diverged."""

from __future__ import annotations

import math
import signal

import torch
from torch import Tensor

from pretrain.base.errors import RunFailedError
from pretrain.engine.callbacks.signals import StopSignals
from pretrain.engine.flags import Flags
from pretrain.engine.loop import NEVER, Callback, Run
from pretrain.engine.task import Metric, StepMetrics, to_float

_WATCHED = ("loss", "grad_norm")


class TrainingDivergedError(RunFailedError):
    """The loss or the gradient norm is not finite."""


class Agreement(Callback):
    """A signal on any rank stops every rank after the same step; the Checkpointer then saves and the job exits 75.
    A loss or a gradient norm that is no number on any rank raises :class:`TrainingDivergedError` on all of them.

    Ranks hear of either some steps late (:mod:`pretrain.engine.flags`), except in the last steps and wherever
    ``run.settle()`` is called, as before each save: a state that has diverged is never written. ``stop_after`` counts
    only for a run that begins before that step. An fp16 overflow, which the loss scaler answers by skipping the update,
    is no divergence.
    """

    def __init__(self) -> None:
        self._signals = StopSignals()
        self._watched: dict[int, dict[str, Metric]] = {}

    def on_start(self, run: Run) -> None:
        self._flags = Flags()
        self._signals.install()
        stop = run.job.schedule.stop_after
        self._stop_after = stop if stop is not None and stop > run.progress.step else None
        self._looked = run.progress.step
        run.settle = lambda: self._read(run, run.progress.step)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        step, lag = run.progress.step, self._flags.lag
        skipped = any(engine.update_was_skipped() for engine in run.engines.values())
        watched = {} if skipped else {name: report[name] for name in _WATCHED if name in report}
        if lag:
            self._watched[step] = watched
            self._flags.post(step, self._row(run, watched))
            near_the_end = step + lag >= run.job.schedule.max_steps  # then there is no later step to stop at
            chunk_is_long = step - self._looked >= lag  # to look late would save nothing
            self._read(run, step if near_the_end or chunk_is_long else step - lag)
        else:  # alone, on a CPU: the numbers are at hand, and this is ten times as fast
            bad = not all(math.isfinite(to_float(figure)) for figure in watched.values())
            self._act(run, step, self._signals.received, bad, run.writing(), watched)
        self._looked = step
        if not run.stopping and not run.finished and self._stop_after is not None and step >= self._stop_after:
            run.stopping = f"schedule.stop_after={self._stop_after} reached"

    def next_due(self, run: Run) -> int:
        return NEVER if self._stop_after is None else max(self._stop_after, run.progress.step + 1)

    def _row(self, run: Run, watched: dict[str, Metric]) -> Tensor:
        """The signal, whether a save is on the way, and whether each watched figure is bad; without looking at one."""
        row = torch.zeros(2 + len(_WATCHED), device=self._flags.device)
        if self._signals.received:
            row[0].fill_(self._signals.received)
        if run.writing():
            row[1].fill_(1.0)
        for i, name in enumerate(_WATCHED, 2):
            figure = watched.get(name, 0.0)
            if isinstance(figure, Tensor) and figure.device == row.device:
                row[i].copy_(figure.detach().isfinite().logical_not())
            elif not math.isfinite(to_float(figure)):
                row[i].fill_(1.0)
        return row

    def _read(self, run: Run, until: int) -> None:
        for step, (received, writing, *bad) in self._flags.read(until):
            self._act(run, step, int(received), any(bad), bool(writing), self._watched.pop(step))

    def _act(
        self, run: Run, step: int, received: int, bad: bool, writing: bool, watched: dict[str, Metric]
    ) -> None:  # fmt: skip
        if bad:
            run.diverged = True
            raise TrainingDivergedError(_what(watched, step))
        if not writing:
            run.all_wrote_at = step
        self._signals.received = self._signals.received or received  # one that came meanwhile is not lost
        if received and not run.finished:
            run.stopping = f"{signal.Signals(received).name} received"

    def on_end(self, run: Run) -> None:
        run.settle()

    def close(self, run: Run) -> None:
        self._signals.restore()


def _what(watched: dict[str, Metric], step: int) -> str:
    values = {name: to_float(figure) for name, figure in watched.items()}
    here = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    return (
        f"{here[0] if here else 'loss or grad_norm is not finite on another rank'} at step {step}; resume from the "
        "last checkpoint with a lower optimizer.lr, a longer schedule.warmup_steps or optimizer.clip=1.0"
    )
