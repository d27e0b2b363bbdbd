"""When checkpoints are written, and which ones are kept."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

from pretrain.engine import distributed
from pretrain.engine.callbacks.best import BestCheckpoint, best_checkpoint
from pretrain.engine.checkpoint import PendingSave, begin_save, checkpoints_of
from pretrain.engine.checkpoint.save import point
from pretrain.engine.loop import Callback, Run
from pretrain.engine.task import Report

logger = logging.getLogger(__name__)


class Checkpointer(Callback):
    """Saves every ``checkpoint.every`` steps, at the end, when the run is stopping, and at a new ``checkpoint.best``.

    Keeps the best, the newest ``keep`` and every ``keep_every``-th step. With ``checkpoint.async`` a save is committed
    when all ranks have written, at the latest before the next one begins; none is dropped.
    """

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._saved = -1

    def on_start(self, run: Run) -> None:
        self._saved = run.progress.step
        self._best = BestCheckpoint(run)
        if distributed.rank() == 0:
            for leftover in (run.dir / "checkpoints").glob(".step-*.partial"):
                logger.warning("removing %s, left by a save that did not finish", leftover)
                shutil.rmtree(leftover)
            _set_aside_later_ones(run.dir, run.progress.step)

    def after_step(self, run: Run, report: Report) -> None:
        self._commit_if_done(run)
        every = run.job.checkpoint.every
        if every and run.progress.step % every == 0:
            self._save(run)
        self._save_if_best(run)

    def on_end(self, run: Run) -> None:
        self._save(run)
        self._commit(run)
        self._save_if_best(run)

    def close(self, run: Run) -> None:
        if run.diverged:  # on all ranks together, so that they can finish a save that was sound
            self._commit(run)

    def _save(self, run: Run) -> None:
        if self._saved == run.progress.step:
            return
        run.settle()  # a state that has diverged must not be kept
        self._commit(run)
        asynchronous = run.job.checkpoint.asynchronous
        self._pending = begin_save(run.dir, run.job, run.engines, run.task, run.progress, asynchronous=asynchronous)
        self._saved = run.progress.step
        if not asynchronous:
            self._commit(run)

    def _save_if_best(self, run: Run) -> None:
        if self._best.is_improved(run):
            self._save(run)
            self._commit(run)
            self._best.record(run)
            self._prune(run)

    def _commit_if_done(self, run: Run) -> None:
        if self._pending is not None and all(distributed.gather_objects(self._pending.done())):
            self._commit(run)

    def _commit(self, run: Run) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        path = pending.commit()
        if distributed.rank() == 0:
            logger.info("checkpoint %s", path)
        self._prune(run)

    def _prune(self, run: Run) -> None:
        if distributed.rank() != 0:
            return
        keep, keep_every = run.job.checkpoint.keep, run.job.checkpoint.keep_every
        best = best_checkpoint(run.dir)
        for path in checkpoints_of(run.dir)[:-keep]:
            if path.resolve() == best or (keep_every and int(path.name[5:]) % keep_every == 0):
                continue
            (path / "manifest.json").unlink()  # first: a crash must leave no half-deleted checkpoint that looks whole
            shutil.rmtree(path)


def _set_aside_later_ones(run_dir: Path, step: int) -> None:
    """Resuming from an older checkpoint starts another future: the newer ones must not be taken for it."""
    later = [path for path in checkpoints_of(run_dir) if int(path.name[5:]) > step]
    for path in later:
        kept = path.with_name(f"abandoned-{path.name}-{time.time_ns()}")
        logger.warning("%s is of the run's earlier future; kept as %s", path.name, kept.name)
        path.rename(kept)
    left = checkpoints_of(run_dir)
    if later and left:
        point("latest", left[-1])
