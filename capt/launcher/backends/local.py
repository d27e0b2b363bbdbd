"""N processes on this host: the same path for one and for many."""

from __future__ import annotations

import logging
import secrets
import sys
from dataclasses import replace

from capt.launcher import environment
from capt.launcher.backends.watching import GRACE, PATIENCE, Watcher
from capt.launcher.plan import Command, End, Launch, Plan
from capt.launcher.ssh import Host, is_this_host
from capt.launcher.supervisor import processes
from capt.launcher.supervisor.ranks import LocalRanks
from capt.pretrain.base.errors import ConfigError, MachineError
from capt.pretrain.base.process import SECRET
from capt.pretrain.engine.run_folder import BAD_INPUT, FAILED, has_begun

log = logging.getLogger(__name__)


def plan(launch: Launch) -> Plan:
    """Plan one command a rank, each with the variables that ``torch.distributed`` reads.

    Raises:
        ConfigError: the hostfile names other hosts than this one, or contradicts ``--nproc``.
    """
    host = _host(launch)
    ranks, port = host.slots, launch.options.master_port
    argv = (sys.executable, "-m", launch.module, *launch.arguments)
    commands = tuple(
        Command(
            argv,
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                # 0 until ``run_ranks`` has found a free one.
                "MASTER_PORT": str(port or 0),
                **host.env,
            },
        )
        for rank in range(ranks)
    )
    return Plan("local", (host,), commands, launch.files, master_port=port, examined="here")


def start(launch: Launch, plan: Plan) -> End:
    """Run all ranks to their end."""
    stall, port = launch.job.supervise.stall, plan.master_port or 0
    begun = has_begun(launch.run_dir, launch.job)
    return run_ranks(plan.commands, stall=stall, port=port, begun=begun, again=launch.again)


def run_ranks(
    commands: tuple[Command, ...],
    grace: float = GRACE,
    patience: float = PATIENCE,
    stall: float | None = None,
    port: int = 0,
    begun: bool = False,
    again: bool = False,
) -> End:
    """Start a process a command, and wait for all of them as :class:`capt.launcher.backends.watching.Watcher` says.

    They meet at ``port`` of the loopback interface (0: any that is free), which a run that has ``begun`` used before;
    ``again`` is `capt.launcher.plan.Launch.again`.
    """
    base, ranks = environment.of_ranks(), LocalRanks()
    try:
        port = ranks.listen(port, alone=True, again=again)
    except OSError as error:
        problem = f"--master-port {port}: {error.strerror}; end what uses it, or leave the option out"
        log.error("%s", problem)
        return End(FAILED if begun else BAD_INPUT, problem)
    met = {"MASTER_PORT": str(port), SECRET: secrets.token_hex(32)}
    watcher = Watcher(ranks, grace=grace, patience=patience, stall=stall)
    with processes.stop_signals(watcher.stop, watcher.kill):
        try:
            for command in commands:
                ranks.start(command.argv, {**base, **command.env, **met})
            return watcher.watch()
        finally:
            ranks.close()


def _host(launch: Launch) -> Host:
    options = launch.options
    gpus = len(environment.visible_gpus())
    if options.nproc is not None and 0 < gpus < options.nproc:
        raise MachineError(
            f"--nproc {options.nproc}: this host has {gpus} visible GPUs, one a process "
            "(CUDA_VISIBLE_DEVICES= runs on the CPU)"
        )
    if options.hostfile is None:
        return Host("localhost", options.nproc or max(1, gpus))
    hosts = options.hosts()
    if len(hosts) > 1 or not is_this_host(hosts[0].name):
        names = ", ".join(host.name for host in hosts)
        raise ConfigError(f"--launcher local runs on this host only, but {options.hostfile} names {names}")
    if options.nproc not in (None, hosts[0].slots):
        raise ConfigError(f"--nproc {options.nproc} contradicts slots={hosts[0].slots} in {options.hostfile}")
    return replace(hosts[0], name="localhost")
