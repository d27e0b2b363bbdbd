"""The training loop: fetch, step, callbacks. Everything else is a callback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.config.schema import Job
from pretrain.engine.engines.base import Engine
from pretrain.engine.schedule import learning_rate
from pretrain.engine.seeding import seed_step
from pretrain.engine.task import Progress, StepMetrics, Task

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """A run in progress: what callbacks see."""

    job: Job
    dir: Path
    task: Task
    engines: Mapping[str, Engine]
    progress: Progress
    stopping: str = ""
    """Why the run ends before ``max_steps`` (all ranks agree); empty while it goes on."""
    diverged: bool = False
    """Set on all ranks together when the loss or the gradient is no longer a number."""
    settle: Callable[[], None] = lambda: None
    """Waits until all ranks know what any has found in the steps done (a signal, a divergence, which raises). Ranks
    otherwise hear of it a few steps late, so whatever is about to keep the state calls it first, on all ranks."""

    writing: Callable[[], bool] = lambda: False
    """Whether this rank still writes a checkpoint in the background; the others hear of it as of a divergence."""
    all_wrote_at: int = -1
    """The newest step after which no rank was writing, as far as the ranks know (all ranks agree)."""

    failed_saves: int = 0
    """Periodic checkpoints that could not be written; the run goes on without them."""

    validation: Mapping[str, float] = field(default_factory=dict)
    """The last validation's values, the same on every rank."""
    validated_at: int = -1
    """The step of that validation."""

    @property
    def finished(self) -> bool:
        """True when all steps are done."""
        return self.progress.step >= self.job.schedule.max_steps


class Callback:
    """A concern of the loop. Hooks run on every rank, in the order of the callbacks."""

    def on_start(self, run: Run) -> None:
        """Before the first step."""

    def before_step(self, run: Run) -> None:
        """Before a step's batch is fetched."""

    def after_step(self, run: Run, report: StepMetrics) -> None:
        """After each optimizer step; may add scalars to ``report`` for the callbacks behind it."""

    def on_end(self, run: Run) -> None:
        """After the last step, also when the run is stopping early; not after an exception."""

    def close(self, run: Run) -> None:
        """Release resources; always called."""


def train(run: Run, callbacks: Sequence[Callback]) -> None:
    """Train from ``run.progress`` until ``max_steps``, or until a callback sets ``run.stopping``."""
    schedule = run.job.schedule
    try:
        for callback in callbacks:
            callback.on_start(run)
        batches = run.task.build_batches(run.progress)
        while not run.finished and not run.stopping:
            for callback in callbacks:
                callback.before_step(run)
            batch: Any = next(batches)
            rate = learning_rate(run.progress.step, schedule, run.job.optimizer)
            for engine in run.engines.values():
                engine.set_learning_rate(engine.optimizer_settings.learning_rate(run.progress.step, schedule))
            seed_step(run.job.run.seed, run.progress.step)
            report = run.task.step(run.engines, batch, run.progress)
            run.progress.step += 1
            report["lr"] = rate
            for callback in callbacks:
                callback.after_step(run, report)
        for callback in callbacks:
            callback.on_end(run)
    finally:
        for callback in reversed(callbacks):
            callback.close(run)
