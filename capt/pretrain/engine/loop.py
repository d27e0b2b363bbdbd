"""The training loop: fetch, step, callbacks. Everything else is a callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.schema import Job
from capt.pretrain.engine import heartbeat
from capt.pretrain.engine.checkpoint.layout import SpikeState
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.optim.settings import learning_rate
from capt.pretrain.engine.own_time import own_section
from capt.pretrain.engine.rank import seed_step
from capt.pretrain.engine.task import ChunkedTask, Progress, StepMetrics, Task


@dataclass
class Run:
    """A run in progress, as callbacks see it."""

    job: Job
    dir: Path
    task: Task
    engines: Mapping[str, Engine]
    progress: Progress
    resumed_from: Path | None = None
    """The checkpoint that it continues from."""
    batch: Any = None
    """This rank's data of the newest step; None in a task that does many updates in one call."""
    stopping: str = ""
    """Reason why the run ends before ``max_steps`` (all ranks agree); empty while it continues."""
    diverged: bool = False
    """Set on all ranks together when the state is not to be kept: the loss or the gradient is not a number, or the
    ranks do not hold the same parameters."""
    before_save: list[Callable[[], None]] = field(default_factory=list)
    """Collective checks of the state, in the order of the callbacks that add them. A check raises where the state must
    not be kept."""
    records: list[Callable[[], None]] = field(default_factory=list)
    """Collective functions that make the records of the finished steps durable. They raise ``CheckpointError``."""
    background: list[Callable[[], bool]] = field(default_factory=list)
    """Functions that say whether this rank still writes a checkpoint in the background."""
    all_wrote_at: int = -1
    """The newest step after which no rank was writing, as far as the ranks know (all ranks agree)."""

    spikes: Callable[[], SpikeState] = SpikeState
    """Function that returns the recent past of the loss to save; before the first step, what has been loaded."""
    left_out: int = 0
    """Samples that this launch leaves out where it begins, because the loss had a spike in them."""
    exports: Mapping[str, bytes] | None = None
    """The task's files for every checkpoint, which rank 0 reads before the first step."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Remarks of callbacks in the progress line after the figures, by callback; rank 0's are shown."""

    saved_at: int = -1
    """The newest step whose checkpoint was begun in the run folder."""
    committed: int = 0
    """Checkpoints of this launch that are complete in the run folder, those that were pruned since included."""
    failed_saves: int = 0
    """Periodic checkpoints that could not be written; the run continues without them."""

    validation: Mapping[str, float] = field(default_factory=dict)
    """The last validation's values, the same on every rank."""
    validated_at: int = -1
    """The step of that validation."""

    paused: float = 0.0
    """Seconds of this launch in which the training waited for a validation or for a checkpoint."""
    _pauses: int = 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count the time inside as time without training, once the device has finished the steps so far."""
        # Pauses nest, as a save first commits the one before: only the outermost is counted.
        if self._pauses == 0:
            distributed.wait_for_device()
        begin = time.perf_counter()
        self._pauses += 1
        try:
            yield
            if self._pauses == 1:
                distributed.wait_for_device()
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self.paused += time.perf_counter() - begin

    def settle(self) -> None:
        """Run the checks of ``before_save``. Collective.

        Ranks otherwise hear of a signal or a divergence some steps late, so whatever keeps the state calls this first.
        """
        for check in self.before_save:
            check()

    def make_durable(self) -> None:
        """Make the records of the finished steps durable, before a save. Collective."""
        for record in self.records:
            record()

    def writing(self) -> bool:
        """Return whether this rank still writes a checkpoint; the other ranks hear of it as of a divergence."""
        return any(writes() for writes in self.background)

    @property
    def finished(self) -> bool:
        """True when all steps are done."""
        return self.progress.step >= self.job.schedule.max_steps


class Callback:
    """A concern of the loop. Hooks run on every rank, in the order of the callbacks."""

    follows: ClassVar[tuple[str, ...]] = ()
    """Names of callback classes that must come before this one wherever both are present; checked by `check_order`."""

    def before_folder(self, job: Job, *, resumes: bool) -> None:
        """Called before the run folder is opened; ``resumes``: the job continues a run, or does where there is one."""

    def on_done(self, run: Run) -> None:
        """Called in place of the training where all steps were done before: an earlier job may have been killed."""

    def find_checkpoint(self, job: Job, after: int) -> Path | None:
        """Return a verified checkpoint beyond step ``after`` that is not in the run folder. Collective."""
        return None

    def mend(self, job: Job, checkpoint: Path) -> bool:
        """Replace a damaged checkpoint of the run folder by a whole copy of it; return whether one is there now.

        Rank 0 alone.
        """
        return False

    def give_up(self, run_dir: Path, source: Path) -> bool:
        """Forget ``source``, which `find_checkpoint` has returned; return whether it is forgotten. Rank 0 alone."""
        return False

    def on_resume(self, run: Run, *, newest: bool) -> None:
        """Called before any ``on_start`` of a resumed run; ``newest``: from its newest checkpoint, not a named one."""

    def on_start(self, run: Run) -> None:
        """Called before the first step; may refuse the job."""

    def on_ready(self, run: Run) -> None:
        """Called once all callbacks have started and the batches are at hand: nothing refuses the job any more."""

    def before_step(self, run: Run) -> None:
        """Called before a step's batch is fetched."""

    def after_step(self, run: Run, report: StepMetrics) -> None:
        """Called after each optimizer step; may add scalars to ``report`` for the callbacks after it."""

    def next_due(self, run: Run) -> int:
        """The next step after which ``after_step`` must be called; asked only of tasks that do many updates a call.

        Unless a callback says otherwise it is called after every update, which makes every chunk one update long.
        """
        return run.progress.step + 1

    def on_metrics(self, run: Run, values: Mapping[str, float], split: str | None) -> None:
        """Called after a row of ``metrics.jsonl``. Values are averaged over the ranks; a training row has no ``split``.

        Callbacks of ``run.callbacks`` alone are told.
        """

    def before_end(self, run: Run) -> None:
        """Called after the last step and before any ``on_end``, to save what must not be lost if one of these fails."""

    def on_end(self, run: Run) -> None:
        """Called after the last step, also when the run is stopping early; not after an exception."""

    def close(self, run: Run) -> None:
        """Release resources; always called."""


def next_multiple(step: int, every: int) -> int:
    """Return the next step after ``step`` that ``every`` divides; `NEVER` where ``every`` is 0."""
    return (step // every + 1) * every if every else NEVER


NEVER = 1 << 62
"""A step that no run reaches: what a callback says that has nothing to do at any particular step."""


def check_order(callbacks: Sequence[Callback]) -> None:
    """Raise ``ConfigError`` where a callback comes before one that it must follow (`Callback.follows`)."""
    later = [type(callback).__name__ for callback in callbacks]
    for callback in callbacks:
        own = later.pop(0)
        if early := next((name for name in callback.follows if name in later), None):
            raise ConfigError(f"callbacks: {own} comes before {early}; it must follow it (follows of {own})")


def train(run: Run, callbacks: Sequence[Callback]) -> None:
    """Train from ``run.progress`` until ``max_steps``, or until a callback sets ``run.stopping``."""
    check_order(callbacks)
    try:
        for callback in callbacks:
            callback.on_start(run)
        batches = run.task.build_batches(run.progress)
        for callback in callbacks:  # from here on nothing refuses the job
            callback.on_ready(run)
        many = run.task if isinstance(run.task, ChunkedTask) else None
        while not run.finished and not run.stopping:
            heartbeat.enter("data", run.progress.step)
            for callback in callbacks:
                callback.before_step(run)
            if many is not None:  # many short updates, up to the next one after which a callback has something to do
                report = _step_many(run, many, batches, callbacks)
            else:
                with own_section():
                    run.batch = next(batches)
                heartbeat.enter("step")
                # After the batch is fetched: what others drew before must not move this step's random numbers.
                set_update(run)
                report = run.task.step(run.engines, run.batch, run.progress)
                run.progress.step += 1
            # The rate of the update just made: steps are counted from 0 there.
            report["lr"] = learning_rate(run.progress.step - 1, run.job.schedule, run.job.optimizer)
            for callback in callbacks:
                callback.after_step(run, report)
        heartbeat.enter("step", run.progress.step)
        for callback in callbacks:  # all save before any does more: what comes later cannot lose the last step
            callback.before_end(run)
        for callback in callbacks:
            callback.on_end(run)
        heartbeat.enter("end")
    finally:
        for callback in reversed(callbacks):
            callback.close(run)


def set_update(run: Run) -> None:
    """Give every engine its learning rate, and torch its seed, for the coming update."""
    for engine in run.engines.values():
        engine.set_learning_rate(engine.optimizer_settings.learning_rate(run.progress.step, run.job.schedule))
    seed_step(run.job.run.seed, run.progress.step)


class _Chunk:
    """``count`` coming updates of a run. Iterating sets learning rates, seed and ``progress.step`` for each."""

    def __init__(self, run: Run, batches: Iterator[Any], count: int) -> None:
        self._run, self._batches, self._count = run, batches, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for step in range(self._run.progress.step, self._run.progress.step + self._count):
            # `set_update` reads it.
            self._run.progress.step = step
            batch = next(self._batches)
            set_update(self._run)
            yield batch


def _step_many(run: Run, task: ChunkedTask, batches: Iterator[Any], callbacks: Sequence[Callback]) -> StepMetrics:
    """The number of updates that fit before the next step at which any callback, or the end of the run, is due."""
    heartbeat.enter("step")
    due = min(run.job.schedule.max_steps, *(callback.next_due(run) for callback in callbacks))
    report = task.step_many(run.engines, _Chunk(run, batches, due - run.progress.step), run.progress)
    run.progress.step = due
    return report
