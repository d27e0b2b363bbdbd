"""Tasks that processes of any number of hosts share through a folder: each is done by one of them, once.

A task is taken under a *lease*, a file that names its owner and that the owner touches while it works. No locks of the
file system are needed, and no clocks that agree: a lease counts as abandoned when its owner, a process of this host,
is gone, or when nobody has touched it for `EXPIRES` seconds by the clock of the one who watches. A lease that is taken
from an owner who was merely slow does no harm: a task publishes its result by a rename, and results are equal.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.process import boot_id, born

BEAT = 10.0
"""Seconds between two touches of a lease."""
EXPIRES = 180.0
"""Seconds without a touch after which a lease counts as abandoned: NFS shows a touch up to a minute late."""
_PAUSE = 0.2
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class LeasedTask:
    """Work with one result: ``run`` makes it, and ``is_done`` says whether it is there."""

    name: str
    is_done: Callable[[], bool]
    run: Callable[[], None]


class Leases:
    """The leases in ``folder``, as one process sees them."""

    def __init__(self, folder: Path, *, beat: float = BEAT, expires: float = EXPIRES) -> None:
        self._folder, self._beat, self._expires = folder, beat, expires
        self._seen: dict[str, tuple[str, int, float]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def share(self, tasks: Sequence[LeasedTask], after: Callable[[], None] = lambda: None) -> None:
        """Return when all tasks are done, by this process or by others; ``after`` is called after each one done here.

        What a task raises ends this call, and the task is free for others.

        Raises:
            DataError: the file system of the folder has no hard links.
        """
        waiting = list(tasks)
        while waiting:
            before, left = len(waiting), []
            for task in waiting:
                if task.is_done():
                    continue
                with self._held(task.name) as mine:
                    if not mine:
                        left.append(task)
                    elif not task.is_done():  # else another one has done it between the two questions
                        task.run()
                        after()
            waiting = left
            if len(waiting) == before:
                time.sleep(_PAUSE)

    @contextmanager
    def _held(self, name: str) -> Iterator[bool]:
        path = self._folder / f"{name}.lease"
        # The first three words tell whether the owner lives, the last one tells its leases apart.
        owner = f"{_place()} {os.getpid()} {born(os.getpid()) or ''} {secrets.token_hex(8)}"
        if not self._take(path, owner):
            yield False
            return
        done = threading.Event()
        beating = threading.Thread(target=self._keep, args=(path, done), daemon=True)
        beating.start()
        try:
            yield True
        finally:
            done.set()
            beating.join()
            # Another process may have taken it for abandoned, and hold it now.
            if _read(path) == owner:
                path.unlink(missing_ok=True)

    def _take(self, path: Path, owner: str) -> bool:
        if (found := _read(path)) is not None:
            if not self._is_abandoned(path, found):
                return False
            _remove(path, found)
        own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        own.write_text(owner)  # a lease has its owner from its first moment on
        # A link to a name that is there fails, also over NFS: one process of several gets the lease.
        try:
            try:
                os.link(own, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise DataError(
                    f"{self._folder}: this file system has no hard links ({error.strerror}), by which processes share "
                    "work: take a folder of another one"
                ) from None
            return True
        finally:
            own.unlink()

    def _is_abandoned(self, path: Path, owner: str) -> bool:
        words = owner.split()
        # An owner on this host is looked up; one elsewhere is watched by this process's own clock.
        if len(words) == 4 and words[0] == _place():
            return str(born(int(words[1]))) != words[2]
        try:
            touched = path.stat().st_mtime_ns
        except FileNotFoundError:
            # Given back this moment: the next round takes it.
            return False
        seen = self._seen.get(path.name)
        if seen is None or seen[:2] != (owner, touched):
            self._seen[path.name] = (owner, touched, time.monotonic())
            return False
        return time.monotonic() - seen[2] > self._expires

    def _keep(self, path: Path, done: threading.Event) -> None:
        while not done.wait(self._beat):
            with suppress(OSError):
                os.utime(path)


def _remove(path: Path, owner: str) -> None:
    """Remove an abandoned lease, unless another process has done so and taken a new one meanwhile."""
    old = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.rename(old)
    except FileNotFoundError:
        return
    # It was not the abandoned one: its owner gets it back.
    if _read(old) != owner:
        with suppress(FileExistsError):
            os.link(old, path)
    old.unlink()


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def _place() -> str:
    """The scope of process ids: this host since its start, and its namespace of processes."""
    parts = [socket.gethostname(), boot_id()]
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts).replace(" ", "_")
