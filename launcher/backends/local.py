"""N processes on this host: the same path for one and for many."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import time

from launcher import environment, runfolder
from launcher.backends import processes
from launcher.hostfile import Host, is_this_host, read_hostfile
from launcher.plan import Command, Launch, Plan
from tokenizer.errors import ConfigError

log = logging.getLogger(__name__)

_GRACE = 5.0
_POLL = 0.05


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
            },
        )
        for rank in range(ranks)
    )
    return Plan("local", (Host("localhost", ranks),), commands, master_port=port)


def start(launch: Launch, plan: Plan) -> int:
    """Run all ranks to their end and return the job's exit code."""
    return run_ranks(plan.commands)


def run_ranks(commands: tuple[Command, ...], grace: float = _GRACE) -> int:
    """Start a process a command and wait for all of them.

    Returns 0 when all ranks end with 0, and 75 when all end with 75. When one ends otherwise, the others, which would
    wait for it in a collective, get SIGTERM and after ``grace`` seconds SIGKILL, and its code is returned (1 for a
    rank that a signal killed).
    """
    base = environment.inherited()
    ranks: list[subprocess.Popen[bytes]] = []

    def stop(number: signal.Signals) -> None:
        for rank in ranks:
            processes.send(rank, number)

    def kill() -> None:
        for rank in ranks:
            processes.kill_tree(rank)

    with processes.stop_signals(stop, kill):
        try:
            for command in commands:
                ranks.append(processes.start(command.argv, {**base, **command.env}, on_parent_death=signal.SIGKILL))
            failed = _wait_for_failure(ranks)
            if failed is None:
                return _joint_code(ranks)
            log.error("rank %d %s; stopping the other ranks", failed, _cause(ranks[failed].returncode))
            stop(signal.SIGTERM)
            _wait(ranks, grace)
            return _exit_code(ranks[failed].returncode)
        finally:
            kill()
            for rank in ranks:
                rank.wait()


def _wait_for_failure(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """Index of the first rank that fails, or None when all have ended with 0 or 75."""
    while True:
        over = [processes.ended(rank) for rank in ranks]
        for index, rank in enumerate(ranks):
            if over[index] and rank.returncode not in (runfolder.DONE, runfolder.STOPPED):
                return index
        if all(over):
            return None
        time.sleep(_POLL)


def _wait(ranks: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all([processes.ended(rank) for rank in ranks]) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _joint_code(ranks: list[subprocess.Popen[bytes]]) -> int:
    codes = {rank.returncode for rank in ranks}
    if len(codes) == 1:
        return int(codes.pop())
    log.error("the ranks disagree on how the job ended: exit codes %s", [rank.returncode for rank in ranks])
    return runfolder.FAILED


def _exit_code(code: int) -> int:
    return runfolder.BAD_INPUT if code == runfolder.BAD_INPUT else runfolder.FAILED


def _cause(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


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
