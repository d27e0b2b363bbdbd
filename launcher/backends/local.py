"""N processes on this host: the same path for one and for many."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from launcher import environment
from launcher.backends.watching import GRACE, PATIENCE, Watcher
from launcher.hostfile import Host, is_this_host, read_hostfile
from launcher.plan import Command, End, Launch, Plan
from launcher.supervisor import processes
from launcher.supervisor.ranks import LocalRanks
from pretrain.base.errors import ConfigError


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
    with _kept(plan.master_port or 0):
        return run_ranks(plan.commands, stall=launch.job.supervise.stall)


def run_ranks(
    commands: tuple[Command, ...], grace: float = GRACE, patience: float = PATIENCE, stall: float | None = None
) -> End:
    """Start a process a command, and wait for all of them as :class:`launcher.backends.watching.Watcher` says."""
    base, ranks = environment.inherited(), LocalRanks()
    watcher = Watcher(ranks, grace=grace, patience=patience, stall=stall)
    with processes.stop_signals(watcher.stop, watcher.kill):
        try:
            for command in commands:
                ranks.start(command.argv, {**base, **command.env})
            return watcher.watch()
        finally:
            ranks.close()


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


@contextmanager
def _kept(port: int) -> Iterator[None]:
    """Let nobody else be given a port before rank 0, which takes seconds to start, listens there.

    A bound socket that does not listen keeps the system from giving its port away; rank 0 binds it nevertheless, for
    both say ``SO_REUSEADDR`` (:func:`_free_port` has let it go for a moment only).
    """
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # somebody was faster: rank 0 says so
            s.bind(("127.0.0.1", port))
        yield


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
