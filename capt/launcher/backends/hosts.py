"""Ranks on several hosts: a supervisor on each starts and watches its own, and this process judges them all.

When the job is started again a host that is lost is waited for, replaced by a spare one, or done without
(``supervise.on_lost_node``).
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from capt.launcher.backends.watching import Watcher
from capt.launcher.plan import Command, End, Launch, Plan
from capt.launcher.ssh import Host, allow_hosts
from capt.launcher.supervisor import processes
from capt.launcher.supervisor.activity import Crash
from capt.launcher.supervisor.link import Link, ask, ask_for_gpus, end
from capt.launcher.supervisor.output import Output
from capt.launcher.supervisor.remote import Gathering, NotReachedError, RemoteRanks
from capt.pretrain.base.errors import ConfigError, MachineError, counted, machines_at_fault
from capt.pretrain.base.process import SECRET
from capt.pretrain.engine.engines.deepspeed_config import deepspeed_config
from capt.pretrain.engine.interruption import stop_signal_name
from capt.pretrain.engine.run_folder import FAILED, STOPPED, exit_code_of, has_begun

log = logging.getLogger(__name__)

Connect = Callable[[Host, Output], Link]
_LAST_OUTPUT = 2.0


def divide(
    launch: Launch, listed: Sequence[Host], source: str, lists: str, *, known: bool = True
) -> tuple[tuple[Host, ...], tuple[Host, ...]]:
    """Return the first ``--nodes`` of the hosts that ``source`` lists, and the others, which are spares.

    Raises:
        ConfigError: there are fewer, or a spare host is asked for and none is left over. Where the hosts are not
            ``known`` yet, none has to be.
    """
    nodes = launch.options.nodes
    if nodes is not None and nodes > len(listed):
        raise ConfigError(f"--nodes {nodes}: {source} {lists.format(len(listed))}")
    hosts, spares = tuple(listed[:nodes]), tuple(listed[nodes:]) if nodes is not None else ()
    if known and launch.job.supervise.on_lost_node == "spare" and not spares:
        raise ConfigError(
            f"supervise.on_lost_node=spare: no host of {source} is left over; "
            f"--nodes {max(1, len(listed) - 1)} keeps the last one as a spare"
        )
    return hosts, spares


def run(launch: Launch, plan: Plan, connect: Connect, env: Mapping[str, str], python: str | None = None) -> End:
    """Run the job on the hosts that can be reached, with ``env`` on top of their environment, to its end.

    ``python`` is that of the hosts, where it has another path than here.
    """
    allow_hosts(len(plan.hosts) + len(plan.spares))
    asked: list[signal.Signals] = []
    output = Output()
    try:
        with (
            machines_at_fault(lambda: has_begun(launch.run_dir, launch.job)),
            processes.stop_signals(asked.append, lambda: asked.append(signal.SIGTERM)),
        ):
            hosts, links = _gathering(launch, plan, asked, lambda host: connect(host, output)).gather(plan.hosts)
            # The stop came while hosts were called: there are no ranks that could answer it.
            if asked:
                end(links)
                return End(STOPPED, f"{stop_signal_name(asked[0])} received before the ranks were started")
            return _run(launch, plan, hosts, links, env, python)
    except ConfigError as error:
        log.error("%s", error)
        return End(exit_code_of(error), str(error))
    except NotReachedError as error:
        log.error("%s", error)
        return End(FAILED, str(error), Crash.here(str(error)[:2000]), unreached=True)
    finally:
        output.close(_LAST_OUTPUT)


def commands(
    launch: Launch, hosts: Sequence[Host], address: str, port: int, python: str | None = None
) -> tuple[Command, ...]:
    """Return the command of each rank, its host, and its place among the ranks."""
    places = [(host, local) for host in hosts for local in range(host.slots)]
    return tuple(
        Command(
            (python or sys.executable, "-m", launch.module, *launch.arguments),
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_WORLD_SIZE": str(host.slots),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                **host.env,
            },
            host=host.name,
        )
        for rank, (host, local) in enumerate(places)
    )


def _gathering(
    launch: Launch, plan: Plan, asked: Sequence[signal.Signals], connect: Callable[[Host], Link]
) -> Gathering:
    supervised = launch.job.supervise
    return Gathering(
        connect=connect,
        spares=plan.spares,
        # At the first start every host must be there.
        policy=supervised.on_lost_node if launch.again else None,
        patience=60 * supervised.wait_minutes,
        fits=lambda world: _misfit(launch, world),
        stopped=lambda: bool(asked),
        meet=lambda hosts, lines: _meet(launch, plan, hosts, lines),
    )


def _meet(launch: Launch, plan: Plan, hosts: Sequence[Host], lines: Mapping[Host, Link]) -> dict[Host, str]:
    """Open the rendezvous on the first host and have the others call it; return those that cannot, and why.

    A job that is started again does without hosts that have lost GPUs meanwhile.

    Raises:
        MachineError: the port is taken when the job is started for the first time.
    """
    assert plan.master_port is not None
    if launch.again and (broken := _without_gpus(hosts, lines)):
        return broken
    first, *others = hosts
    where = {"port": plan.master_port, "alone": not others, "again": launch.again}
    (opened,) = ask([lines[first]], lines.values(), "listen", **where).values()
    # At the first start a port that cannot be opened is for the user to free; later on it counts against the host.
    if opened.problem and not lines[first].lost and not launch.again:
        raise MachineError(
            f"port {plan.master_port} of {first.name}: {opened.problem}; end what uses it, or choose --master-port"
        )
    if opened.problem:
        return {first: opened.problem}
    called = {lines[host]: host for host in others}
    answers = ask(called, lines.values(), "call", address=_address(launch, plan, hosts), port=opened.port)
    return {
        called[link]: f"it does not reach {first.name}, port {opened.port}: {answer.problem}"
        for link, answer in answers.items()
        if answer.problem
    }


def _without_gpus(hosts: Sequence[Host], lines: Mapping[Host, Link]) -> dict[Host, str]:
    """Hosts that have fewer GPUs than ranks where another one has enough, and what is known of them."""
    ask_for_gpus(lines[host] for host in hosts)
    found = {host: gpus for host in hosts if (gpus := lines[host].gpus) is not None}
    if not any(gpus.count is not None and gpus.count >= host.slots for host, gpus in found.items()):
        return {}  # a job on processors
    return {
        host: f"nvidia-smi: {gpus.problem}"
        if gpus.problem
        else f"{counted(gpus.count or 0, 'GPU')} for {host.slots} ranks"
        for host, gpus in found.items()
        if gpus.problem or (gpus.count is not None and gpus.count < host.slots)
    }


def _address(launch: Launch, plan: Plan, hosts: Sequence[Host]) -> str:
    """The rendezvous as the other ranks reach it."""
    if len(hosts) == 1:
        return "127.0.0.1"
    chosen = launch.options.master_addr
    return chosen if chosen and hosts[0] == plan.hosts[0] else hosts[0].name


def _run(
    launch: Launch,
    plan: Plan,
    hosts: Sequence[Host],
    links: Sequence[Link],
    env: Mapping[str, str],
    python: str | None,
) -> End:
    assert links[0].met is not None
    ranks = RemoteRanks(links, [host.slots for host in hosts])
    watcher = Watcher(ranks, stall=launch.job.supervise.stall)
    each = commands(launch, hosts, _address(launch, plan, hosts), links[0].met.port, python)
    env = {**env, SECRET: secrets.token_hex(32)}
    try:
        with processes.stop_signals(watcher.stop, watcher.kill):
            ranks.start(each[0].argv, env, [command.env for command in each], launch.left)
            ended = watcher.watch()
    finally:
        ranks.close()
    # What was not seen to end is ended before the next start.
    return replace(ended, left=ranks.left())


def _misfit(launch: Launch, world: int) -> str:
    try:
        deepspeed_config(launch.job, world)
    except ConfigError as error:
        return str(error)
    return ""
