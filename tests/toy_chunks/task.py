"""The toy task with chunks of updates; it writes down where each of them ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from capt.pretrain.base import distributed
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Progress, StepMetrics, Updates
from tests.toy.config import ToyJob
from tests.toy.task import ToyTask


class ChunkedToyTask(ToyTask):
    def __init__(self, job: ToyJob, run_dir: Path) -> None:
        super().__init__(job, run_dir)
        self._ends = run_dir / f"ends-{distributed.rank()}.txt"

    def step_many(self, engines: Mapping[str, Engine], updates: Updates, progress: Progress) -> StepMetrics:
        end = progress.step + len(updates)
        for batch in updates:
            report = self.step(engines, batch, progress)
        with self._ends.open("a") as file:
            file.write(f"{end}\n")
        return report


TASK = ChunkedToyTask
