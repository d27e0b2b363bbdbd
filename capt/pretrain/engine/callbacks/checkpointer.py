"""Decides when checkpoints are written (every N steps, or by their cost), which are kept, and which is the best."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError, NoSpaceError, RunFailedError
from capt.pretrain.base.locks import is_replaced
from capt.pretrain.config.schema import CheckpointSection
from capt.pretrain.engine import heartbeat, interruption
from capt.pretrain.engine.checkpoint import PendingSave, begin_save, read_exports
from capt.pretrain.engine.checkpoint.layout import point, remove_checkpoint, remove_leftovers, set_aside
from capt.pretrain.engine.checkpoint.save import state_bytes
from capt.pretrain.engine.durable import write_error
from capt.pretrain.engine.judgement import direction
from capt.pretrain.engine.loop import Callback, Run, next_multiple
from capt.pretrain.engine.run_folder import LOCK, Best, check_is_own, read_best, write_best
from capt.pretrain.engine.step_folders import checkpoints_of, step_folder, step_of
from capt.pretrain.engine.task import GuidedTask, StepMetrics

logger = logging.getLogger(__name__)

SHARE = 0.01
"""Largest share of the training time that saving may cost with ``every: auto``."""
_FIRST = 10
"""Steps before the first save with ``every: auto``."""
_GROWTH = 4
"""Largest growth of the distance from one save to the next: a single slow save is not a measure."""


def distance(cost: float, step: float, before: int) -> int:
    """Return the steps of ``step`` seconds until the next save, so that ``cost`` seconds of saving are `SHARE`."""
    return min(max(1, math.ceil(cost / (SHARE * max(step, 1e-9)))), _GROWTH * before)


class Pace:
    """The steps after which one kind of checkpoint is due. All ranks agree: rank 0 measures.

    Args:
        every: steps between two saves; 0 = none; "auto" = by the measured cost.
        step: the finished steps at the start.
        longest: seconds that may be between two saves with "auto".
        clock: seconds, from any origin.
    """

    def __init__(
        self,
        every: int | Literal["auto"],
        step: int,
        *,
        longest: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every, self._longest, self._clock = every, longest, clock
        self._distance = _FIRST
        self._cost, self._since, self._since_step = 0.0, clock(), step
        self.skip(step)

    def skip(self, step: int) -> None:
        """Plan the next save after ``step``, without a measurement."""
        if self._every == "auto":
            self._due = step + self._distance
            # A limit in seconds needs looks at the clock before the step that is due.
            self.next_look = self._due if self._longest == math.inf else step + 1
        else:
            self.next_look = self._due = next_multiple(step, self._every)

    @contextmanager
    def cost(self) -> Iterator[None]:
        """Count the time that is spent inside as time of saving."""
        begin = self._clock()
        try:
            yield
        finally:
            self._cost += self._clock() - begin

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``. Collective at ``next_look``, the next step at which it may be true."""
        if step < self.next_look:
            return False
        if step >= self._due:
            return True
        # Steps may become slower before the save is due, so the remaining time is looked at again halfway.
        spent = self._clock() - self._since
        in_time = int((self._longest - spent) / max(spent / (step - self._since_step), 1e-9))
        left = min(self._due - step, distributed.broadcast_object(in_time))
        self.next_look = step + max(1, left // 2)
        return left < 1

    def saved(self, step: int) -> None:
        """Plan the next save, after the one of ``step``. Collective with "auto"."""
        if self._every == "auto":
            of_a_step = (self._clock() - self._since - self._cost) / max(step - self._since_step, 1)
            self._distance = distributed.broadcast_object(distance(self._cost, of_a_step, self._distance))
            self._cost, self._since, self._since_step = 0.0, self._clock(), step
        self.skip(step)


# Finds the best checkpoint by a validation metric, and keeps the link and the record that name it.


LINK = "best"


class BestCheckpoint:
    """Remembers the best validation value of ``checkpoint.best``; ``RUN/best.json`` and ``checkpoints/best`` name it.

    A record of a step that the run has not reached (it resumed from an earlier checkpoint) does not count.
    """

    def __init__(self, run: Run) -> None:
        self._section: CheckpointSection = run.job.checkpoint
        self._value = -math.inf
        best = self._section.best
        if best and self._section.best_mode == "max" and direction(best) < 0 and distributed.rank() == 0:
            logger.warning("checkpoint.best=%s keeps the worst checkpoint: set checkpoint.best_mode=min", best)
        with distributed.synchronize_errors():
            record = read_best(run.dir) if self._section.best is not None else None
        if record is None or record.step > run.progress.step:
            return
        if (record.metric, record.mode) == (self._section.best, self._section.best_mode):
            self._value = self._signed(record.value)

    def is_improved(self, run: Run) -> bool:
        """Return whether the validation of this very step is the best so far. The same on every rank.

        Raises:
            ConfigError: the validation does not report the metric.
        """
        if self._section.best is None or run.validated_at != run.progress.step:
            return False
        if self._section.best not in run.validation:
            raise ConfigError(
                f"checkpoint.best: validation reports no {self._section.best!r}; it reports "
                f"{', '.join(sorted(run.validation)) or 'nothing (there is no validation data)'}"
            )
        value = run.validation[self._section.best]
        return math.isfinite(value) and self._signed(value) > self._value

    def record(self, run: Run) -> None:
        """Call after the checkpoint of this step has been committed. Collective. Raises ``CheckpointError``."""
        assert self._section.best is not None
        value = run.validation[self._section.best]
        self._value = self._signed(value)
        best = Best(metric=self._section.best, mode=self._section.best_mode, value=value, step=run.progress.step)
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                try:
                    point(LINK, step_folder(run.dir, run.progress.step))
                    write_best(run.dir, best)
                except OSError as error:
                    raise write_error(run.dir / LINK, error) from error

    def _signed(self, value: float) -> float:
        return value if self._section.best_mode == "max" else -value


def best_checkpoint(run_dir: Path) -> Path | None:
    """The folder that ``checkpoints/best`` points to, if it is there."""
    link = run_dir / "checkpoints" / LINK
    return link.resolve() if link.is_symlink() and link.exists() else None


LONGEST = 900.0
"""Seconds that may be between two checkpoints with ``checkpoint.every: auto``."""
_PAUSE = 2.0
"""Seconds between two attempts to write the last checkpoint to a full disk."""
_TELL = 600.0
"""Seconds between two lines that say so."""


class LastSaveError(RunFailedError):
    """The disk was full at the end of the run, and the job was stopped while it waited."""

    passing = True


class Checkpointer(Callback):
    """Saves every ``checkpoint.every`` steps, at the end, when the run is stopping, and at a new ``checkpoint.best``.

    At the end it saves before anything else is done: a validation that fails costs no step. A task that has changed by
    that validation (`GuidedTask`) is saved again.

    Keeps the best, the newest ``keep`` and every ``keep_every``-th step. With ``checkpoint.async`` a save is committed
    when all ranks have written (which they hear some steps late, and do not wait to ask), at the latest before the next
    one begins; none is dropped. One on the way that cannot be written (a full disk) is lost with a warning, and the run
    continues; the last one waits for room. A job whose run folder was moved, removed or replaced ends before it would
    write into what is there now.
    """

    follows = ("Agreement", "SampleLedger", "Replicas", "Metrics", "Validator")

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._saved = -1
        self._began = -1
        self._locked = False
        self._folder: os.stat_result | None = None
        self._guidance: object = None

    def on_start(self, run: Run) -> None:
        self._saved = run.progress.step
        run.background.append(lambda: self._pending is not None and not self._pending.done())
        self._pace = Pace(run.job.checkpoint.every, run.progress.step, longest=LONGEST)
        self._best = BestCheckpoint(run)
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                # Without a lock of this process in the folder there is nothing to compare with later.
                self._locked = not is_replaced(run.dir / LOCK)
                for leftover in remove_leftovers(run.dir):
                    logger.warning("removed %s, left by a job that was killed", leftover)
                self._require_own(run.dir)
                _set_aside_later_ones(run.dir, run.progress.step)

    def on_ready(self, run: Run) -> None:
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                run.exports = read_exports(run.task)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        # All ranks were heard to have written after a step since the save began: the commit waits for nobody.
        if self._pending is not None and run.all_wrote_at > self._began:
            self._try(run, self._commit)
        if self._pace.is_due(run.progress.step):
            self._try(run, self._save)
            self._pace.saved(run.progress.step)
        self._save_if_best(run)

    def next_due(self, run: Run) -> int:
        return max(self._pace.next_look, run.progress.step + 1)

    def before_end(self, run: Run) -> None:
        self._try(run, self._commit)
        self._save_last(run)
        self._guidance = _guidance(run)

    def on_end(self, run: Run) -> None:
        # The validation at the end has changed how the task continues, and the checkpoint must hold that.
        if _guidance(run) != self._guidance:
            self._saved = -1
            self._save_last(run)
        self._save_if_best(run)

    def close(self, run: Run) -> None:
        if run.diverged:  # on all ranks together, so that they can finish a save that was sound
            self._try(run, self._commit)

    def _try(self, run: Run, action: Callable[[Run], None]) -> bool:
        """Return whether a save on the way succeeded; all ranks agree. The next one is tried in its time."""
        try:
            with run.pause(), self._pace.cost():
                action(run)
        except CheckpointError as error:
            run.failed_saves += 1
            if distributed.rank() == 0:
                logger.error(
                    "CHECKPOINT LOST (%d so far): %s; training continues, the next one is tried in its time",
                    run.failed_saves, error,
                )  # fmt: skip
            return False
        return True

    def _save(self, run: Run) -> None:
        if self._saved == run.progress.step:
            return
        run.settle()  # a state that has diverged must not be kept
        run.make_durable()
        with distributed.synchronize_errors():
            if self._locked and is_replaced(run.dir / LOCK):
                raise ConfigError(
                    f"run.dir {run.dir}: the folder was moved, removed or replaced while the job ran; "
                    f"step {run.progress.step} is not saved. Continue with capt resume and the folder's new place"
                )
            if distributed.rank() == 0:
                self._require_own(run.dir)
        before = heartbeat.enter("save")
        # The save before this one, if it is still on the way.
        self._try(run, self._commit)
        asynchronous = run.job.checkpoint.asynchronous
        self._pending = begin_save(
            run.dir,
            run.job,
            run.engines,
            run.task,
            run.progress,
            asynchronous=asynchronous,
            spikes=run.spikes(),
            exports=run.exports,
        )
        self._saved = self._began = run.saved_at = run.progress.step
        if not asynchronous:
            self._commit(run)
        heartbeat.enter(before)

    def _require_own(self, run_dir: Path) -> None:
        """Raise ``ConfigError`` where a folder of the run is a link now, or that of checkpoints is not the one so far.

        What is there now may be another run's, in which nothing is to be written or removed.
        """
        check_is_own(run_dir)
        folder = run_dir / "checkpoints"
        found = folder.stat() if folder.exists() else None
        if self._folder is not None and found is not None and not os.path.samestat(found, self._folder):
            raise ConfigError(f"{folder} was replaced while the job ran; put the folder of the run back")
        self._folder = found

    def _save_last(self, run: Run) -> None:
        """Save and commit; where the disk is full, wait for room, for no later checkpoint would hold these steps.

        Raises:
            LastSaveError: a stop signal came while the ranks waited.
        """
        begin = time.monotonic()
        # A signal that came earlier is why this save is the last; only another one gives it up.
        logged, heard = -math.inf, interruption.recorded_signal()
        while True:
            try:
                self._save(run)
                self._commit(run)
                return
            except NoSpaceError as error:
                need = sum(distributed.gather_objects(state_bytes(run.engines, run.task)))
                now = time.monotonic()
                if now - logged > _TELL and distributed.rank() == 0:
                    logged = now
                    logger.error(
                        "the last checkpoint, of step %d and %d bytes or more, waits for room since %.0f s: %s; a stop "
                        "signal gives it up", run.progress.step, need, now - begin, error,
                    )  # fmt: skip
                # Noted anew in each round, so that the launcher sees a rank that waits and not one that hangs.
                heartbeat.enter("save")
                time.sleep(_PAUSE)
                if any(distributed.gather_objects(interruption.recorded_signal() != heard)):
                    raise LastSaveError(
                        f"stopped while waiting for room, step {run.progress.step} is not saved: {error}"
                    ) from None

    def _save_if_best(self, run: Run) -> None:
        # The step is saved where it is not yet, and named the best once it is there.
        if self._best.is_improved(run) and self._try(run, self._save) and self._try(run, self._commit):
            self._try(run, self._best.record)
            self._prune(run)

    def _commit(self, run: Run) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            path = pending.commit()
        except CheckpointError:
            # The step is not saved after all, and the next attempt must not pass it over.
            self._saved = -1
            raise
        run.committed += 1
        if distributed.rank() == 0:
            logger.info("checkpoint %s", path)
        self._prune(run)

    def _prune(self, run: Run) -> None:
        if distributed.rank() != 0:
            return
        try:
            self._require_own(run.dir)
        except ConfigError as error:
            logger.error("no checkpoint is removed: %s", error)
            return
        keep, keep_every = run.job.checkpoint.keep, run.job.checkpoint.keep_every
        best, averaged = best_checkpoint(run.dir), run.job.checkpoint.averaged_steps(run.job.schedule.max_steps)
        for path in checkpoints_of(run.dir)[:-keep]:
            step = step_of(path)
            if path.resolve() != best and step not in averaged and not (keep_every and step % keep_every == 0):
                try:
                    remove_checkpoint(path)
                except OSError as error:
                    logger.warning("%s could not be removed: %s", path, error)


def _guidance(run: Run) -> object:
    return run.task.guidance() if isinstance(run.task, GuidedTask) else None


def _set_aside_later_ones(run_dir: Path, step: int) -> None:
    """Resuming from an older checkpoint starts another future: the newer ones must not be taken for it."""
    later = [path for path in checkpoints_of(run_dir) if step_of(path) > step]
    for path in later:
        logger.warning(
            "%s belongs to the run's earlier future; kept as %s", path.name, set_aside(path, "abandoned").name
        )
    left = checkpoints_of(run_dir)
    if later and left:
        point("latest", left[-1])
