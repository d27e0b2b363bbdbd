"""A lock for processes that must not use a file or folder at the same time, also on different hosts."""

from __future__ import annotations

import errno
import fcntl
import glob
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.cache import require_cache
from capt.pretrain.base.errors import ConfigError, DataError, UserError
from capt.pretrain.base.files import open_lock, open_regular

logger = logging.getLogger(__name__)

_SHORTEST_WAIT = 0.5
"""Seconds. `is_locked` of another process holds the lock for a moment, which must not look like an owner."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0

_CACHE_REMEDY = "set data.cache to a local folder"

_held: set[IO[str]] = set()
"""The locked files of this process."""


def _let_go() -> None:
    """Close what a fork has copied: a loader worker that outlives its killed rank would hold the rank's lock."""
    while _held:
        _held.pop().close()  # the parent's descriptor keeps the lock


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def file_lock(
    path: Path,
    *,
    refusal: str = "",
    wait: float | None = 0.0,
    remove: bool = False,
    error: type[UserError] = ConfigError,
) -> Iterator[None]:
    """Hold an exclusive lock on the file ``path``, which the kernel frees when this process dies.

    A process that is forked inside of the block does not hold it.

    Args:
        path: the lock file. It is created when it is missing, and never opened through a link.
        refusal: the message of the error when another process holds the lock.
        wait: seconds to wait for another process; None waits without end.
        remove: remove the file at the end of the block.
        error: the class of the errors.

    On a file system that has no locks a warning is logged, and the block runs unprotected.

    Raises:
        UserError: of the class ``error``: another process still holds the lock after ``wait`` seconds, or ``path`` is a
            link.
    """
    deadline = None if wait is None else time.monotonic() + max(wait, _SHORTEST_WAIT)
    pause = _FIRST_PAUSE
    while True:
        with open_lock(path, error=error) as file:
            try:
                is_current = _lock(file, path, None, error, blocking=deadline is None) and _is_open_at(file, path)
            except BlockingIOError:
                assert deadline is not None
                if time.monotonic() > deadline:
                    raise error(refusal) from None
                if wait and pause == _FIRST_PAUSE:
                    logger.warning("%s is held by another job: waiting up to %.0f s for its end", path.parent, wait)
                time.sleep(pause)
                pause = min(1.1 * pause, _LONGEST_PAUSE)
                continue
            if not is_current:  # its last owner has removed the file: lock the new one
                continue
            with _holding(file, path, remove=remove):
                yield
            return


def make_once(lock: Path, is_made: Callable[[], bool], make: Callable[[], None]) -> None:
    """Make something of the cache, unless it is there: of several processes one does, and the others wait for it.

    What is there is found without the lock, and so is what another process has made meanwhile: a thousand ranks would
    else take the lock in turn, each in a new file.

    Args:
        lock: a file, whose folder is made if need be; it is removed at the end.
        is_made: whether it is there.
        make: makes it; called with the lock held, and never where it is there.

    Raises:
        DataError: the folder of the lock cannot be written, or has no locks.
    """
    while not is_made():
        require_cache(lock.parent)
        with open_lock(lock, error=DataError) as file:
            if not (_lock(file, lock, _CACHE_REMEDY, DataError, blocking=True) and _is_open_at(file, lock)):
                continue  # its last owner has removed the file, and may have made what it was for
            with _holding(file, lock, remove=True):
                if not is_made():
                    make()
            return


def make_folder_once(
    folder: Path, write: Callable[[Path], None], *, is_made: Callable[[], bool] | None = None, replace: bool = False
) -> None:
    """Make a folder of the cache, which appears whole, unless it is there; see `make_once` and `new_folder`.

    Args:
        folder: the folder; its lock lies beside it.
        write: fills an empty folder, which is then renamed.
        is_made: whether the folder is the one that is wanted; None = it is there.
        replace: whether another folder in its place gives way.

    Raises:
        DataError: as `make_once`; or without ``replace`` something else is in its place.
    """

    def make() -> None:
        # Leftovers of killed writers, also of other hosts: the lock is held, so no other one is at work.
        for abandoned in folder.parent.glob(f".{glob.escape(folder.name)}.*.partial"):
            if abandoned.is_symlink():
                abandoned.unlink()
            else:
                shutil.rmtree(abandoned)
        with new_folder(folder, replace=replace) as partial:
            write(partial)

    make_once(folder.with_name(f".{folder.name}.lock"), is_made or folder.is_dir, make)


@contextmanager
def _holding(file: IO[str], path: Path, *, remove: bool) -> Iterator[None]:
    """Let a fork know of a file that is locked; at the end of the block it may be removed."""
    _held.add(file)
    try:
        yield
    finally:
        _held.discard(file)
        if remove:
            path.unlink()


def is_locked(path: Path) -> bool:
    """Return whether another process holds the lock on ``path``."""
    if not path.is_file() or path.is_symlink():
        return False
    with open_regular(path) as file:
        try:
            # Shared, so that two processes that look do not take each other for the owner.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as problem:
            _warn_of_no_locks(path, problem)
    return False


def is_replaced(path: Path) -> bool:
    """Return whether the file at ``path`` is gone, or no longer the one that this process holds locked.

    What a file server cannot tell just now is not an answer.
    """
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return not any(os.path.samestat(os.fstat(file.fileno()), found) for file in _held)


def _lock(file: IO[str], path: Path, remedy: str | None, error: type[UserError], *, blocking: bool) -> bool:
    """Lock an open file; False when another host has removed it meanwhile."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as problem:
        if problem.errno == errno.ESTALE:
            return False
        if remedy is not None:
            raise error(f"cannot lock {path} ({problem.strerror}): {remedy}") from problem
        _warn_of_no_locks(path, problem)
    return True


def _warn_of_no_locks(path: Path, problem: OSError) -> None:
    logger.warning("%s cannot be locked (%s): make sure that no other process uses it", path.parent, problem.strerror)


def _is_open_at(file: IO[str], path: Path) -> bool:
    """Return whether the open file is the one at ``path`` now."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    return False
