"""What a launcher and a rank must agree on: exit codes, how a run stands, and when a folder is taken. No torch."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal, TypeVar

from pydantic import Field, FiniteFloat

from pretrain.base.errors import ConfigError
from pretrain.base.files import open_lock, read_json, require_own_folder, write_json
from pretrain.base.records import Count, Record, parse

logger = logging.getLogger(__name__)

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75

STATUS, BEST, LOCK = "status.json", "best.json", ".training"
_RUN_MARKS = ("config.yaml", "metrics.jsonl", "checkpoints")
OWN_FOLDERS = ("checkpoints", "codes", "log", "profile", "tensorboard")
"""Folders of a run in which a job writes and removes: no links, so that nothing outside the run is touched."""
_LONGEST_REASON = 2000


class Status(Record):
    """``status.json``: how the run stands.

    ``starting`` (data are prepared, nothing is trained yet), ``running``, ``done``, ``stopped`` (resumable) or
    ``failed``. A process that is killed cannot write: ``starting`` and ``running`` are true while the folder is held
    (:func:`is_held`).
    """

    state: Literal["starting", "running", "done", "stopped", "failed"]
    step: Count = 0
    exit_code: int | None = Field(None, ge=0, le=255)
    reason: str = Field("", max_length=1_000_000)
    failed_saves: Count = 0
    """Periodic checkpoints that could not be written (a full disk); the run went on without them."""


class Best(Record):
    """``best.json``: the best validation value of ``checkpoint.best``, and the step it belongs to."""

    metric: str = Field(max_length=1000)
    mode: Literal["max", "min"]
    step: Count
    value: FiniteFloat = Field(strict=False)


_R = TypeVar("_R", bound=Record)


def read_status(folder: Path) -> Status | None:
    """How the run in ``folder`` stands; None without a ``status.json``. Raises ``ConfigError``, if it is damaged."""
    return _read(folder / STATUS, Status)


def read_best(folder: Path) -> Best | None:
    """The record of the best checkpoint; None without a ``best.json``. Raises ``ConfigError``, if it is damaged."""
    return _read(folder / BEST, Best)


def write_status(folder: Path, status: Status) -> None:
    """Replace ``status.json``; on a full disk in place, since a run that ends there must say so."""
    status = status.model_copy(update={"reason": status.reason[:_LONGEST_REASON]})
    values = status.model_dump(exclude=None if status.failed_saves else {"failed_saves"})
    try:
        write_json(folder / STATUS, values)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (folder / STATUS).is_file():
            raise
        with open_lock(folder / STATUS, error=ConfigError) as file:  # its block is there already
            file.truncate()
            file.write(status.model_dump_json())


def write_best(folder: Path, best: Best) -> None:
    """Replace ``best.json``."""
    write_json(folder / BEST, best.model_dump())


def _read(path: Path, kind: type[_R]) -> _R | None:
    try:
        content = read_json(path, error=ConfigError)
    except FileNotFoundError:
        return None
    return parse(kind, content, path, "; remove the file")


def check_is_free(folder: Path) -> None:
    """Refuse a folder that already holds a run. Raises ``ConfigError``."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir {folder} is a file; name a folder")
    if holds_run(folder):
        raise ConfigError(
            f"run.dir {folder} already holds a run; continue it with 'capt resume {folder}' or name another folder"
        )


def check_is_own(folder: Path) -> None:
    """Refuse a run folder of which a part is a link: what lies there would be appended to, pruned or removed.

    The run folder itself may be a link. Raises ``ConfigError``.
    """
    for name in OWN_FOLDERS:
        require_own_folder(folder / name, error=ConfigError)


def holds_run(folder: Path) -> bool:
    """Whether a job has taken ``folder``: it can be resumed, or its results looked at."""
    return any((folder / mark).exists() or (folder / mark).is_symlink() for mark in _RUN_MARKS)


def discard_refused(folder: Path) -> None:
    """Remove what a job that was refused before its first step left in its folder: status, launch options, empty log.

    A folder that holds a run stays as it is.
    """
    if holds_run(folder):
        return
    for name in (STATUS, "launch.json", LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        (folder / "log").rmdir()


@contextmanager
def held(folder: Path, name: str, refusal: str, wait: float = 0.0) -> Iterator[None]:
    """Hold ``folder`` by a lock on its file ``name``, which the kernel frees when this process dies.

    Raises:
        ConfigError: ``refusal``, when another process holds it, and still does after ``wait`` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # is_held() of another process holds it for a moment
    path, patience, pause = folder / name, time.monotonic() + max(wait, 0.5), 0.05
    while True:
        with open_lock(path, error=ConfigError) as lock:
            try:
                _flock(lock, path, fcntl.LOCK_EX)
            except BlockingIOError:
                if time.monotonic() > patience:
                    raise ConfigError(refusal) from None
                if pause == 0.05 and wait:
                    logger.warning("%s is held by another job: waiting up to %.0f s for its end", folder, wait)
                time.sleep(pause)
                pause = min(1.1 * pause, 1.0)
                continue
            if _is_of(lock, path):
                yield
                return


def is_held(folder: Path, name: str = LOCK) -> bool:
    """Whether a process holds ``folder``: of a run, whether it is alive."""
    path = folder / name
    if not path.is_file() or path.is_symlink():
        return False
    try:
        with path.open("rb") as lock:
            return not _flock(lock, path, fcntl.LOCK_SH)
    except BlockingIOError:
        return True


def _flock(lock: IO[str] | IO[bytes], path: Path, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # a network file system without locks
        logger.warning("%s cannot be locked (%s): see to it that nobody else uses it", path.parent, error.strerror)
        return False
    return True


def _is_of(lock: IO[str], path: Path) -> bool:
    """Whether the open file is still the one at ``path``, and not one that its last holder has removed."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(lock.fileno()), path.lstat())
    return False
