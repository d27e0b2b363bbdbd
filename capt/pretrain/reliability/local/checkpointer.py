"""Save local checkpoints: when, in which storage, and until when they are kept."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, NoSpaceError, counted
from capt.pretrain.config.schema import Job
from capt.pretrain.engine import heartbeat
from capt.pretrain.engine.callbacks.checkpointer import Pace
from capt.pretrain.engine.checkpoint import PendingSave, begin_save
from capt.pretrain.engine.checkpoint.layout import remove_checkpoint, remove_leftovers
from capt.pretrain.engine.checkpoint.save import state_bytes
from capt.pretrain.engine.loop import NEVER, Callback, Run
from capt.pretrain.engine.step_folders import checkpoints_of
from capt.pretrain.engine.task import StepMetrics
from capt.pretrain.reliability.local import storage
from capt.pretrain.reliability.local.replicate import Hosts, Transfer, copy_files, find_hosts, newest_local

logger = logging.getLogger(__name__)


class LocalSave(PendingSave):
    """A checkpoint in the storage of each host, with replicas of the files of the previous host."""

    def __init__(self, *args: Any, hosts: Hosts) -> None:
        super().__init__(*args)
        self._hosts = hosts
        self.leads = hosts.leads
        self.held = 0
        """Bytes of the complete checkpoint on this host."""

    def replicate(self, by_rank: Sequence[dict[str, dict[str, Any]]]) -> None:
        """Send the files of each rank to its peer. Collective."""
        files = [tuple((name, int(each["size"])) for name, each in sorted(own.items())) for own in by_rank]
        peers = [self._hosts.peer(rank) for rank in range(len(files))]
        copy_files(self.temporary, [Transfer(r, p, files[r]) for r, p in enumerate(peers) if p is not None])
        self.held = self._hosts.held([sum(size for _, size in own) for own in files])


class LocalCheckpointer(Callback):
    """Saves every ``checkpoint.local.every`` steps into the storage of each host; the newest one stays.

    Nothing is saved after a step whose checkpoint goes to the run folder. On GPUs files are written in the background,
    as with ``checkpoint.async``. Where one cannot be written, an error says so, and training continues without. A run
    that ends, done or stopped, has a checkpoint of its last step and leaves no storage; after a fault the storage waits
    for ``capt resume``. Storage of other runs that is of no more use is removed before the first step.
    """

    follows = ("Agreement", "SampleLedger", "Replicas", "Metrics", "Checkpointer")

    def __init__(self) -> None:
        self._pending: LocalSave | None = None
        self._used = False
        self._off = True
        self._began = -1
        self._need = 0
        self.held = 0
        """Bytes of the newest one on this host; 0 before the first."""
        self._warned = False

    def find_checkpoint(self, job: Job, after: int) -> Path | None:
        return newest_local(job, after)

    def give_up(self, run_dir: Path, source: Path) -> bool:
        # Without the record no storage of the run is valid.
        (run_dir / storage.INCARNATION).unlink(missing_ok=True)
        return True

    def on_start(self, run: Run) -> None:
        section = run.job.checkpoint.local
        self._storage = storage.storage_of(section.dir, run.dir)
        valid = distributed.broadcast_object(storage.incarnations_of(run.dir))
        if not section.every and not valid:
            return
        self._used, self._off = True, not section.every
        self._hosts = find_hosts()
        source = run.resumed_from
        own = source is not None and source.parents[1] == self._storage
        self._incarnation = self._begin_incarnation(run, valid if own else (), source if own else None)
        run.background.append(lambda: self._pending is not None and not self._pending.done())
        self._pace = Pace(section.every, run.progress.step)

    def _begin_incarnation(self, run: Run, before: Sequence[str], source: Path | None) -> str:
        """Keep only ``source`` of the run on all hosts, and label it with a new incarnation. Collective."""
        new = distributed.broadcast_object(uuid.uuid4().hex)
        # Both incarnations are valid until every host has relabelled what it keeps.
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                storage.write_incarnations(run.dir, new, *before)
        with distributed.synchronize_errors():
            if self._hosts.leads:
                self._clean(keep=source)
                for folder, reason in storage.remove_stale(self._storage.parent):
                    logger.info("removed %s: %s", folder, reason)
                if source is not None:
                    try:
                        storage.prepare(source.parents[1], run.dir, new, before)
                    except OSError as error:  # memory is full: another host may have the files
                        logger.warning("%s is not used again: %s", source.parents[1], error)
        # From here on the new one alone.
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                storage.write_incarnations(run.dir, new)
        return new

    def after_step(self, run: Run, report: StepMetrics) -> None:
        step = run.progress.step
        if self._pending is not None and run.all_wrote_at > self._began:
            self._try(run, self._commit)
        if self._off or not self._pace.is_due(step):
            return
        if run.finished or run.stopping or run.saved_at == step:
            self._pace.skip(step)
        else:
            self._try(run, self._save)
            self._pace.saved(step)

    def next_due(self, run: Run) -> int:
        return NEVER if self._off else max(self._pace.next_look, run.progress.step + 1)

    def on_end(self, run: Run) -> None:
        if self._pending is not None:
            self._try(run, self._commit)
        if self._used:  # the run folder has a checkpoint of this step
            if distributed.rank() == 0:
                (run.dir / storage.INCARNATION).unlink(missing_ok=True)
            if self._hosts.leads:
                self._clean(keep=None)

    def _try(self, run: Run, action: Callable[[Run], None]) -> None:
        """Run ``action`` as a section of its own, and count its time. After a failure nothing more is saved."""
        before = heartbeat.enter("local")
        with run.pause(), self._pace.cost():
            try:
                action(run)
            except CheckpointError as error:
                self._pending, self._off = None, True
                if distributed.rank() == 0:
                    logger.error("%s; training continues without local checkpoints", error)
        heartbeat.enter(before)

    def _save(self, run: Run) -> None:
        run.settle()  # a state that has diverged must not be kept
        run.make_durable()
        self._commit(run)
        self._prepare_storage(run)
        asynchronous = distributed.device().type == "cuda"
        pending = begin_save(
            self._storage, run.job, run.engines, run.task, run.progress, asynchronous=asynchronous, spikes=run.spikes(),
            exports=run.exports, make=partial(LocalSave, hosts=self._hosts),
        )  # fmt: skip
        assert isinstance(pending, LocalSave)
        self._pending, self._began = pending, run.progress.step
        if not asynchronous:
            self._commit(run)

    def _commit(self, run: Run) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        path = pending.commit()
        if self._hosts.leads:
            if not self.held:
                logger.info("local checkpoints in %s, %s each", path.parents[1], counted(pending.held, "byte"))
            self._clean(keep=path)  # all hosts have the new one: one is complete at every moment
        self.held = pending.held
        self._need = max(self._need, self.held)

    def _prepare_storage(self, run: Run) -> None:
        """Make the storage on every host. Collective. Raises ``CheckpointError``: a host has no room for it."""
        if not self._need:  # nothing was written yet that would tell; and the state of a task may grow
            self._need = self._hosts.held(distributed.gather_objects(state_bytes(run.engines, run.task)))
        with distributed.synchronize_errors():
            if self._hosts.leads:
                location = self._storage.parent
                if (free := storage.free_bytes(location)) < self._need:
                    raise NoSpaceError(
                        f"no room for local checkpoints: {location} has {max(free, 0):,} bytes free and they "
                        f"need {self._need:,}; set checkpoint.local.dir, or give the container more shared memory"
                    )
                try:
                    storage.prepare(self._storage, run.dir, self._incarnation)
                except OSError as error:
                    raise CheckpointError(f"{self._storage}: {error.strerror}; set checkpoint.local.dir") from error

    def _clean(self, keep: Path | None) -> None:
        """Remove what this host has of the run but ``keep``; what cannot be removed is said once."""
        try:
            if not storage.is_private(self._storage):
                return
            if keep is None or keep.parents[1] != self._storage:
                storage.remove(self._storage)
                return
            remove_leftovers(self._storage)
            for path in checkpoints_of(self._storage):
                if path != keep:
                    remove_checkpoint(path)
        except (CheckpointError, OSError) as error:
            if not self._warned:
                logger.warning("%s could not be removed: %s", self._storage, error)
            self._warned = True
