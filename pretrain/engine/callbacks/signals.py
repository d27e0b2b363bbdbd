"""SIGTERM, SIGUSR1, Ctrl-C and ``schedule.stop_after``: all ranks stop at the same step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from pretrain.engine import distributed
from pretrain.engine.loop import Callback, Run
from pretrain.engine.task import Report

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignals(Callback):
    """A signal on any rank stops every rank after the same step; the Checkpointer then saves and the job exits 75.

    The agreement goes over a CPU group, so that no GPU is made to wait. A second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None

    def on_start(self, run: Run) -> None:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        if distributed.world_size() > 1 and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self._received = number

    def after_step(self, run: Run, report: Report) -> None:
        flag = torch.tensor(self._received, dtype=torch.int32)
        if distributed.world_size() > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        if run.finished:
            return
        if int(flag):
            run.stopping = f"{signal.Signals(int(flag)).name} received"
        elif run.job.schedule.stop_after is not None and run.progress.step >= run.job.schedule.stop_after:
            run.stopping = f"schedule.stop_after={run.job.schedule.stop_after} reached"

    def close(self, run: Run) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
