"""The ranks of a job as its watcher sees them, and those that run on this host."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from capt.launcher.supervisor import processes
from capt.launcher.supervisor.activity import Activity, waits_for_files
from capt.launcher.supervisor.heartbeats import Page, Pulse, is_stopped
from capt.launcher.supervisor.output import takes_output
from capt.pretrain.base.process import LISTENS, SCRATCH

HEARING = 2.0
"""Seconds that a rank has to write its stacks."""
_POLL = 0.05


class Lost(NamedTuple):
    """A host whose ranks cannot be looked after any more, one of them, and why."""

    host: str
    rank: int
    reason: str


class Ranks(Protocol):
    """The ranks of a job, wherever they run."""

    codes: list[int | None]
    """Their exit codes: None while one runs, the negative number of the signal that killed it."""
    delay: float
    """Seconds by which news of one rank may come later than that of another."""

    def look(self, seconds: float) -> None:
        """Let so much time pass, and see what is new."""

    def lost(self) -> Lost | None:
        """A host with ranks that have not ended, and that cannot be reached."""

    def pulse(self, rank: int) -> Pulse | None:
        """Return what a rank does, or last did; None where it has noted nothing yet."""

    def is_fresh(self) -> bool:
        """Return true where the pulses are those of now."""

    def is_held_up(self) -> bool:
        """Return true where the ranks may wait for what is no fault of theirs."""

    def where(self, rank: int) -> tuple[str | None, int]:
        """The host of a rank (None: this one) and its process."""

    def send(self, number: signal.Signals) -> None:
        """Signal every rank."""

    def kill(self) -> None:
        """SIGKILL every rank and what it started."""

    def idle(self) -> float:
        """Seconds since a rank did anything, as far as the calls of this method saw it."""

    def is_suspended(self, rank: int) -> bool:
        """Return true where a rank is suspended, as far as is known."""

    def waits_for_files(self, rank: int) -> bool:
        """Return true where a rank, or a data worker of it, waits for a file system, as far as is known."""

    def stacks(self, rank: int) -> tuple[str, str]:
        """The stacks of a rank, which are asked for, or what one that failed has left; and what of it is suspended."""

    def close(self) -> None:
        """Kill what still runs, and see it end."""


class LocalRanks:
    """Ranks that are children of this process and die with it."""

    delay = 0.0

    def __init__(self) -> None:
        self.codes: list[int | None] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._pages: list[Page] = []
        self._scratch: Scratch | None = None
        self._asked: signal.Signals | None = None
        self._activity: Activity | None = None
        self._door: socket.socket | None = None

    def listen(self, port: int, *, alone: bool, again: bool) -> int:
        """Open the socket of the rendezvous, which rank 0 inherits, so that no other process takes its port; return it.

        ``alone``: all ranks are on this host, so the socket is not open to others. A job that is started ``again``
        takes another port where another program has taken its own. Raises ``OSError``.
        """
        self._close_door()
        try:
            self._door = listening("127.0.0.1" if alone else "", port)
        except OSError as error:
            if not again or error.errno != errno.EADDRINUSE:
                raise
            return self.listen(0, alone=alone, again=False)
        return int(self._door.getsockname()[1])

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the next rank. Raises ``OSError`` where the program cannot be started."""
        self._scratch = self._scratch or Scratch()
        page = Page(len(self._pages))
        self._pages.append(page)
        inherits = page.descriptors
        given = {**env, **page.env, **self._scratch.env}
        if self._door is not None:
            inherits = (*inherits, self._door.fileno())
            given[LISTENS] = str(self._door.fileno())
        # Rank 0 alone inherits the open socket of the rendezvous.
        rank = processes.start(argv, given, on_parent_death=signal.SIGKILL, inherits=inherits)
        self._close_door()
        self._ranks.append(rank)
        self.codes.append(None)
        if self._asked:  # it came while ranks were started
            processes.send(rank, self._asked)

    def look(self, seconds: float) -> None:
        """Sleep, and see which ranks have ended."""
        time.sleep(seconds)
        self.codes = [rank.returncode if processes.ended(rank) else None for rank in self._ranks]

    def lost(self) -> None:
        """This host cannot be lost."""

    def pulse(self, rank: int) -> Pulse | None:
        """Return what a rank does, read from its page."""
        return self._pages[rank].read()

    def is_fresh(self) -> bool:
        """A page is always that of now."""
        return True

    def is_held_up(self) -> bool:
        """Ranks print where this process does, and wait while that takes nothing."""
        return not takes_output()

    def where(self, rank: int) -> tuple[str | None, int]:
        """This host, and the process."""
        return None, self._ranks[rank].pid

    def send(self, number: signal.Signals) -> None:
        """Signal every rank, also one that is about to be started."""
        self._asked = number
        for rank in self._ranks:
            processes.send(rank, number)

    def kill(self) -> None:
        """SIGKILL every rank and what it started."""
        for rank in self._ranks:
            processes.kill_tree(rank)

    def idle(self) -> float:
        """Seconds since any rank did anything; the first call is the beginning."""
        self._activity = self._activity or Activity([rank.pid for rank in self._ranks])
        return self._activity.idle()

    def is_suspended(self, rank: int) -> bool:
        """Return true where a rank is suspended now."""
        return self.codes[rank] is None and is_stopped(self._ranks[rank].pid)

    def waits_for_files(self, rank: int) -> bool:
        """Return true where a rank or a data worker of it waits for a file system now."""
        return self.codes[rank] is None and waits_for_files(self._ranks[rank].pid)

    def stacks(self, rank: int) -> tuple[str, str]:
        """Ask a rank for its stacks by SIGQUIT; within two seconds they are there, or it cannot write them."""
        pid, page, before = self._ranks[rank].pid, self._pages[rank], ""
        if self.codes[rank] is not None or is_stopped(pid):
            return page.stacks(), "it is suspended" if self.is_suspended(rank) else ""
        os.kill(pid, signal.SIGQUIT)
        deadline = time.monotonic() + HEARING
        while time.monotonic() < deadline and not processes.ended(self._ranks[rank]):
            time.sleep(_POLL)
            said = page.stacks()
            # The stacks are whole once they no longer grow.
            if said and said == before:
                break
            before = said
        workers = [child for child in processes.descendants(pid) if is_stopped(child)]
        return page.stacks(), f"its data worker, process {workers[0]}, is suspended" if workers else ""

    def close(self) -> None:
        """Kill what still runs, see it end, and give back the pages and the place for files."""
        self.kill()
        for rank in self._ranks:
            rank.wait()
        for page in self._pages:
            page.close()
        self._pages.clear()
        self._close_door()
        if self._scratch is not None:
            self._scratch.close()


def listening(address: str, port: int) -> socket.socket:
    """A socket that listens there; without an address on all, those of IPv6 too, where the system has it."""
    if not address and socket.has_dualstack_ipv6():
        try:
            # Dual-stack, so that hosts reach it by addresses of either kind.
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server((address, port), backlog=1024)


# A folder for what ranks keep on disk while they run: removed when they have ended, however they ended.


_PREFIX = "capt-r-"
_LONGEST = 70
"""Bytes of the name of the folder: sockets in it have names of at most 107."""
_SHORT = "/tmp"
"""Parent of the folder if the path of the temporary files (``TMPDIR``) is too long for sockets."""


class Scratch:
    """A private folder among the temporary files, locked for as long as this process lives.

    A killed process cannot remove its folder. The next one on the host does: a folder that is not locked is nobody's.
    Those of other hosts, whose locks some file systems do not show here, have other names.
    Where none can be made there is none, and the sockets of killed ranks stay where Python puts them.
    """

    def __init__(self) -> None:
        _remove_nobodys()
        self._path: Path | None = None
        while self._path is None:
            try:
                path = Path(tempfile.mkdtemp(prefix=_own_prefix(), dir=_place()))
            except OSError:  # a folder that cannot be written to
                return
            try:
                self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # another process has taken it for nobody's
                continue
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if path.is_dir():  # nor has it between these two calls
                self._path = path
            else:
                os.close(self._lock)

    @property
    def env(self) -> dict[str, str]:
        """Return the variables by which a rank finds it."""
        return {SCRATCH: str(self._path)} if self._path else {}

    def close(self) -> None:
        """Remove the folder, and what is in it."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._lock)
            self._path = None


def _own_prefix() -> str:
    return f"{_PREFIX}{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:4]}-"


def _place() -> str:
    usual = tempfile.gettempdir()
    # The 9: a separator, and the eight characters that mkdtemp adds.
    return usual if len(os.fsencode(usual)) + len(_own_prefix()) + 9 <= _LONGEST else _SHORT


def _remove_nobodys() -> None:
    for path in Path(_place()).glob(f"{_own_prefix()}*"):
        with suppress(OSError):  # it is locked, or no folder of ours
            found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(found).st_uid == os.geteuid():
                    fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(found)
