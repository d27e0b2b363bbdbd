"""A job opens its run folder before anything is loaded, and keeps ``status.json`` true until it ends."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import (
    ConfigError,
    LockedError,
    MachineError,
    RunFailedError,
    expect_writable_disks,
    is_passing,
    machines_at_fault,
    user_text,
)
from capt.pretrain.base.files import open_for_append, write_text
from capt.pretrain.base.locks import file_lock, is_replaced
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.config.schema import Job
from capt.pretrain.engine import interruption
from capt.pretrain.engine.branch import chosen_branch, plant
from capt.pretrain.engine.checkpoint import read_job_of_run
from capt.pretrain.engine.checkpoint.layout import put_back_replaced, remove_checkpoint
from capt.pretrain.engine.metrics_file import METRICS
from capt.pretrain.engine.run_folder import (
    CONFIG,
    FAILED,
    LOCK,
    LOGGED,
    STOPPED,
    Status,
    changed_keys,
    check_is_no_checkpoint,
    check_is_own,
    describe_change,
    discard_refused,
    exit_code_of,
    has_begun,
    keys_of_another_job,
    read_status,
    refuse_another_job,
    resumes_by_itself,
    write_status,
)
from capt.pretrain.engine.task import Progress

# Checks whether all hosts of a job see the same folder.


_PATIENCE = 5.0
"""Seconds after which a file that one host has written must be seen by the others."""


def check_is_shared(folder: Path) -> None:
    """Every host writes a file into ``folder`` and must see the one of rank 0. Collective.

    Raises:
        ConfigError: the folder is not on a file system that the hosts share, or a host cannot write there; it is named.
    """
    if distributed.world_size() == 1:
        return
    token = distributed.broadcast_object(secrets.token_hex(4))
    # A host sees what one of its ranks sees; rank 0 is always among them.
    speaks = distributed.rank() == 0 or distributed.local_rank() == 0
    mine = folder / f".shared-{token}-{distributed.rank()}"
    problem = None
    try:
        if speaks and folder.is_dir():
            write_text(mine, "")
    except OSError as error:
        problem = user_text(error)
    try:
        distributed.barrier()
        blind = speaks and not _sees(folder / f".shared-{token}-0")
        # Nobody removes a file before all have looked.
        found = distributed.gather_objects((socket.gethostname(), problem, blind))
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
    with distributed.synchronize_errors():
        _refuse_unshared(folder, found)


def _sees(path: Path) -> bool:
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _refuse_unshared(folder: Path, found: list[tuple[str, str | None, bool]]) -> None:
    for rank, (host, problem, _) in enumerate(found):
        if problem is not None:
            raise MachineError(f"run.dir {folder}: {host} (rank {rank}) cannot write there: {problem}")
    blind = [f"{host} (rank {rank})" for rank, (host, _, unseen) in enumerate(found) if unseen]
    if blind:
        more = f" and {len(blind) - 8} more" if len(blind) > 8 else ""
        raise MachineError(
            f"run.dir {folder.absolute()}: not shared: what {found[0][0]} (rank 0) writes there is not seen on "
            f"{', '.join(blind[:8])}{more}; name a folder on a file system that all hosts mount"
        )


logger = logging.getLogger(__name__)


class RunStatus:
    """Writes ``config.yaml`` and ``status.json`` of this job's run folder. Rank 0 writes; other ranks do nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress = Progress()
        self.training = False
        self.resumes = False
        """True if this job continues a run, as it was told to, or because it found one (``run.resume=auto``)."""
        self._fresh = self._locked = False
        self.branch: Path | None = None
        """The checkpoint of another run that this one has begun at (``run.branch_from``)."""
        self._planted: Path | None = None
        self._unchanged: Status | None = None
        self._older_logs: frozenset[Path] = frozenset()
        self._new_folders: list[Path] = []
        self._status = Status(state="starting")

    def look(self, job: Job, *, resume: bool) -> None:
        """Decide whether the job continues a run or begins one. Raises ``ConfigError`` where it may do neither."""
        if resume:
            check_is_no_checkpoint(self.folder)
        self.resumes = resume or resumes_by_itself(self.folder, job)
        if job.run.branch_from is not None:
            begun = (self.folder / CONFIG).exists()
            before = read_job_of_run(self.folder).run.branch_from if begun else None
            self.branch = chosen_branch(job.run.branch_from, self.folder, before)

    def start(self, job: Job, *, resume: bool) -> None:
        """Write ``config.yaml`` (a resumed run has one) and the status ``starting``; the folder is locked.

        Raises:
            ConfigError: the folder holds a run already, or a part of it is a link.
        """
        self.look(job, resume=resume)  # once more: now nobody else begins a run here
        check_is_own(self.folder)
        for path in put_back_replaced(self.folder):
            logger.warning("%s is put back: the job was killed while it replaced it", path)
        self._older_logs = frozenset(self._logs())
        before = self._previous_status() if self.resumes else None
        # A job that resumes by itself with other keys may still be refused, which must leave the status as it was.
        if self.resumes and not resume and keys_of_another_job(self.folder, job):
            self._unchanged = before
        self._fresh = not (self.folder / CONFIG).exists()
        if self._fresh:
            write_text(self.folder / CONFIG, job_to_yaml(job))
        if self.branch is not None:
            self._planted = plant(self.branch, self.folder)
            self.resumes = True
        self._write("starting", before.step if before else 0)

    def _previous_status(self) -> Status | None:
        try:
            return read_status(self.folder)
        except ConfigError as error:
            logger.warning("%s; a new one is written", error)
            return None

    def write_config(self, job: Job) -> None:
        """Replace ``config.yaml`` by the job as it runs, and log the keys that differ from the file so far.

        Raises:
            ConfigError: the job, with what the data decide filled in, is not that of the run which it has found.
        """
        if self._unchanged is not None:
            refuse_another_job(self.folder, keys_of_another_job(self.folder, job))
            self._unchanged = None
        changed = {} if self._fresh else changed_keys(read_job_of_run(self.folder), job)
        if changed:
            changes = ", ".join(line for key, values in changed.items() for line in describe_change(key, *values))
            logger.warning("differs from the run's configuration so far: %s", changes)
        write_text(self.folder / CONFIG, job_to_yaml(job))

    def start_training(self) -> None:
        """Write ``running``: all is prepared, and the first step is next."""
        self.training = True
        expect_writable_disks()
        interruption.training_starts()
        self._write("running", self.progress.step)

    def finish(self, state: str, code: int, reason: str = "") -> None:
        """Write how the job ended by itself: ``done`` or ``stopped``."""
        # From here on a signal changes nothing about the outcome.
        interruption.training_starts()
        self._write(state, self.progress.step, code, reason)

    def record_failure(self, error: BaseException) -> None:
        """Write that the job ended by an exception. A new folder is removed when its job was refused before a step."""
        if distributed.rank() != 0 or self.is_lost():
            return
        step = self.progress.step if self.training else self._status.step
        with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
            if stop := interruption.reason():
                self._write("stopped", step, STOPPED, stop)
                return
            text = user_text(error)
            if self._unchanged is not None and text is not None:  # a job that was refused leaves the run as it was
                write_status(self.folder, self._unchanged)
                return
            self._write(
                "failed",
                step,
                FAILED if text is None else exit_code_of(error),
                f"{type(error).__name__}: {text or error}",
                final=isinstance(error, RunFailedError) and not error.passing,
                passing=text is not None and is_passing(error),
            )
            if text is not None and self._fresh and not self.training:
                self._discard()

    def _discard(self) -> None:
        (self.folder / CONFIG).unlink(missing_ok=True)
        if self._planted is not None:
            remove_checkpoint(self._planted)
        self._discard_new_logs()
        if not (self.folder / "launch.json").exists():  # else the launcher reads the status, and removes the rest
            discard_refused(self.folder)
            for folder in self._new_folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def _logs(self) -> Iterator[Path]:
        yield from (self.folder / "log").glob("rank-*.log")
        yield from (self.folder / "tensorboard").glob("events.out.tfevents.*")

    def _discard_new_logs(self) -> None:
        """Remove the logs that ranks and callbacks opened before one of them refused the job, but no older file."""
        metrics = self.folder / METRICS
        if metrics.is_file() and metrics.stat().st_size == 0:
            metrics.unlink()
        for log in set(self._logs()) - self._older_logs:
            log.unlink(missing_ok=True)
        for empty in (self.folder / "tensorboard", self.folder / "checkpoints"):
            with contextlib.suppress(OSError):
                empty.rmdir()

    def record_failed_saves(self, count: int) -> None:
        """Write to ``status.json`` how many periodic checkpoints found no space on the disk so far."""
        if count != self._status.failed_saves:
            with contextlib.suppress(OSError):
                self._write("running", self.progress.step, failed_saves=count)

    def _write(
        self,
        state: str,
        step: int,
        code: int | None = None,
        reason: str = "",
        failed_saves: int = -1,
        *,
        final: bool = False,
        passing: bool = False,
    ) -> None:
        lost = self._status.failed_saves if failed_saves < 0 else failed_saves
        status = {"state": state, "step": step, "exit_code": code, "reason": reason, "failed_saves": lost}
        self._status = Status.model_validate({**status, "final": final, "passing": passing})
        if distributed.rank() == 0 and not self.is_lost():
            write_status(self.folder, self._status)

    def is_lost(self) -> bool:
        """Return whether the folder that this rank has locked is gone from its path: nothing more is written there."""
        return self._locked and is_replaced(self.folder / LOCK)

    @contextlib.contextmanager
    def lock(self, wait: float) -> Iterator[None]:
        """Hold the folder's lock. Raises ``ConfigError`` if another process still holds it after ``wait`` seconds."""
        folder = self.folder
        self._new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        refusal = f"run.dir {folder}: another process is training in this folder; stop it, or name another one"
        with file_lock(folder / LOCK, refusal=refusal, wait=wait, error=LockedError):
            self._locked = True
            yield


@contextlib.contextmanager
def open_run_folder(job: Job, *, resume: bool, wait: float = 0.0) -> Iterator[RunStatus]:
    """Lock ``run.dir`` for this job, and leave a true status however the block ends. Collective.

    Raises:
        ConfigError: another job runs in the folder; it holds a run, ``resume`` is False, and this job does not resume
            it by itself (``run.resume``); or a host does not see it.
    """
    folder = job.run.dir
    status, begun = RunStatus(folder), has_begun(job.run.dir, job)
    with machines_at_fault(lambda: begun), contextlib.ExitStack() as stack:
        with distributed.synchronize_errors(patient=wait > 0):
            if distributed.rank() == 0:
                status.look(job, resume=resume)
                stack.enter_context(status.lock(wait))
                status.start(job, resume=resume)
        status.resumes, branch = distributed.broadcast_object((status.resumes, str(status.branch or "")))
        status.branch = Path(branch) if branch else None
        interruption.set_exit_action(lambda: status.record_failure(interruption.Interrupted()))
        try:
            # What is read once the training has begun was there as well.
            with machines_at_fault(lambda: begun or status.training):
                check_is_shared(folder)
                with _log_of_this_rank(folder):
                    yield status
        except BaseException as error:
            status.record_failure(error)
            raise
        finally:
            interruption.set_exit_action(None)


@contextlib.contextmanager
def _log_of_this_rank(folder: Path) -> Iterator[None]:
    with distributed.synchronize_errors():
        path = folder / "log" / f"rank-{distributed.rank()}.log"
        file = open_for_append(path, error=ConfigError)
    handler = _RankLog(file, path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    except Exception as error:
        # An error of the user is one line on the screen; of any other this log keeps the stack trace.
        if user_text(error) is None:
            handler.handle(logging.LogRecord("capt.pretrain", logging.ERROR, "", 0, "%s", (error,), sys.exc_info()))
            setattr(error, LOGGED, path)
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):  # what a full disk did not take
            file.close()


class _RankLog(logging.StreamHandler[IO[str]]):
    """Stops logging to a full disk with one warning; the default handler prints a stack trace for every line."""

    def __init__(self, stream: IO[str], path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        logging.getLogger().removeHandler(self)
        logger.warning("%s: cannot be written any more: %s", self._path, sys.exc_info()[1])
