"""Several hosts over ssh: a supervisor on each starts and watches its ranks, and this process judges them all.

Nothing but ssh and this Python is needed on a host. The job's environment goes through ssh's stdin. A host that is
lost is waited for, replaced by another of the hostfile, or done without (``supervise.on_lost_node``), when the job is
started again.
"""

from __future__ import annotations

import logging
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher import environment
from launcher.backends.watching import Watcher
from launcher.hostfile import Host, read_hostfile
from launcher.plan import DEFAULT_PORT, Command, End, Launch, Plan
from launcher.supervisor import processes
from launcher.supervisor.crash import Crash
from launcher.supervisor.gathering import Gathering, NotReachedError
from launcher.supervisor.link import Link
from launcher.supervisor.output import Output
from launcher.supervisor.remote import RemoteRanks, end
from pretrain.base.errors import ConfigError
from pretrain.engine.engines.deepspeed_config import deepspeed_config
from pretrain.engine.run_folder import FAILED, STOPPED

log = logging.getLogger(__name__)

_LAST_OUTPUT = 2.0


def plan(launch: Launch) -> Plan:
    """One command a rank; hosts of the hostfile beyond ``--nodes`` are spares.

    Raises:
        ConfigError: the hostfile is missing, wrong or too short; ``--nproc`` is given (the slots say it); there is no
            spare host where one would be needed; a forwarded variable is not plain.
    """
    options, policy = launch.options, launch.job.supervise.on_lost_node
    if options.hostfile is None:
        raise ConfigError("--launcher ssh needs --hostfile FILE; for this host alone use --launcher local")
    if options.nproc is not None:
        raise ConfigError(
            f"--nproc does not go with --hostfile: the slots in {options.hostfile} say how many ranks run"
        )
    listed = read_hostfile(options.hostfile)
    if options.nodes is not None and options.nodes > len(listed):
        raise ConfigError(f"--nodes {options.nodes}: {options.hostfile} names only {len(listed)} hosts")
    hosts, spares = listed[: options.nodes], listed[options.nodes :] if options.nodes is not None else ()
    if policy == "spare" and not spares:
        raise ConfigError(
            f"supervise.on_lost_node=spare: no host of {options.hostfile} is left over; "
            f"--nodes {max(1, len(listed) - 1)} keeps the last one as a spare"
        )
    return Plan(
        "ssh",
        hosts,
        _commands(launch, hosts, options.master_addr or hosts[0].name),
        files=launch.files,
        forwarded_env=environment.forwarded_to_hosts(environment.inherited(), (Path.home(), Path())),
        master_port=options.master_port or DEFAULT_PORT,
        spares=spares,
        blocked_reason="" if shutil.which("ssh") else "ssh is not installed (Debian and Ubuntu: openssh-client)",
    )


def start(launch: Launch, plan: Plan) -> End:
    """Run the job on the hosts that can be reached; SIGTERM, SIGUSR1 and Ctrl-C reach every rank."""
    asked: list[signal.Signals] = []
    output = Output()
    try:
        with processes.stop_signals(asked.append, lambda: asked.append(signal.SIGTERM)):
            hosts, links = _gathering(launch, plan, asked, output).gather(plan.hosts)
            if asked:
                end(links)
                return End(STOPPED, f"{asked[0].name} received before the ranks were started")
            return _run(launch, plan, hosts, links, asked)
    except NotReachedError as error:
        log.error("%s", error)
        return End(FAILED, str(error), Crash.here(str(error)[:2000]))
    finally:
        output.close(_LAST_OUTPUT)


def _gathering(launch: Launch, plan: Plan, asked: Sequence[signal.Signals], output: Output) -> Gathering:
    inherited, supervised = environment.inherited(), launch.job.supervise
    path = [entry for entry in plan.forwarded_env.get("PYTHONPATH", "").split(":") if entry]
    return Gathering(
        connect=lambda host: Link(host.name, inherited, path, output),
        spares=plan.spares,
        policy=supervised.on_lost_node if launch.again else None,
        patience=60 * supervised.wait_minutes,
        fits=lambda world: _misfit(launch, world),
        stopped=lambda: bool(asked),
    )


def _run(
    launch: Launch, plan: Plan, hosts: Sequence[Host], links: Sequence[Link], asked: Sequence[signal.Signals]
) -> End:
    ranks = RemoteRanks(links, [host.slots for host in hosts])
    watcher = Watcher(ranks, stall=launch.job.supervise.stall)
    first, chosen = hosts[0], launch.options.master_addr
    address = chosen if chosen and first == plan.hosts[0] else first.name
    commands = _commands(launch, hosts, address)
    # what a login shell has set for Python must not be the job's
    shared = {"PYTHONPATH": "", **plan.forwarded_env}
    try:
        with processes.stop_signals(watcher.stop, ranks.kill):
            if asked:  # it came after the hosts were reached
                watcher.stop(asked[0])
            ranks.start(commands[0].argv, shared, [command.env for command in commands], launch.left)
            ended = watcher.watch()
    finally:
        ranks.close()
    return replace(ended, left=ranks.left())


def _commands(launch: Launch, hosts: Sequence[Host], address: str) -> tuple[Command, ...]:
    places = [(host, local) for host in hosts for local in range(host.slots)]
    return tuple(
        Command(
            (sys.executable, "-m", launch.module, *launch.arguments),
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_WORLD_SIZE": str(host.slots),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(launch.options.master_port or DEFAULT_PORT),
                **environment.SAFE_PATH,
            },
            host=host.name,
        )
        for rank, (host, local) in enumerate(places)
    )


def _misfit(launch: Launch, world: int) -> str:
    try:
        deepspeed_config(launch.job, world)
    except ConfigError as error:
        return str(error)
    return ""
