"""Watches the ranks of a job to their end, wherever they run: the one place that decides how a job ended."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from itertools import groupby

from capt.launcher.plan import End
from capt.launcher.supervisor.activity import Crash
from capt.launcher.supervisor.heartbeats import Pulse, Stall, find_stall
from capt.launcher.supervisor.processes import signal_name
from capt.launcher.supervisor.ranks import Lost, Ranks
from capt.pretrain.base.files import printable
from capt.pretrain.engine.interruption import stop_signal_name
from capt.pretrain.engine.run_folder import BAD_INPUT, DONE, FAILED, STOPPED

log = logging.getLogger(__name__)

GRACE = 5.0
PATIENCE = 8.0
WRITING = 300.0
"""Seconds that a rank may wait for a file system, or be in a section of writing: file servers pause for minutes."""
_DOUBT = 0.6
"""Seconds in which no rank may be seen to wait for a file system before one is taken to hang: longer than the distance
of two words of a node."""
_HEARING = 2.0
_POLL = 0.05
_SUSPENDED = 2.0
"""Seconds between two looks at the ranks from which on this process itself must have been suspended."""


class Watcher:
    """Waits for all ranks of a job.

    The code is 0 when all ranks end with 0, and 75 when all end with 75. When one ends otherwise, the others, which
    would wait for it in a collective, get SIGTERM and after ``grace`` seconds SIGKILL, and its code is returned (1 for
    a rank that a signal killed). A stop signal is passed on: the job has all the time that it needs to save; only when
    no rank has done anything for ``patience`` seconds, all are killed. So they are when one hangs, which a number of
    seconds for ``stall`` decides (:mod:`capt.launcher.supervisor.heartbeats`), and when a host is lost. A rank that
    waits for a file system, or writes a checkpoint, has `WRITING` seconds.
    """

    def __init__(self, ranks: Ranks, *, grace: float = GRACE, patience: float = PATIENCE, stall: float | None = None):
        self._ranks, self._grace, self._patience, self._stall = ranks, grace, patience, stall
        self._looked = self._awake = time.monotonic()
        self._waited: float | None = None
        self._about_files = False
        self.asked: signal.Signals | None = None
        self._killed = False

    def stop(self, number: signal.Signals) -> None:
        """Pass a stop signal on."""
        self.asked = number
        self._ranks.send(number)

    def kill(self) -> None:
        """End all ranks immediately, as was asked for: no rank is to blame for that."""
        self._killed = True
        self._ranks.kill()

    def watch(self) -> End:
        """Wait for the job, and return its end. Ranks may still run."""
        ranks = self._ranks
        while None in ranks.codes:
            if (lost := ranks.lost()) is not None:
                return self._end_by_loss(lost)
            if self._unwanted():
                return self._end_by_a_rank()
            if self.asked:
                if ranks.idle() > self._patience:
                    return self._unanswered()
            elif self._stall is not None and (stalled := self._find_stall(self._stall)):
                return self._end_by_stall(stalled)
            ranks.look(4 * _POLL if self.asked else _POLL)
        return self._end_by_a_rank() if self._unwanted() else self._joint_end()

    def _unwanted(self) -> list[int]:
        return [rank for rank, code in enumerate(self._ranks.codes) if code is not None and not self._as_wanted(code)]

    def _as_wanted(self, code: int) -> bool:
        """Done, stopped, or asked to stop before it could hear it: a rank that still imports dies of the signal."""
        return code in (DONE, STOPPED) or (self.asked is not None and code == -self.asked)

    def _end_by_a_rank(self) -> End:
        """Name the rank that ended the job: of several one that a signal killed, else the one whose error came first.

        The others fell over its connections, which end with its process.
        """
        if self._killed:
            self._wait(self._grace)
            return End(FAILED, "killed by a second Ctrl-C, without a checkpoint")
        # The news of other nodes must be here before one rank is blamed.
        self._wait(self._ranks.delay)
        while not self._ranks.is_fresh() and self._ranks.lost() is None:  # bounded: a silent host is lost
            self._ranks.look(_POLL)
        if (lost := self._ranks.lost()) is not None:
            return self._end_by_loss(lost)
        unwanted = self._unwanted()
        rank = min(unwanted, key=lambda each: ((self._ranks.codes[each] or 0) > 0, -self._failed(each)))
        code = self._ranks.codes[rank] or 0
        trace = self._ranks.stacks(rank)[0] if code > 0 else ""
        said = f": {printable(trace.rstrip().rpartition(chr(10))[2], 500)}" if trace else ""
        reason = f"rank {rank}{self._on_host(rank)} {_cause(code)}{said}"
        if code == BAD_INPUT:  # all ranks find it, and one of them is about to say it
            self._wait(_HEARING)
        else:
            log.error("%s; stopping the other ranks", reason)
        self._ranks.send(signal.SIGTERM)
        crash = None if code == BAD_INPUT else self._crash(rank, reason, stacks=trace)
        self._wait(self._grace)
        return End(BAD_INPUT if code == BAD_INPUT else FAILED, reason, crash)

    def _failed(self, rank: int) -> float:
        """Return the seconds since an error ended a rank; 0 where that is not known."""
        pulse = self._ranks.pulse(rank)
        return 0.0 if pulse is None or pulse.failed is None else pulse.failed

    def _end_by_loss(self, lost: Lost) -> End:
        reason = f"{lost.host} is lost: {lost.reason}; all ranks are killed"
        log.error("%s", reason)
        pulse = self._ranks.pulse(lost.rank)
        step, section = (pulse.step, pulse.section) if pulse else (None, None)
        crash = Crash(cause=reason[:2000], host=lost.host, step=step, section=section)
        return End(FAILED, reason, crash, lost_host=True)

    def _find_stall(self, stall: float) -> Stall | None:
        """The rank that hangs. Time counts from when this process or the terminal continued, if one was suspended."""
        now = time.monotonic()
        if now - self._looked > _SUSPENDED or self._ranks.is_held_up():
            self._awake = now
        self._looked = now
        # Old news would look like a rank that makes no progress; a node that stays silent is lost before long.
        if not self._ranks.is_fresh():
            return None
        pulses = self._pulses()
        stalled = find_stall(pulses, stall)
        if stalled is None:
            self._waited, self._about_files = None, False
            return None
        self._about_files = self._is_about_files(stalled, pulses, now)
        # File servers pause for minutes: such a wait is a stall only when it lasts longer than that.
        return None if self._about_files and stalled.pulse.seconds <= WRITING else stalled

    def _is_about_files(self, stalled: Stall, ranks: Iterable[int], now: float) -> bool:
        """Return true where a rank waited for a file system just now, or the one that stalls writes a checkpoint."""
        if any(self._ranks.is_suspended(rank) for rank in ranks):
            return False
        if self._waited is None or any(self._ranks.waits_for_files(rank) for rank in ranks):
            self._waited = now
        return stalled.pulse.section in ("save", "local") or now - self._waited < _DOUBT

    def _pulses(self) -> dict[int, Pulse]:
        """The pulses of the ranks that run."""
        pulses = {rank: self._ranks.pulse(rank) for rank, code in enumerate(self._ranks.codes) if code is None}
        seen = {rank: pulse for rank, pulse in pulses.items() if pulse is not None}
        awake = time.monotonic() - self._awake
        return {rank: pulse._replace(seconds=min(pulse.seconds, awake)) for rank, pulse in seen.items()}

    def _end_by_stall(self, stalled: Stall) -> End:
        """Ask the rank for its stacks, which one that is suspended cannot give, and let all be killed.

        Of ranks that are equally far, of which one may wait for another, one that is suspended is the culprit.
        """
        place = (stalled.pulse.step, stalled.pulse.section)
        for rank, pulse in self._pulses().items():
            if (pulse.step, pulse.section) == place and self._ranks.is_suspended(rank):
                stalled = stalled._replace(rank=rank, pulse=pulse)
                break
        rank = stalled.rank
        stacks, suspended = self._ranks.stacks(rank)
        files = self._about_files and not suspended
        state = f"; {suspended}" if suspended else "; it waits for a file system" if files else ""
        reason = f"rank {rank}{self._on_host(rank)} {stalled}{state}; all ranks are killed"
        log.error("%s", reason)
        return End(FAILED, reason, self._crash(rank, reason, stalled.pulse, stacks), slow_files=files)

    def _on_host(self, rank: int) -> str:
        host, _ = self._ranks.where(rank)
        return "" if host is None else f" on {host}"

    def _crash(self, rank: int, cause: str, pulse: Pulse | None = None, stacks: str = "") -> Crash:
        code, pulse = self._ranks.codes[rank], pulse or self._ranks.pulse(rank)
        host, pid = self._ranks.where(rank)
        return Crash(
            cause=cause[:2000],
            host=host or socket.gethostname(),
            rank=rank,
            pid=pid,
            step=pulse.step if pulse else None,
            section=pulse.section if pulse else None,
            signal=signal_name(-code) if code is not None and code < 0 else None,
            stacks=stacks,
        )

    def _unanswered(self) -> End:
        assert self.asked is not None
        left = [rank for rank, code in enumerate(self._ranks.codes) if code is None]
        reason = f"no answer to {self.asked.name} for {self._patience:g} s from {_named(left)}; killed"
        log.error("%s", reason)
        return End(FAILED, reason)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while None in self._ranks.codes and time.monotonic() < deadline:
            self._ranks.look(_POLL)

    def _joint_end(self) -> End:
        # A rank that the stop signal killed before it could hear it has stopped as well.
        codes = [STOPPED if code is not None and code < 0 else code for code in self._ranks.codes]
        if len(set(codes)) == 1:
            code = codes[0] or DONE
            early = f"{stop_signal_name(self.asked)} received before the first step" if self.asked else ""
            return End(code, early if code == STOPPED else "")
        of = {code: [rank for rank, each in enumerate(codes) if each == code] for code in dict.fromkeys(codes)}
        listed = ", ".join(f"{code} of {_named(ranks)}" for code, ranks in of.items())
        log.error("the ranks disagree on how the job ended: exit codes %s", listed)
        return End(FAILED, f"the ranks disagree on how the job ended: exit codes {listed}")


def _named(ranks: Sequence[int]) -> str:
    """Ranks in order, neighbours as one: of a thousand a line is enough."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda each: each[1] - each[0])]
    return "rank " + ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _cause(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal_name(-code)}{hint}"
