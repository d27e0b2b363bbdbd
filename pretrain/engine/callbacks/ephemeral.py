"""Decides when ephemeral checkpoints are written, where, and when they go."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pretrain.base import distributed
from pretrain.base.errors import CheckpointError, counted
from pretrain.engine import heartbeat
from pretrain.engine.checkpoint import begin_save, checkpoints_of
from pretrain.engine.checkpoint.folders import remove_checkpoint, remove_leftovers
from pretrain.engine.checkpoint.fragments import fragments
from pretrain.engine.ephemeral.hosts import find_hosts
from pretrain.engine.ephemeral.places import (
    LIFE,
    begin_life,
    claim,
    folder_of,
    is_private,
    lives_of,
    places,
    remove,
    remove_stale,
    room,
    settle_life,
)
from pretrain.engine.ephemeral.save import EphemeralSave
from pretrain.engine.loop import NEVER, Callback, Run, next_multiple
from pretrain.engine.task import SizedTask, StepMetrics

logger = logging.getLogger(__name__)

SHARE = 0.01
"""Share of the training time that ephemeral checkpoints may cost with ``every: auto``."""
_FIRST = 10
"""Steps before the first one with ``every: auto``."""
_GROWTH = 4
"""A distance with ``every: auto`` is at most this many times the one before: a single slow save is no measure."""


def distance(cost: float, step: float, before: int) -> int:
    """Steps of ``step`` seconds until the next save, so that one of ``cost`` seconds takes `SHARE` of the time."""
    return min(max(1, math.ceil(cost / (SHARE * max(step, 1e-9)))), _GROWTH * before)


class EphemeralCheckpointer(Callback):
    """Saves every ``checkpoint.ephemeral.every`` steps into the memory of each host; the newest one stays.

    Where a permanent checkpoint is due there is none. On GPUs files are written in the background, as with
    ``checkpoint.async``. What cannot be written is said once, and training continues without. When the run ends, done
    or stopped, its permanent checkpoint is as new, and nothing stays in memory; after a fault the state waits for
    ``capt resume``. Folders of other runs that are of no more use are removed before the first step.
    """

    def __init__(self) -> None:
        self._pending: EphemeralSave | None = None
        self._used = False
        self._off = True
        self._began = -1
        self._due = NEVER
        self._said = False
        self._need = self._full = 0
        self.held = 0
        """Bytes of the newest one on this host."""
        self._place: Path | None = None
        self._kept: set[Path] = set()
        """Folders that cannot be removed, which is said once."""
        self._cost = 0.0

    def on_start(self, run: Run) -> None:
        section = run.job.checkpoint.ephemeral
        self._places = places(section.dir)
        lives = distributed.broadcast_object(lives_of(run.dir))
        if not section.every and not lives:
            return
        self._used, self._off = True, not section.every
        self._hosts = find_hosts()
        source = run.resumed_from
        goes_on = source is not None and source.parent.parent in [folder_of(place, run.dir) for place in self._places]
        self._life = self._begin_life(run, lives if goes_on else (), source if goes_on else None)
        writing = run.writing
        run.writing = lambda: writing() or (self._pending is not None and not self._pending.done())
        self._distance = section.every if isinstance(section.every, int) else _FIRST
        self._since, self._since_step = time.monotonic(), run.progress.step
        self._plan(run, measure=False)

    def _begin_life(self, run: Run, before: Sequence[str], source: Path | None) -> str:
        """Remove from all hosts what is not in ``source``, and begin a new incarnation with it. Collective."""
        life = ""
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                life = begin_life(run.dir, before)
        life = distributed.broadcast_object(life)
        with distributed.synchronize_errors():
            if self._hosts.leads:
                self._clean(run, keep=source)
                for folder, reason in remove_stale(self._places):
                    logger.info("removed %s: %s", folder, reason)
                if source is not None:
                    self._claim_source(source.parent.parent, run, life, before)
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                settle_life(run.dir, life)
        return life

    def _claim_source(self, folder: Path, run: Run, life: str, before: Sequence[str]) -> None:
        try:
            claim(folder, run.dir, life, before)
        except OSError as error:  # memory is full: another host may have the files
            logger.warning("%s is not used again: %s", folder, error)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if self._pending is not None and run.all_wrote_at > self._began:
            self._try(run, self._commit)
        if self._off or run.progress.step < self._due:
            return
        permanent = run.job.checkpoint.every
        wanted = not (run.finished or run.stopping or (permanent and run.progress.step % permanent == 0))
        if wanted:
            self._try(run, self._save)
        self._plan(run, measure=wanted)

    def next_due(self, run: Run) -> int:
        return NEVER if self._off else max(self._due, run.progress.step + 1)

    def on_end(self, run: Run) -> None:
        if self._pending is not None:
            self._try(run, self._commit)
        if self._used:  # the permanent checkpoint of this very step has been written
            if distributed.rank() == 0:
                (run.dir / LIFE).unlink(missing_ok=True)
            if self._hosts.leads:
                self._clean(run, keep=None)

    def _plan(self, run: Run, *, measure: bool) -> None:
        """Decide when the next one is due; all ranks agree."""
        step, every = run.progress.step, run.job.checkpoint.ephemeral.every
        if isinstance(every, int):
            self._due = next_multiple(step, every)
            return
        if measure:
            now = time.monotonic()
            of_a_step = (now - self._since - self._cost) / (step - self._since_step)
            self._distance = distributed.broadcast_object(distance(self._cost, of_a_step, self._distance))
            self._since, self._since_step, self._cost = now, step, 0.0
        self._due = step + self._distance

    def _try(self, run: Run, action: Callable[[Run], None]) -> None:
        """Do it as a section of its own, and count its time. Where a save fails, its place is not used again."""
        begin, before = time.monotonic(), heartbeat.enter("ephemeral")
        try:
            action(run)
        except CheckpointError as error:
            self._pending = None
            self._places = [place for place in self._places if place != self._place]
            if distributed.rank() == 0:
                after = "without ephemeral checkpoints" if self._off else "with another place for them, if any"
                logger.error("%s; training continues %s", error, after)
        heartbeat.enter(before)
        self._cost += time.monotonic() - begin

    def _save(self, run: Run) -> None:
        run.settle()  # a state that has diverged must not be kept
        run.make_durable()
        self._commit(run)
        root = self._choose_place(run)
        asynchronous = distributed.device().type == "cuda"
        pending = begin_save(
            root, run.job, run.engines, run.task, run.progress, asynchronous=asynchronous, spikes=run.spikes(),
            exports=run.exports, make=partial(EphemeralSave, hosts=self._hosts),
        )  # fmt: skip
        assert isinstance(pending, EphemeralSave)
        self._pending, self._began = pending, run.progress.step
        if not asynchronous:
            self._commit(run)

    def _commit(self, run: Run) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        path = pending.commit()
        self.held = pending.held
        self._need = max(self._full, self.held)
        if self._hosts.leads:
            root = path.parent.parent
            if not self._said:
                logger.info("ephemeral checkpoints in %s, %s each on this host", root, counted(pending.held, "byte"))
            self._said = True
            self._clean(run, keep=path)

    def _choose_place(self, run: Run) -> Path:
        """The run's folder on this host, in a place that has room. Collective. Raises ``CheckpointError``."""
        if not self._need:  # nothing was written yet that tells; and a task's state may grow
            own = sum(4 * f.view.numel() for engine in run.engines.values() for f in fragments(engine))
            own += run.task.state_bytes() if isinstance(run.task, SizedTask) else 0
            keeper, local = self._hosts.keeper, self._hosts.local
            of_ranks = enumerate(distributed.gather_objects(own))
            self._full = sum(size for rank, size in of_ranks for where in (rank, keeper(rank)) if where in local)
            self._need = self._full
        chosen: Path | None = None
        try:
            with distributed.synchronize_errors():
                if self._hosts.leads:
                    chosen = self._claim_place(run)
        except CheckpointError:
            self._off = True
            raise
        self._place = distributed.gather_objects(chosen)[self._hosts.leader]
        assert self._place is not None
        return folder_of(self._place, run.dir)

    def _claim_place(self, run: Run) -> Path:
        reasons = []
        for place in self._places:
            try:
                if (free := room(place)) < self._need:
                    reasons.append(f"{place} has room for {max(free, 0):,} bytes")
                    continue
                claim(folder_of(place, run.dir), run.dir, self._life)
                if reasons and place != self._place:
                    logger.warning("%s: ephemeral checkpoints go to %s", "; ".join(reasons), place)
                return place
            except (CheckpointError, OSError) as error:
                reasons.append(str(error))
        raise CheckpointError(
            f"no place for ephemeral checkpoints of {self._need:,} bytes a host: {'; '.join(reasons)}; "
            "set checkpoint.ephemeral.dir"
        )

    def _clean(self, run: Run, keep: Path | None) -> None:
        """Remove what this host has of the run but ``keep``, and what is of no use of other runs."""
        for place in places(run.job.checkpoint.ephemeral.dir):
            folder = folder_of(place, run.dir)
            try:
                if not is_private(folder):
                    continue
                if keep is None or keep.parent.parent != folder:
                    remove(folder)
                    continue
                remove_leftovers(folder)
                for path in checkpoints_of(folder):
                    if path != keep:
                        remove_checkpoint(path)
            except (CheckpointError, OSError) as error:
                if folder not in self._kept:
                    logger.warning("%s could not be removed: %s", folder, error)
                self._kept.add(folder)
