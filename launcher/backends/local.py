"""N processes on this host: the same path for one and for many."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time

from launcher import environment
from launcher.backends import processes
from launcher.backends.activity import Activity
from launcher.hostfile import Host, is_this_host, read_hostfile
from launcher.plan import Command, End, Launch, Plan
from launcher.supervisor.crash import Crash
from launcher.supervisor.heartbeats import Page, Pulse, Stall, find_stall, is_stopped
from pretrain.base.errors import ConfigError
from pretrain.engine.run_folder import BAD_INPUT, DONE, FAILED, STOPPED

log = logging.getLogger(__name__)

_GRACE = 5.0
_PATIENCE = 8.0
_HEARING = 2.0
_POLL = 0.05
_SUSPENDED = 2.0
"""Seconds between two looks at the ranks from which on this process itself must have been suspended."""


def plan(launch: Launch) -> Plan:
    """One command a rank, each with the variables that ``torch.distributed`` reads.

    Raises:
        ConfigError: the hostfile names other hosts than this one, or contradicts ``--nproc``.
    """
    ranks = _ranks(launch)
    address = launch.options.master_addr or "127.0.0.1"
    port = launch.options.master_port or _free_port()
    argv = (sys.executable, "-m", launch.module, *launch.arguments)
    commands = tuple(
        Command(
            argv,
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                **environment.SAFE_PATH,
            },
        )
        for rank in range(ranks)
    )
    return Plan("local", (Host("localhost", ranks),), commands, launch.files, master_port=port)


def start(launch: Launch, plan: Plan) -> End:
    """Run all ranks to their end."""
    return run_ranks(plan.commands, stall=launch.job.supervise.stall)


def run_ranks(
    commands: tuple[Command, ...], grace: float = _GRACE, patience: float = _PATIENCE, stall: float | None = None
) -> End:
    """Start a process a command and wait for all of them.

    The code is 0 when all ranks end with 0, and 75 when all end with 75. When one ends otherwise, the others, which
    would wait for it in a collective, get SIGTERM and after ``grace`` seconds SIGKILL, and its code is returned (1 for
    a rank that a signal killed). A stop signal is passed on: the job has all the time that it needs to save; only when
    no rank has done anything for ``patience`` seconds, all are killed. So they are when one hangs, which a number of
    seconds for ``stall`` decides (:mod:`launcher.supervisor.heartbeats`).
    """
    return _Job(commands, grace, patience, stall).run()


class _Job:
    def __init__(self, commands: tuple[Command, ...], grace: float, patience: float, stall: float | None) -> None:
        self._commands, self._grace, self._patience, self._stall = commands, grace, patience, stall
        self._looked = self._awake = time.monotonic()
        self._pages = [Page(rank) for rank in range(len(commands))]
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._asked: signal.Signals | None = None

    def run(self) -> End:
        base = environment.inherited()
        with processes.stop_signals(self._stop, self._kill):
            try:
                for command, page in zip(self._commands, self._pages, strict=True):
                    env = {**base, **command.env, **page.env}
                    self._ranks.append(
                        processes.start(command.argv, env, on_parent_death=signal.SIGKILL, inherits=page.descriptors)
                    )
                    if self._asked:  # it came while ranks were started
                        processes.send(self._ranks[-1], self._asked)
                return self._wait_for_all()
            finally:
                self._kill()
                for rank in self._ranks:
                    rank.wait()
                for page in self._pages:
                    page.close()

    def _stop(self, number: signal.Signals) -> None:
        self._asked = number
        for rank in self._ranks:
            processes.send(rank, number)

    def _kill(self) -> None:
        for rank in self._ranks:
            processes.kill_tree(rank)

    def _wait_for_all(self) -> End:
        activity: Activity | None = None
        while not all(over := [processes.ended(rank) for rank in self._ranks]):
            if (index := self._failed(over)) is not None:
                return self._end_by(index)
            if self._asked:
                activity = activity or Activity([rank.pid for rank in self._ranks])
                if activity.idle() > self._patience:
                    return self._unanswered()
            elif self._stall is not None and (stalled := find_stall(self._pulses(), self._stall)):
                return self._end_by_stall(stalled)
            time.sleep(4 * _POLL if self._asked else _POLL)
        if (index := self._failed(over)) is not None:
            return self._end_by(index)
        return self._joint_end()

    def _failed(self, over: list[bool]) -> int | None:
        """The rank that ended the job: of several, one that a signal killed, which the others fell over."""
        codes = {index: self._ranks[index].returncode for index, ended in enumerate(over) if ended}
        failed = [index for index, code in codes.items() if not self._as_wanted(code)]
        return min(failed, key=lambda index: codes[index] >= 0, default=None)

    def _as_wanted(self, code: int) -> bool:
        """Done, stopped, or asked to stop before it could hear it: a rank that still imports dies of the signal."""
        return code in (DONE, STOPPED) or (self._asked is not None and code == -self._asked)

    def _end_by(self, index: int) -> End:
        code = self._ranks[index].returncode
        reason = f"rank {index} {_cause(code)}"
        if code == BAD_INPUT:  # all ranks find it, and one of them is about to say it
            self._wait(_HEARING)
        else:
            log.error("%s; stopping the other ranks", reason)
        for rank in self._ranks:
            processes.send(rank, signal.SIGTERM)
        crash = None if code == BAD_INPUT else self._crash(index, reason)
        self._wait(self._grace)
        return End(BAD_INPUT if code == BAD_INPUT else FAILED, reason, crash)

    def _pulses(self) -> dict[int, Pulse]:
        """What the ranks do. Where this process too was suspended, time counts from when it went on."""
        now = time.monotonic()
        if now - self._looked > _SUSPENDED:
            self._awake = now
        self._looked = now
        pulses = {rank: page.read() for rank, page in enumerate(self._pages) if not processes.ended(self._ranks[rank])}
        seen = {rank: pulse for rank, pulse in pulses.items() if pulse is not None}
        return {rank: pulse._replace(seconds=min(pulse.seconds, now - self._awake)) for rank, pulse in seen.items()}

    def _end_by_stall(self, stalled: Stall) -> End:
        """Ask the rank for its stacks, which one that is suspended cannot give, and let all be killed.

        Of ranks that are equally far, of which one may wait for another, one that is suspended is the culprit.
        """
        place = (stalled.pulse.step, stalled.pulse.section)
        level = {rank: pulse for rank, pulse in self._pulses().items() if (pulse.step, pulse.section) == place}
        for rank, pulse in level.items():
            if is_stopped(self._ranks[rank].pid):
                stalled = stalled._replace(rank=rank, pulse=pulse)
                break
        rank, pid = stalled.rank, self._ranks[stalled.rank].pid
        suspended = is_stopped(pid)
        if not suspended:
            os.kill(pid, signal.SIGQUIT)
            self._wait_for_stacks(rank)
        reason = f"{stalled}{'; it is suspended' if suspended else ''}; all ranks are killed"
        log.error("%s", reason)
        return End(FAILED, reason, self._crash(rank, reason, stalled.pulse))

    def _wait_for_stacks(self, rank: int) -> None:
        deadline, before = time.monotonic() + _HEARING, ""
        while time.monotonic() < deadline and not processes.ended(self._ranks[rank]):
            time.sleep(_POLL)
            stacks = self._pages[rank].stacks()
            if stacks and stacks == before:
                return
            before = stacks

    def _crash(self, index: int, cause: str, pulse: Pulse | None = None) -> Crash:
        rank, pulse = self._ranks[index], pulse or self._pages[index].read()
        killed = rank.returncode is not None and rank.returncode < 0
        return Crash.here(
            cause,
            rank=index,
            pid=rank.pid,
            step=pulse.step if pulse else None,
            section=pulse.section if pulse else None,
            signal=signal.Signals(-rank.returncode).name if killed else None,
            stacks=self._pages[index].stacks(),
        )

    def _unanswered(self) -> End:
        assert self._asked is not None
        left = ", ".join(str(index) for index, rank in enumerate(self._ranks) if not processes.ended(rank))
        reason = f"no answer to {self._asked.name} for {self._patience:g} s from rank {left}; killed"
        log.error("%s", reason)
        return End(FAILED, reason)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not all([processes.ended(rank) for rank in self._ranks]) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _joint_end(self) -> End:
        codes = [STOPPED if rank.returncode < 0 else rank.returncode for rank in self._ranks]
        if len(set(codes)) == 1:
            early = f"{self._asked.name} received before the first step" if self._asked else ""
            return End(codes[0], early if codes[0] == STOPPED else "")
        log.error("the ranks disagree on how the job ended: exit codes %s", codes)
        return End(FAILED, f"the ranks disagree on how the job ended: exit codes {codes}")


def _cause(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _ranks(launch: Launch) -> int:
    options = launch.options
    gpus = len(environment.visible_gpus())
    if options.nproc is not None and 0 < gpus < options.nproc:
        raise ConfigError(
            f"--nproc {options.nproc}: this host has {gpus} visible GPUs, one a process "
            "(CUDA_VISIBLE_DEVICES= runs on the CPU)"
        )
    if options.hostfile is None:
        return options.nproc or max(1, gpus)
    hosts = read_hostfile(options.hostfile)
    if len(hosts) > 1 or not is_this_host(hosts[0].name):
        names = ", ".join(host.name for host in hosts)
        raise ConfigError(f"--launcher local runs on this host only, but {options.hostfile} names {names}")
    if options.nproc not in (None, hosts[0].slots):
        raise ConfigError(f"--nproc {options.nproc} contradicts slots={hosts[0].slots} in {options.hostfile}")
    return hosts[0].slots


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
