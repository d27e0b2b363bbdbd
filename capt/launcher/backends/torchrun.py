"""``torchrun``: all ranks of this host, or the commands to run by hand (or by a scheduler) on several."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from capt.launcher import environment
from capt.launcher.plan import DEFAULT_PORT, Command, End, Launch, Plan
from capt.launcher.ssh import Host
from capt.launcher.supervisor import processes
from capt.launcher.watch import StatusWatch
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.process import usable_cores
from capt.pretrain.engine.run_folder import FAILED

# Run one foreign launcher (``deepspeed``, ``torchrun``) in the foreground and find out how its job really ended.


log = logging.getLogger(__name__)

_POLL, _AGAIN = 0.2, 1.0


def run_launcher(
    command: Command,
    env: Mapping[str, str],
    run_dir: Path,
    *,
    signal_ranks: Callable[[signal.Signals], bool] | None = None,
) -> End:
    """Start ``command``, pass signals on, wait for it, and return how the job ended (see ``StatusWatch``).

    Args:
        command: the launcher and its arguments.
        env: the environment it inherits.
        run_dir: the run folder, where the job says how it ended.
        signal_ranks: sends a signal to every rank, wherever it runs, and tells whether each host had one to send it to;
            without it the launcher passes signals on itself.
    """
    watch = StatusWatch.begin(run_dir)
    # SIGTERM, not SIGKILL: these launchers take their ranks down with them only if they may run a handler.
    child = processes.start(command.argv, {**env, **command.env}, on_parent_death=signal.SIGTERM)
    waiting: signal.Signals | None = None

    def stop(number: signal.Signals) -> None:
        nonlocal waiting
        if signal_ranks:
            waiting = number
        else:
            processes.send(child, number)
            for pid in processes.descendants(child.pid):  # a rank that is stopped cannot hear the signal
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def kill() -> None:
        if signal_ranks:
            signal_ranks(signal.SIGKILL)
        processes.kill_tree(child)

    with processes.stop_signals(stop, kill):
        while not processes.ended(child):
            if signal_ranks and waiting:
                delivered = signal_ranks(waiting)
                if delivered and watch.state() == "running":  # else a rank may still be about to start: again
                    waiting = None
            time.sleep(_AGAIN if waiting else _POLL)
        code = int(child.returncode)
        if code < 0 and signal_ranks:  # the launcher itself was killed: its ranks would run on unseen
            signal_ranks(signal.SIGKILL)
    result, name = watch.exit_code(code), Path(command.argv[0]).name
    if code == 0 and result == FAILED:
        log.error("%s ended with 0, but the job did not end (state: %s)", name, watch.state())
    return End(result, f"{name} ended with {code} before the job said how it ended")


_TORCHRUN = Path(sys.executable).with_name("torchrun")


def plan(launch: Launch) -> Plan:
    """Plan one ``torchrun`` command a host.

    Raises:
        ConfigError: the hostfile is wrong, or its hosts differ in their slots.
    """
    options = launch.options
    if options.hostfile is None:
        hosts: tuple[Host, ...] = (Host("localhost", options.nproc or max(1, len(environment.visible_gpus()))),)
    else:
        hosts = options.hosts_of_slots("torchrun")
    if len({host.slots for host in hosts}) > 1:
        raise ConfigError(f"torchrun needs the same slots on every host of {options.hostfile}")
    port = options.master_port or DEFAULT_PORT
    # On several hosts the user starts each command there: the merged job file of this host may not be theirs to read.
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
            dict(host.env),
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
    # Without it torchrun gives each of several ranks one thread.
    threads = {environment.THREADS: str(max(1, usable_cores() // plan.world))}
    return run_launcher(command, threads | environment.of_ranks(), launch.run_dir)
