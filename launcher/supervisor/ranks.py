"""The ranks of a job as its watcher sees them, and those that run on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from launcher.supervisor import processes
from launcher.supervisor.activity import Activity
from launcher.supervisor.heartbeats import Page, Pulse, is_stopped
from launcher.supervisor.output import takes_output
from launcher.supervisor.scratch import Scratch

HEARING = 2.0
"""Seconds that a rank has to write its stacks."""
_POLL = 0.05


class Lost(NamedTuple):
    """A host whose ranks cannot be looked after any more, one of them, and why."""

    host: str
    rank: int
    reason: str


class Ranks(Protocol):
    """What is done with the ranks of a job, wherever they run."""

    codes: list[int | None]
    """Their exit codes: None while one runs, the negative number of the signal that killed it."""
    delay: float
    """Seconds by which news of one rank may come later than that of another."""

    def look(self, seconds: float) -> None:
        """Let so much time pass, and see what is new."""

    def lost(self) -> Lost | None:
        """A host with ranks that have not ended, and that cannot be reached."""

    def pulse(self, rank: int) -> Pulse | None:
        """What a rank does, or last did; None where it has noted nothing yet."""

    def is_fresh(self) -> bool:
        """Whether the pulses are those of now."""

    def is_held_up(self) -> bool:
        """Whether the ranks may wait for what is no fault of theirs."""

    def where(self, rank: int) -> tuple[str | None, int]:
        """The host of a rank (None: this one) and its process."""

    def send(self, number: signal.Signals) -> None:
        """Signal every rank."""

    def kill(self) -> None:
        """SIGKILL every rank and what it started."""

    def idle(self) -> float:
        """Seconds since a rank did anything, as far as the calls of this method saw it."""

    def is_suspended(self, rank: int) -> bool:
        """Whether a rank is suspended, as far as is known."""

    def stacks(self, rank: int) -> tuple[str, bool]:
        """The stacks of a rank, which are asked for, and whether it is suspended, so that it cannot tell them."""

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

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the next rank. Raises ``OSError`` where the program cannot be started."""
        self._scratch = self._scratch or Scratch()
        page = Page(len(self._pages))
        self._pages.append(page)
        inherits = page.descriptors
        given = {**env, **page.env, **self._scratch.env}
        rank = processes.start(argv, given, on_parent_death=signal.SIGKILL, inherits=inherits)
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
        """What a rank does, read from its page."""
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
        """Whether a rank is suspended now."""
        return self.codes[rank] is None and is_stopped(self._ranks[rank].pid)

    def stacks(self, rank: int) -> tuple[str, bool]:
        """Ask a rank for its stacks by SIGQUIT; within two seconds they are there, or it cannot write them."""
        pid, page, before = self._ranks[rank].pid, self._pages[rank], ""
        if self.codes[rank] is not None or is_stopped(pid):
            return page.stacks(), self.is_suspended(rank)
        os.kill(pid, signal.SIGQUIT)
        deadline = time.monotonic() + HEARING
        while time.monotonic() < deadline and not processes.ended(self._ranks[rank]):
            time.sleep(_POLL)
            said = page.stacks()
            if said and said == before:
                break
            before = said
        return page.stacks(), False

    def close(self) -> None:
        """Kill what still runs, see it end, and give back the pages and the place for files."""
        self.kill()
        for rank in self._ranks:
            rank.wait()
        for page in self._pages:
            page.close()
        self._pages.clear()
        if self._scratch is not None:
            self._scratch.close()
