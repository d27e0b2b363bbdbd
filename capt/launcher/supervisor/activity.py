"""The activity of a job that was asked to stop (it may save, or never answer), and the report of a crash."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from capt.launcher.supervisor.processes import descendants
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import require_own_folder, write_json
from capt.pretrain.base.records import Count, Record
from capt.pretrain.engine.run_folder import CRASHES

_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_LEAST = 0.02
"""Share of a core that background threads of a waiting process stay below."""

# stat, open, rename, mkdir, rmdir, unlink and their like; read, write, close, fsync, fdatasync, truncate and theirs
_CALLS = {
    "x86_64": (
        frozenset({2, 4, 6, 76, 82, 83, 84, 87, 257, 258, 262, 263, 264, 316, 332}),
        frozenset({0, 1, 3, 5, 17, 18, 19, 20, 74, 75, 77, 277}),
    ),
    "aarch64": (
        frozenset({34, 35, 38, 45, 56, 79, 276, 291}),
        frozenset({46, 57, 63, 64, 65, 66, 67, 68, 80, 82, 83, 84}),
    ),
}


class Activity:
    """Watches processes and what they started: processor time, bytes written, and waits for a disk.

    A job that finishes its step and saves does one of these all the time. A rank that is stopped or stuck, and the
    others that wait for it in a collective, do none.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._last = time.monotonic()
        self._cpu, self._written = self._totals()

    def idle(self) -> float:
        """Seconds since anything was done, as far as the calls of this method saw it."""
        now = time.monotonic()
        cpu, written = self._totals()
        worked = cpu - self._cpu > max(2 * _TICK, _LEAST * (now - self._last)) or written != self._written
        if worked or any(waits_for_files(pid) for pid in self._pids):
            self._last, self._cpu, self._written = now, cpu, written
        return now - self._last

    def _totals(self) -> tuple[float, int]:
        cpu, written = 0.0, 0
        for folder in self._folders():
            with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                fields = _fields(folder / "stat")
                # Time in the program and in the kernel (utime, stime).
                cpu += (int(fields[11]) + int(fields[12])) * _TICK
                lines = (folder / "io").read_text().splitlines()
                # All that was given to write calls, whether or not a disk has it yet.
                written += sum(int(line.split()[1]) for line in lines if line.startswith("wchar"))
        return cpu, written

    def _folders(self) -> Iterator[Path]:
        for pid in self._pids:
            yield from (Path(f"/proc/{child}") for child in (pid, *descendants(pid)))


def waits_for_files(pid: int) -> bool:
    """Return true where a thread of a process, or of one that it started, waits for a file system at this moment."""
    for child in (pid, *descendants(pid)):
        for thread in Path(f"/proc/{child}").glob("task/*"):
            with suppress(OSError, IndexError, ValueError):
                state = _fields(thread / "stat")[0]
                # D: in a disk's sleep; T: suspended, which says nothing of files.
                if state == "D" or (state != "T" and _is_in_a_file(thread)):
                    return True
    return False


def _is_in_a_file(thread: Path) -> bool:
    """Look for a call about a file in a thread. Lustre and FUSE wait in states that are not called a disk's."""
    about_paths, about_descriptors = _CALLS.get(os.uname().machine, (frozenset(), frozenset()))
    call, *arguments = (thread / "syscall").read_text().split()
    if call == "running" or int(call) not in about_paths | about_descriptors:
        return False
    if int(call) in about_paths:
        return True
    target = os.readlink(thread.parents[1] / "fd" / str(int(arguments[0], 16)))
    return target.startswith("/") and not target.startswith("/dev/")  # no pipe, socket or terminal


def _fields(stat: Path) -> list[str]:
    """State, parent, ... of a ``stat`` file: what follows the program's name, which may hold anything."""
    return stat.read_text().rpartition(")")[2].split()


# The report of a crash: one JSON file in the run folder, and one line for people.


log = logging.getLogger(__name__)

_KEPT = 20
_NAME = re.compile(r"(\d{4,9})\.json", re.ASCII)


class Crash(Record):
    """The end of a job. ``signal`` is the name of the one that killed the rank; ``stacks`` are of a rank that hung."""

    cause: str = Field(max_length=2000)
    host: str = Field(max_length=256)
    rank: Count | None = None
    pid: Count | None = None
    step: Count | None = None
    section: str | None = Field(None, max_length=20)
    signal: str | None = Field(None, max_length=20)
    stacks: str = Field("", max_length=200_000)

    @classmethod
    def here(cls, cause: str, **facts: object) -> Crash:
        """A crash on this host."""
        return cls.model_validate({"cause": cause, "host": socket.gethostname(), **facts})


def write_crash(run: Path, crash: Crash) -> Path | None:
    """Write the next ``RUN/crashes/NNNN.json``, keep the newest twenty, and return the file.

    None, with a warning, where nothing can be written: a full disk or a link must not hide what went wrong. Files of
    other names are nobody's business.
    """
    folder = run / CRASHES
    try:
        require_own_folder(folder, error=ConfigError)
        folder.mkdir(exist_ok=True)
        older = sorted((int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))
        path = folder / f"{older[-1][0] + 1 if older else 1:04d}.json"
        write_json(path, crash.model_dump())
        for _, old in older[: max(0, len(older) + 1 - _KEPT)]:
            old.unlink(missing_ok=True)
    except (ConfigError, OSError) as error:
        log.warning("no report of this crash is written: %s", error)
        return None
    return path
