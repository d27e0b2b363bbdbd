"""One lock for processes that must not use a file or folder at the same time, also on different hosts."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from capt.pretrain.base.cache import require_cache
from capt.pretrain.base.errors import ConfigError, DataError, UserError
from capt.pretrain.base.files import open_lock, open_regular

logger = logging.getLogger(__name__)

_SHORTEST_WAIT = 0.5
"""Seconds. `is_locked` of another process holds the lock for a moment, which must not look like an owner."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0

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
    remedy: str | None = None,
    error: type[UserError] = ConfigError,
) -> Iterator[None]:
    """Hold an exclusive lock on the file ``path``, which the kernel frees when this process dies.

    A process that is forked inside of the block does not hold it.

    Args:
        path: the lock file. It is created when it is missing, and never opened through a link.
        refusal: the message of the error when another process holds the lock.
        wait: seconds to wait for another process; None waits without end.
        remove: remove the file at the end of the block.
        remedy: what a user can do about a file system that has no locks. With it this is an error; without it a warning
            is logged, and the block runs unprotected.
        error: the class of the errors.

    Raises:
        UserError: of the class ``error``: another process still holds the lock after ``wait`` seconds; the file system
            has no locks and there is a ``remedy``; or ``path`` is a link.
    """
    deadline = None if wait is None else time.monotonic() + max(wait, _SHORTEST_WAIT)
    pause = _FIRST_PAUSE
    while True:
        with open_lock(path, error=error) as file:
            try:
                is_current = _lock(file, path, remedy, error, blocking=deadline is None) and _is_open_at(file, path)
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
            _held.add(file)
            try:
                yield
            finally:
                _held.discard(file)
                if remove:
                    path.unlink()
            return


def cache_lock(path: Path) -> AbstractContextManager[None]:
    """The lock of a file or folder of the cache that several processes may be about to make; removed at the end.

    The folder of the lock is made if need be. Raises ``DataError`` where that cannot be written.
    """
    require_cache(path.parent)
    return file_lock(path, wait=None, remove=True, remedy="set data.cache to a local folder", error=DataError)


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock on ``path``."""
    if not path.is_file() or path.is_symlink():
        return False
    with open_regular(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as problem:
            _warn_of_no_locks(path, problem)
    return False


def is_replaced(path: Path) -> bool:
    """Whether the file at ``path`` is no longer the one that this process holds locked: it is gone or another one.

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
    """Whether the open file is the one at ``path`` now."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    return False
