"""A job takes its run folder, before anything is loaded, and says in ``status.json`` how it stands until it ends."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pretrain.base.errors import ConfigError, shown, user_text
from pretrain.base.files import open_for_append, write_text
from pretrain.config.schema import Job
from pretrain.engine import distributed, interruption
from pretrain.engine.checkpoint import read_job_of_run
from pretrain.engine.checkpoint.save import config_text
from pretrain.engine.metrics_file import METRICS
from pretrain.engine.run_folder import (
    BAD_INPUT,
    FAILED,
    LOCK,
    STOPPED,
    Status,
    check_is_free,
    check_is_own,
    discard_refused,
    held,
    read_status,
    write_status,
)
from pretrain.engine.shared_folder import check_is_shared
from pretrain.engine.task import Progress

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"


class Claim:
    """The run folder in the hands of this job. Rank 0 writes; on other ranks nothing happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress = Progress()
        self.begun = False
        self._fresh = False
        self._not_ours: frozenset[Path] = frozenset()
        self._new_folders: list[Path] = []
        self._status = Status(state="starting")

    def take(self, job: Job, *, resume: bool) -> None:
        """Write ``config.yaml`` (a resumed run has one) and the status ``starting``; the folder is locked.

        Raises:
            ConfigError: the folder holds a run already, or a part of it is a link.
        """
        if not resume:
            check_is_free(self.folder)
        check_is_own(self.folder)
        self._not_ours = frozenset(self._logs())
        before = self._status_before() if resume else None
        self._fresh = not (self.folder / CONFIG).exists()
        if self._fresh:
            write_text(self.folder / CONFIG, config_text(job))
        self._write("starting", before.step if before else 0)

    def _status_before(self) -> Status | None:
        try:
            return read_status(self.folder)
        except ConfigError as error:
            logger.warning("%s; it is written anew", error)
            return None

    def keep_config(self, job: Job) -> None:
        """Replace ``config.yaml`` by the job as it runs, and name in the log what differs from before."""
        changed = {} if self._fresh else changed_keys(read_job_of_run(self.folder), job)
        if changed:
            news = ", ".join(f"{key} {shown(old)} -> {shown(new)}" for key, (old, new) in changed.items())
            logger.warning("differs from the run's configuration so far: %s", news)
        write_text(self.folder / CONFIG, config_text(job))

    def begin(self) -> None:
        """The first step is next."""
        self.begun = True
        interruption.begin()
        self._write("running", self.progress.step)

    def end(self, state: str, code: int, reason: str = "") -> None:
        """The job ends by itself: ``done`` or ``stopped``."""
        interruption.begin()
        self._write(state, self.progress.step, code, reason)

    def fail(self, error: BaseException) -> None:
        """The job ends by an exception. One that was refused before its first step leaves a new folder as it was."""
        if distributed.rank() != 0:
            return
        step = self.progress.step if self.begun else self._status.step
        with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
            if stop := interruption.reason():
                self._write("stopped", step, STOPPED, stop)
                return
            text = user_text(error)
            self._write(
                "failed", step, FAILED if text is None else BAD_INPUT, f"{type(error).__name__}: {text or error}"
            )
            if text is not None and self._fresh and not self.begun:
                self._discard()

    def _discard(self) -> None:
        (self.folder / CONFIG).unlink(missing_ok=True)
        self._discard_logs_of_no_step()
        if not (self.folder / "launch.json").exists():  # else the launcher reads the status, and removes the rest
            discard_refused(self.folder)
            for folder in self._new_folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def _logs(self) -> Iterator[Path]:
        yield from (self.folder / "log").glob("rank-*.log")
        yield from (self.folder / "tensorboard").glob("events.out.tfevents.*")

    def _discard_logs_of_no_step(self) -> None:
        """What ranks and callbacks have opened, when one of them refuses the job; not what was there before it."""
        metrics = self.folder / METRICS
        if metrics.is_file() and metrics.stat().st_size == 0:
            metrics.unlink()
        for log in set(self._logs()) - self._not_ours:
            log.unlink(missing_ok=True)
        for empty in (self.folder / "tensorboard", self.folder / "checkpoints"):
            with contextlib.suppress(OSError):
                empty.rmdir()

    def note_failed_saves(self, count: int) -> None:
        """Periodic checkpoints found no room so far: ``status.json`` says how many, as soon as it can be written."""
        if count != self._status.failed_saves:
            with contextlib.suppress(OSError):
                self._write("running", self.progress.step, failed_saves=count)

    def _write(self, state: str, step: int, code: int | None = None, reason: str = "", failed_saves: int = -1) -> None:
        lost = self._status.failed_saves if failed_saves < 0 else failed_saves
        status = {"state": state, "step": step, "exit_code": code, "reason": reason, "failed_saves": lost}
        self._status = Status.model_validate(status)
        if distributed.rank() == 0:
            write_status(self.folder, self._status)

    @contextlib.contextmanager
    def locked(self, wait: float) -> Iterator[None]:
        """Hold the folder's lock (rank 0 alone). Raises ``ConfigError``, if another process holds it that long."""
        folder = self.folder
        self._new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        refusal = f"run.dir {folder}: another process is training in this folder; stop it, or name another one"
        with held(folder, LOCK, refusal, wait):
            yield


@contextlib.contextmanager
def claimed(job: Job, *, resume: bool, wait: float = 0.0) -> Iterator[Claim]:
    """Take ``run.dir`` for this job on all ranks, and leave a truthful status however the block ends. Collective.

    Raises:
        ConfigError: another job runs in the folder, or (unless ``resume``) it holds a run; or a host does not see it.
    """
    folder = job.run.dir
    claim = Claim(folder)
    with contextlib.ExitStack() as stack:
        with distributed.synchronize_errors(patient=wait > 0):
            if distributed.rank() == 0:
                if not resume:
                    check_is_free(folder)
                stack.enter_context(claim.locked(wait))
                claim.take(job, resume=resume)
        interruption.before_exit(lambda: claim.fail(interruption.Interrupted()))
        try:
            check_is_shared(folder)
            with _log_of_this_rank(folder):
                yield claim
        except BaseException as error:
            claim.fail(error)
            raise
        finally:
            interruption.before_exit(None)


@contextlib.contextmanager
def _log_of_this_rank(folder: Path) -> Iterator[None]:
    with distributed.synchronize_errors():
        path = folder / "log" / f"rank-{distributed.rank()}.log"
        file = open_for_append(path, error=ConfigError)
    handler = _RankLog(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):  # what a full disk did not take
            file.close()


class _RankLog(logging.StreamHandler[IO[str]]):
    """A log on a full disk ends, and says so once; logging's own answer is a stack trace a line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        logging.getLogger().removeHandler(self)
        logger.warning("%s: cannot be written any more: %s", self.stream.name, sys.exc_info()[1])


def changed_keys(old: Job, new: Job) -> dict[str, tuple[object, object]]:
    """Dotted keys whose values differ between two jobs, with both values."""

    def flat(value: object, prefix: str = "") -> dict[str, object]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {
            k: v for key, item in value.items() for k, v in flat(item, f"{prefix}.{key}" if prefix else key).items()
        }

    a, b = flat(old.model_dump(mode="json", by_alias=True)), flat(new.model_dump(mode="json", by_alias=True))
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}
