"""The ranks of a job on several hosts, as the head sees them through the supervisors of the nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launcher.supervisor.heartbeats import Pulse
from launcher.supervisor.link import Link, pump
from launcher.supervisor.messages import REPORT
from launcher.supervisor.ranks import HEARING, Lost

_FRESH = 4 * REPORT
_ENDING = 8.0


class Left(NamedTuple):
    """Processes on a host that were not seen to end: which start of the host they belong to, number and beginning."""

    started: str
    processes: tuple[tuple[int, int], ...]


class RemoteRanks:
    """Ranks behind lines to their nodes, numbered in the order of the lines."""

    delay = 2 * REPORT

    def __init__(self, links: Sequence[Link], slots: Sequence[int]) -> None:
        self._links = links
        self._places = [(link, index) for link, count in zip(links, slots, strict=True) for index in range(count)]
        self.codes: list[int | None] = [None] * len(self._places)
        self._asked: signal.Signals | None = None

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        each: Sequence[Mapping[str, str]],
        left: Mapping[str, Left],
    ) -> None:
        """Start all ranks, once what is ``left`` of an earlier attempt on their hosts has ended."""
        for link in self._links:
            own = [dict(each[rank]) for rank, (place, _) in enumerate(self._places) if place is link]
            before = left.get(link.host)
            mine = before.processes if before and link.up and before.started == link.up.started else ()
            link.send("start", job={"argv": list(argv), "env": dict(env), "each": own, "left": mine})
        if self._asked:
            self.send(self._asked)

    def look(self, seconds: float) -> None:
        """Take the news of this number of seconds. A stop signal that a node was sent is sent to this process as well.

        All in one pass: hundreds of nodes say something all the time, and after each look all ranks are judged.
        """
        time.sleep(seconds)
        pump(self._links, 0.0)
        asked = next((link.asked for link in self._links if link.asked), 0)
        if asked and self._asked is None:
            os.kill(os.getpid(), asked)
        self.codes = [link.ranks[index].code if link.ranks else None for link, index in self._places]

    def lost(self) -> Lost | None:
        """The first host that is lost, of those whose ranks have not all ended."""
        for rank, (link, _) in enumerate(self._places):
            if link.lost and self.codes[rank] is None:
                return Lost(link.host, rank, link.lost)
        return None

    def pulse(self, rank: int) -> Pulse | None:
        """What a rank does, or did when its node was last heard."""
        link, index = self._places[rank]
        beat = link.ranks[index].pulse if link.ranks else None
        if beat is None:
            return None
        return Pulse(*beat).aged(time.monotonic() - link.heard)

    def is_fresh(self) -> bool:
        """Whether all nodes with ranks that run have been heard just now."""
        running = {link for rank, (link, _) in enumerate(self._places) if self.codes[rank] is None}
        return all(time.monotonic() - link.heard < _FRESH for link in running)

    def is_held_up(self) -> bool:
        """What ranks print is read from them immediately."""
        return False

    def where(self, rank: int) -> tuple[str | None, int]:
        """The host and the process there (0 where it has not been told yet)."""
        link, index = self._places[rank]
        return link.host, link.ranks[index].pid if link.ranks else 0

    def send(self, number: signal.Signals) -> None:
        """Have every rank signalled."""
        self._asked = number
        for link in self._links:
            link.send("signal", number=int(number))

    def kill(self) -> None:
        """Have every rank killed."""
        for link in self._links:
            link.send("kill")

    def idle(self) -> float:
        """Seconds since any rank did anything, as its node sees it."""
        running = [link.idle for rank, (link, _) in enumerate(self._places) if self.codes[rank] is None]
        return min(running, default=0.0)

    def is_suspended(self, rank: int) -> bool:
        """Whether a rank was suspended when its node was last heard."""
        link, index = self._places[rank]
        return bool(link.ranks) and link.ranks[index].suspended

    def waits_for_files(self, rank: int) -> bool:
        """Whether a rank waited for a file system when its node was last heard."""
        link, index = self._places[rank]
        return bool(link.ranks) and link.ranks[index].waits

    def stacks(self, rank: int) -> tuple[str, str]:
        """Have a rank asked for its stacks."""
        link, index = self._places[rank]
        link.stacks = None
        link.send("stacks", rank=index)
        until = time.monotonic() + 2 * HEARING
        while link.stacks is None and not link.lost and time.monotonic() < until:
            pump(self._links, REPORT)
        return (link.stacks.text, link.stacks.suspended) if link.stacks else ("", "")

    def close(self) -> None:
        """End all nodes, and so their ranks."""
        end(self._links)

    def left(self) -> dict[str, Left]:
        """After ``close``: what was not seen to end, by host."""
        return {
            link.host: Left(link.up.started, ((link.up.pid, link.up.born), *((r.pid, r.born) for r in link.ranks)))
            for link in self._links
            if link.up is not None and not link.in_order
        }


def end(links: Sequence[Link]) -> None:
    """End the supervisors of nodes."""
    for link in links:
        link.hang_up()
    until = time.monotonic() + _ENDING
    while any(link.is_ending() for link in links) and time.monotonic() < until:
        pump(links, REPORT / 10)
    for link in links:
        link.close()
