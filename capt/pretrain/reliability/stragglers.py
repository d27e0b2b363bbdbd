"""Names a rank that is slower than the others by itself, and so makes all of them wait."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from statistics import median_low

import torch

from capt.pretrain.base import distributed
from capt.pretrain.engine import own_time
from capt.pretrain.engine.loop import NEVER, Callback, Run
from capt.pretrain.engine.task import ChunkedTask, StepMetrics, is_logged, to_float

logger = logging.getLogger(__name__)

_SLOWER = 1.3
"""A rank is slow that takes this multiple of the median of all ranks,"""
_SHARE = 0.1
"""and whose excess over the median is at least this part of a step,"""
_LOGS, _STEPS = 3, 10
"""in this number of logs in a row, of this number of steps together: a hiccup is not worth a line."""


class Stragglers(Callback):
    """In logged steps: each rank's own seconds a step (`capt.pretrain.engine.own_time`) are gathered and compared.

    ``own_time_ratio`` in the metrics is the largest over the median. A rank that stays slow is named in the progress
    line as long as it is, and warned of once. Not for tasks that do many updates in one call, and not for one rank.
    """

    def on_start(self, run: Run) -> None:
        self._on = distributed.world_size() > 1 and not isinstance(run.task, ChunkedTask)
        own_time.measure(self._on)
        self._since = run.progress.step
        self._slow = [(0, 0)] * distributed.world_size()
        """For each rank: the number of consecutive logs in which it was slow, and of their steps."""
        self._warned: set[int] = set()

    def after_step(self, run: Run, report: StepMetrics) -> None:
        step = run.progress.step
        if not self._on or not is_logged(run.job, step):
            return
        steps, self._since = step - self._since, step
        own, whole = own_time.take() / steps, to_float(report["seconds_per_step"])
        both = torch.tensor([own, whole], dtype=torch.float32, device=distributed.device())
        seconds, wholes = distributed.all_gather(both).T.tolist()
        report["own_time_ratio"] = max(seconds) / max(median_low(seconds), 1e-9)
        for rank, slow in enumerate(slow_ranks(seconds, max(wholes))):
            logs, before = self._slow[rank]
            self._slow[rank] = (logs + 1, before + steps) if slow else (0, 0)
        run.remarks["slow"] = self._remark(seconds)

    def next_due(self, run: Run) -> int:
        return NEVER

    def close(self, run: Run) -> None:
        own_time.measure(False)

    def _remark(self, seconds: Sequence[float]) -> str:
        slow = [rank for rank, (logs, steps) in enumerate(self._slow) if logs >= _LOGS and steps >= _STEPS]
        if not slow:
            return ""
        hosts = distributed.gather_objects(socket.gethostname())
        middle = max(median_low(seconds), 1e-9)
        worst = max(slow, key=lambda rank: seconds[rank])
        remark = f"rank {worst} ({hosts[worst]}) {seconds[worst] / middle:.1f}x slower"
        if worst not in self._warned and distributed.rank() == 0:
            logger.warning(
                "%s than the median of all ranks in data and forward passes (%.3g s a step, not %.3g), so all wait for "
                "it: look for other processes, a throttled or failing device, or a slow disk on that host, or leave it "
                "out", remark, seconds[worst], middle,
            )  # fmt: skip
        self._warned.add(worst)
        return remark


def slow_ranks(seconds: Sequence[float], step: float) -> list[bool]:
    """Return which ranks are slow by their own ``seconds`` of a step that takes ``step`` seconds.

    The median of an even number is the lower one, so that of two ranks the slow one is seen.
    """
    middle = median_low(seconds)
    return [each > _SLOWER * middle and each - middle > _SHARE * step for each in seconds]
