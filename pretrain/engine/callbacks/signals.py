"""SIGTERM, SIGUSR1, Ctrl-C and ``schedule.stop_after``: all ranks stop at the same step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from pretrain.engine import distributed
from pretrain.engine.loop import Callback, Run
from pretrain.engine.task import Report

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignals(Callback):
    """A signal on any rank stops every rank after the same step; the Checkpointer then saves and the job exits 75.

    A second Ctrl-C ends the process at once. ``stop_after`` counts only for a run that begins before that step. After
    a signal the handlers stay: launchers and schedulers often send it twice, and a late one must not end a saving job.
    """

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[int, Any] = {}

    def on_start(self, run: Run) -> None:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        stop = run.job.schedule.stop_after
        self._stop_after = stop if stop is not None and stop > run.progress.step else None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self._received = number

    def after_step(self, run: Run, report: Report) -> None:
        received = distributed.highest_over_ranks(self._received)
        self._received = self._received or received  # one that came meanwhile is not lost
        if run.finished:
            return
        if received:
            run.stopping = f"{signal.Signals(received).name} received"
        elif self._stop_after is not None and run.progress.step >= self._stop_after:
            run.stopping = f"schedule.stop_after={self._stop_after} reached"

    def close(self, run: Run) -> None:
        if not self._received:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
