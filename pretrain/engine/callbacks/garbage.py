"""Takes Python's cyclic garbage collector out of the step, where it stalls ranks at different times."""

from __future__ import annotations

import gc

from pretrain.engine.loop import NEVER, Callback, Run
from pretrain.engine.task import StepMetrics

_EVERY = 200


class GarbageCollector(Callback):
    """Freezes what exists after the first step and collects every 200 steps, on all ranks at the same one."""

    def __init__(self) -> None:
        self._first = True

    def on_start(self, run: Run) -> None:
        gc.disable()
        self._last = run.progress.step

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if self._first:
            self._first = False
            gc.collect()
            gc.freeze()
        elif run.progress.step // _EVERY > self._last // _EVERY:
            gc.collect(1)
        self._last = run.progress.step

    def next_due(self, run: Run) -> int:
        return NEVER

    def close(self, run: Run) -> None:
        gc.unfreeze()
        gc.enable()
