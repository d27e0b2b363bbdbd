"""``torchrun``: all ranks of this host, or the commands to run by hand (or by a scheduler) on several."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher import environment
from launcher.backends.single import run_launcher
from launcher.hostfile import Host
from launcher.plan import DEFAULT_PORT, Command, End, Launch, Plan
from pretrain.base.errors import ConfigError

_TORCHRUN = Path(sys.executable).with_name("torchrun")


def plan(launch: Launch) -> Plan:
    """One ``torchrun`` command a host.

    Raises:
        ConfigError: the hostfile is wrong, or its hosts differ in their slots.
    """
    options = launch.options
    if options.hostfile is None:
        hosts: tuple[Host, ...] = (Host("localhost", options.nproc or max(1, len(environment.visible_gpus()))),)
    elif options.nproc is not None:
        raise ConfigError(
            f"--nproc does not go with --hostfile: the slots in {options.hostfile} say how many ranks run"
        )
    else:
        hosts = options.hosts()
    if len({host.slots for host in hosts}) > 1:
        raise ConfigError(f"torchrun needs the same slots on every host of {options.hostfile}")
    port = options.master_port or DEFAULT_PORT
    by_hand = len(hosts) > 1
    arguments = launch.unmerged if by_hand and launch.unmerged else launch.arguments
    commands = tuple(
        Command(
            (
                str(_TORCHRUN),
                *("--nnodes", str(len(hosts))),
                *("--node-rank", str(index)),
                *("--nproc-per-node", str(host.slots)),
                *("--master-addr", options.master_addr or (hosts[0].name if len(hosts) > 1 else "127.0.0.1")),
                *("--master-port", str(port)),
                *("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"),
                *("-m", launch.module, *arguments),
            ),
            {**environment.SAFE_PATH, **host.env},
            host=host.name if len(hosts) > 1 else None,
        )
        for index, host in enumerate(hosts)
    )
    files = {} if by_hand else launch.files
    return Plan(
        "torchrun", hosts, commands, files, master_port=port, examined="here", blocked_reason=_blocked_reason(hosts)
    )


def _blocked_reason(hosts: tuple[Host, ...]) -> str:
    if len(hosts) > 1:
        return (
            "torchrun starts processes on its own host only: run the commands that --dry-run shows on each host, "
            "or use --launcher deepspeed"
        )
    return "" if _TORCHRUN.is_file() else f"there is no {_TORCHRUN}; install torch into this Python environment"


def start(launch: Launch, plan: Plan) -> End:
    """Run the job on this host."""
    (command,) = plan.commands
    return run_launcher(command, environment.inherited(), launch.run_dir)
