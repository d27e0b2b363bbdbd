"""The ranks of a job on several hosts, as the head sees them through the supervisors of the nodes."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from capt.launcher.ssh import Host
from capt.launcher.supervisor.heartbeats import Pulse
from capt.launcher.supervisor.link import Link, end, pump
from capt.launcher.supervisor.messages import REPORT
from capt.launcher.supervisor.ranks import HEARING, Lost

# Reaches the hosts of a job, and decides what becomes of it where some cannot be reached.


log = logging.getLogger(__name__)

Policy = Literal["wait", "spare", "shrink"]
_POLL = 0.1
_AGAIN = 2.0
"""Seconds between two calls to a host that is waited for."""


class NotReachedError(Exception):
    """Too few hosts can be reached; in one line, which and why."""


@dataclass(frozen=True)
class Gathering:
    """The ways to reach hosts, and what to do without some of them.

    ``fits`` tells why a job does not run on a number of ranks (empty: it does), ``stopped`` whether to give up,
    ``meet`` which of the hosts that answer do not reach the first of them, and why.
    """

    connect: Callable[[Host], Link]
    spares: Sequence[Host]
    policy: Policy | None
    patience: float
    fits: Callable[[int], str]
    stopped: Callable[[], bool]
    meet: Callable[[Sequence[Host], Mapping[Host, Link]], dict[Host, str]]

    def gather(self, hosts: Sequence[Host]) -> tuple[list[Host], list[Link]]:
        """The hosts on which the job is to run, in the order of its ranks, and lines to them.

        All hosts are called in parallel, and have to reach the first of them. One that does not is replaced by a spare
        host with at least its slots; or the job runs on the others, on the largest number of them that its batch can
        be shared among; or they are called again for ``patience`` seconds, as they are
        when no spare is left.

        Raises:
            NotReachedError: this does not help, or there is no policy. No line is left open.
        """
        lines: dict[Host, Link] = {}
        try:
            return self._gather(list(hosts), lines)
        except BaseException:
            end(list(lines.values()))
            raise

    def _gather(self, hosts: list[Host], lines: dict[Host, Link]) -> tuple[list[Host], list[Link]]:
        spares, until = list(self.spares), time.monotonic() + self.patience
        while missing := self._reach(hosts, lines):
            reasons = "; ".join(f"{host.name} cannot be used: {reason}" for host, reason in missing.items())
            if self.policy is None:
                raise NotReachedError(reasons)
            log.warning("%s", reasons)
            if self.policy == "shrink":
                hosts = self._shrink([host for host in hosts if host not in missing], reasons, lines)
                continue
            if self.policy == "spare":
                hosts, missing = self._replace(hosts, missing, spares, lines)
            self._wait(hosts, missing, until, lines)
        return hosts, [lines[host] for host in hosts if host in lines]

    def _reach(self, hosts: Sequence[Host], lines: dict[Host, Link]) -> dict[Host, str]:
        """Call the hosts that there is no line to, and try the rendezvous; those that cannot be reached, and why."""
        missing = self._call([host for host in hosts if host not in lines], lines)
        if self.stopped():
            return {}
        if not missing:
            missing = self.meet(hosts, lines)
            if len(hosts) > 2 and missing.keys() == set(hosts[1:]):  # it is the first that is cut off
                missing = {hosts[0]: f"no other host reaches it: {missing[hosts[1]]}"}
        end([lines.pop(host) for host in missing if host in lines])
        return missing

    def _call(self, hosts: Sequence[Host], lines: dict[Host, Link]) -> dict[Host, str]:
        """Call hosts; those that do not answer, and why."""
        called = {host: self.connect(host) for host in hosts}
        lines.update(called)
        while any(link.up is None and not link.lost for link in called.values()) and not self.stopped():
            pump(lines.values(), _POLL)
        missing = {host: link.lost or "asked to stop" for host, link in called.items() if link.up is None}
        end([lines.pop(host) for host in missing])
        return missing

    def _replace(
        self, hosts: list[Host], missing: dict[Host, str], spares: list[Host], lines: dict[Host, Link]
    ) -> tuple[list[Host], dict[Host, str]]:
        """Let spare hosts take the places of those that are missing."""
        for index, host in enumerate(hosts):
            while host in missing and (spare := next((each for each in spares if each.slots >= host.slots), None)):
                spares.remove(spare)
                # The spare host runs the number of ranks of the one that it replaces.
                taken = Host(spare.name, host.slots)
                if reason := self._call([taken], lines):
                    log.warning("the spare host %s cannot be used: %s", spare.name, reason[taken])
                    continue
                log.warning("%s takes the place of %s", spare.name, host.name)
                hosts[index] = taken
                missing = {each: why for each, why in missing.items() if each != host}
                break
        return hosts, missing

    def _shrink(self, hosts: list[Host], reasons: str, lines: dict[Host, Link]) -> list[Host]:
        """The longest prefix of ``hosts`` that the global batch can be shared among."""
        for count in range(len(hosts), 0, -1):
            if not self.fits(sum(host.slots for host in hosts[:count])):
                kept, others = hosts[:count], hosts[count:]
                end([lines.pop(host) for host in others])
                world = sum(host.slots for host in kept)
                log.warning("the job continues with %d ranks on %s", world, ", ".join(host.name for host in kept))
                return kept
        why = self.fits(sum(host.slots for host in hosts)) if hosts else "no host is left"
        raise NotReachedError(f"{reasons}; the job cannot shrink: {why}")

    def _wait(self, hosts: list[Host], missing: dict[Host, str], until: float, lines: dict[Host, Link]) -> None:
        """Call the missing hosts again, until they answer or time is up."""
        if missing:
            log.warning("waiting up to %g minutes for %s", self.patience / 60, ", ".join(h.name for h in missing))
        while missing and not self.stopped():
            if time.monotonic() > until:
                reasons = "; ".join(f"{host.name}: {reason}" for host, reason in missing.items())
                raise NotReachedError(f"not reached in {self.patience / 60:g} minutes: {reasons}")
            again = time.monotonic() + _AGAIN
            while time.monotonic() < again and not self.stopped():
                pump(lines.values(), _POLL)
            end([lines.pop(host) for host, link in list(lines.items()) if link.lost])  # meanwhile
            missing = self._reach(hosts, lines)


_FRESH = 4 * REPORT


class Left(NamedTuple):
    """Processes on a host that were not seen to end: the boot of the host, and the id and start of each."""

    started: str
    processes: tuple[tuple[int, int], ...]


class RemoteRanks:
    """Ranks that are reached by lines to their nodes, numbered in the order of the lines."""

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
            # A host that was started anew since then has none of its old processes.
            mine = before.processes if before and link.up and before.started == link.up.started else ()
            link.send("start", job={"argv": list(argv), "env": dict(env), "each": own, "left": mine})
        if self._asked:
            self.send(self._asked)

    def look(self, seconds: float) -> None:
        """Wait for these seconds, read what the nodes have reported, and pass a node's stop signal to this process.

        The reports are read in one pass: hundreds of nodes report all the time, and all ranks are judged afterwards.
        """
        time.sleep(seconds)
        pump(self._links, 0.0)
        asked = next((link.asked for link in self._links if link.asked), 0)
        # Slurm signals the nodes: the job as a whole is then asked to stop.
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
        """Return what a rank does, or did when its node was last heard."""
        link, index = self._places[rank]
        beat = link.ranks[index].pulse if link.ranks else None
        if beat is None:
            return None
        return Pulse(*beat).aged(time.monotonic() - link.heard)

    def is_fresh(self) -> bool:
        """Return true where all nodes with ranks that run have been heard just now."""
        running = {link for rank, (link, _) in enumerate(self._places) if self.codes[rank] is None}
        return all(time.monotonic() - link.heard < _FRESH for link in running)

    def is_held_up(self) -> bool:
        """Return false: the output of ranks is read immediately."""
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
        """Return true where a rank was suspended when its node was last heard."""
        link, index = self._places[rank]
        return bool(link.ranks) and link.ranks[index].suspended

    def waits_for_files(self, rank: int) -> bool:
        """Return true where a rank waited for a file system when its node was last heard."""
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
