"""Decides when checkpoints are written and which of them are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from pretrain.base.errors import CheckpointError, ConfigError
from pretrain.base.locks import is_replaced
from pretrain.engine import distributed, heartbeat
from pretrain.engine.callbacks.best import BestCheckpoint, best_checkpoint
from pretrain.engine.checkpoint import PendingSave, begin_save, checkpoints_of
from pretrain.engine.checkpoint.folders import point, remove_checkpoint, remove_leftovers, set_aside
from pretrain.engine.loop import Callback, Run, next_multiple
from pretrain.engine.run_folder import LOCK
from pretrain.engine.task import StepMetrics

logger = logging.getLogger(__name__)


class Checkpointer(Callback):
    """Saves every ``checkpoint.every`` steps, at the end, when the run is stopping, and at a new ``checkpoint.best``.

    Keeps the best, the newest ``keep`` and every ``keep_every``-th step. With ``checkpoint.async`` a save is committed
    when all ranks have written (which they hear some steps late, and do not wait to ask), at the latest before the next
    one begins; none is dropped. One on the way that cannot be written (a full disk) is lost with a warning, and the run
    goes on; the last one must succeed. A job whose run folder was moved, removed or replaced ends before it would write
    into what is there now.
    """

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._saved = -1
        self._began = -1
        self._locked = False

    def on_start(self, run: Run) -> None:
        self._saved = run.progress.step
        run.writing = lambda: self._pending is not None and not self._pending.done()
        self._best = BestCheckpoint(run)
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                self._locked = not is_replaced(run.dir / LOCK)
                for leftover in remove_leftovers(run.dir):
                    logger.warning("removed %s, left by a job that was killed", leftover)
                _set_aside_later_ones(run.dir, run.progress.step)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if self._pending is not None and run.all_wrote_at > self._began:
            self._try(run, self._commit)
        every = run.job.checkpoint.every
        if every and run.progress.step % every == 0:
            self._try(run, self._save)
        self._save_if_best(run)

    def next_due(self, run: Run) -> int:
        return next_multiple(run.progress.step, run.job.checkpoint.every)

    def on_end(self, run: Run) -> None:
        self._try(run, self._commit)
        self._save(run)
        self._commit(run)
        self._save_if_best(run)

    def close(self, run: Run) -> None:
        if run.diverged:  # on all ranks together, so that they can finish a save that was sound
            self._try(run, self._commit)

    def _try(self, run: Run, action: Callable[[Run], None]) -> bool:
        """Return whether a save on the way succeeded; all ranks agree. The next one is tried in its time."""
        try:
            action(run)
        except CheckpointError as error:
            run.failed_saves += 1
            if distributed.rank() == 0:
                logger.error(
                    "CHECKPOINT LOST (%d so far): %s; training goes on, the next one is tried in its time",
                    run.failed_saves, error,
                )  # fmt: skip
            return False
        return True

    def _save(self, run: Run) -> None:
        if self._saved == run.progress.step:
            return
        run.settle()  # a state that has diverged must not be kept
        with distributed.synchronize_errors():
            if self._locked and is_replaced(run.dir / LOCK):
                raise ConfigError(
                    f"run.dir {run.dir}: the folder was moved, removed or replaced while the job ran; "
                    f"step {run.progress.step} is not saved. Continue with capt resume and the folder's new place"
                )
        before = heartbeat.enter("save")
        self._try(run, self._commit)
        asynchronous = run.job.checkpoint.asynchronous
        self._pending = begin_save(
            run.dir, run.job, run.engines, run.task, run.progress, asynchronous=asynchronous, spikes=run.spikes()
        )
        self._saved = self._began = run.progress.step
        if not asynchronous:
            self._commit(run)
        heartbeat.enter(before)

    def _save_if_best(self, run: Run) -> None:
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
            self._saved = -1
            raise
        if distributed.rank() == 0:
            logger.info("checkpoint %s", path)
        self._prune(run)

    def _prune(self, run: Run) -> None:
        if distributed.rank() != 0:
            return
        keep, keep_every = run.job.checkpoint.keep, run.job.checkpoint.keep_every
        best = best_checkpoint(run.dir)
        for path in checkpoints_of(run.dir)[:-keep]:
            if path.resolve() != best and not (keep_every and int(path.name[5:]) % keep_every == 0):
                try:
                    remove_checkpoint(path)
                except OSError as error:
                    logger.warning("%s could not be removed: %s", path, error)


def _set_aside_later_ones(run_dir: Path, step: int) -> None:
    """Resuming from an older checkpoint starts another future: the newer ones must not be taken for it."""
    later = [path for path in checkpoints_of(run_dir) if int(path.name[5:]) > step]
    for path in later:
        logger.warning("%s is of the run's earlier future; kept as %s", path.name, set_aside(path, "abandoned").name)
    left = checkpoints_of(run_dir)
    if later and left:
        point("latest", left[-1])
