"""``python -m capt.launcher.pod OPTION... MODULE ARGUMENT...``: what every pod of a Kubernetes job runs.

All pods are nodes of one job (:mod:`capt.launcher.supervisor`). The pod of index 0 is the head as well: it waits for
the others to call, starts the ranks, watches them, and starts them again where one dies or hangs, without a new pod. A
pod that is lost is replaced by Kubernetes and calls again; until then ``supervise.on_lost_node`` counts.

Exit codes tell Kubernetes what to do: 0 the job is done, 2 its input is bad, 75 the pod had to go and may come back. A
job that stops at ``schedule.stop_after`` has done what it was asked to.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import SIGUSR1

from capt.launcher import environment
from capt.launcher.backends import hosts as on_hosts
from capt.launcher.plan import DEFAULT_PORT, End, Launch, Options, Plan
from capt.launcher.ssh import Host, python_reading
from capt.launcher.start import carry_on
from capt.launcher.supervisor.calls import Door, attend
from capt.launcher.supervisor.link import Link
from capt.launcher.supervisor.node import PROGRAM
from capt.launcher.supervisor.output import Output
from capt.launcher.supervisor.processes import stop_asked
from capt.pretrain.__main__ import job_of, parse
from capt.pretrain.base.errors import ConfigError, UserError, counted, user_text
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.engines.deepspeed_config import deepspeed_config
from capt.pretrain.engine.run_folder import DONE, FAILED, STOPPED, exit_code_of, holds_run, last_step

log = logging.getLogger(__name__)

_BEAT, _POLL = 10.0, 0.2
_PATIENCE = 60.0
"""Seconds that pods have at most to call again before a job that shrinks continues without them."""
_CALLING = 5.0
"""Seconds in which a pod calls again whose line has ended."""
_GATHERING = 2.0
"""Seconds that a pod has called for when a job that has shrunk stops for it, so that several come in together."""


class Pods:
    """The launcher of a head: its own pod, and those that call it (`capt.launcher.plan.Backend`)."""

    def __init__(self, door: Door, address: str, port: int, pods: Sequence[Host], nodes: int) -> None:
        self._door, self._address, self._port = door, address, port
        self._pods, self._nodes = tuple(pods), nodes
        self._links: dict[int, Link] = {}
        self._grown = False

    def plan(self, launch: Launch) -> Plan:
        """Return the commands of all ranks; pods beyond the first ``nodes`` are spares."""
        hosts, spares = self._pods[: self._nodes], self._pods[self._nodes :]
        commands = on_hosts.commands(launch, hosts, self._address, self._port)
        return Plan("pods", hosts, commands, master_port=self._port, spares=spares)

    def start(self, launch: Launch, plan: Plan) -> End:
        """Wait for the pods to call, and run the job on them."""
        shrinks, patience = launch.job.supervise.on_lost_node == "shrink", 60 * launch.job.supervise.wait_minutes
        # A job that can do with fewer pods does not wait long for a lost one.
        patience = min(_PATIENCE, patience) if shrinks and launch.again else patience
        self._expect(len(plan.hosts), patience, again=launch.again)
        if stop_asked():
            return End(STOPPED, "asked to stop before the ranks were started")
        over = threading.Event()
        if shrinks:
            threading.Thread(target=self._watch_growth, args=(launch, over), name="growth", daemon=True).start()
        try:
            return on_hosts.run(launch, plan, self._connect, {})
        finally:
            over.set()

    def grown(self) -> bool:
        """Return whether the job was stopped because more pods are there than it runs on, and clear that mark."""
        grown, self._grown = self._grown, False
        return grown

    def _expect(self, nodes: int, seconds: float, *, again: bool) -> None:
        """Wait until the pods of the ranks have called, the time is over, or the job is asked to stop.

        When the job is started again, spare pods do as well for those that do not call within seconds.
        """
        begun, logged, wanted = time.monotonic(), False, set(range(1, nodes))
        while not wanted <= (there := self._door.waiting()) and not stop_asked():
            waited = time.monotonic() - begun
            if waited > seconds or (again and waited > _CALLING and len(there) >= len(wanted)):
                return
            if not logged:
                log.info("waiting for %s to call", counted(len(wanted - there), "pod"))
            logged = True
            time.sleep(_POLL)

    def _connect(self, host: Host, output: Output) -> Link:
        index = next(number for number, pod in enumerate(self._pods) if pod.name == host.name)
        # The head supervises its own pod by a child process, and the others by their calls.
        if index:
            self._links[index] = self._door.link(index, host.name, output)
        else:
            inherited = environment.inherited()
            path = [entry for entry in inherited.get("PYTHONPATH", "").split(":") if entry]
            self._links[0] = Link.through(host.name, python_reading(PROGRAM), inherited, path, output)
        return self._links[index]

    def _watch_growth(self, launch: Launch, over: threading.Event) -> None:
        """Let the job save and stop once it can run on more pods than it does."""
        since: float | None = None
        while not over.wait(1.0):
            running = {number for number, link in self._links.items() if link.ranks and not link.lost}
            if not running or self._fitting(launch, len(running | self._door.waiting())) <= len(running):
                since = None
                continue
            since = since or time.monotonic()
            # Not at the first call: more pods may follow immediately.
            if time.monotonic() - since > _GATHERING:
                log.info("more pods have called: the job saves, and starts again with them")
                self._grown = True
                # Stopped as from outside: the ranks save, and the job is started again on all pods.
                os.kill(os.getpid(), SIGUSR1)
                return

    def _fitting(self, launch: Launch, pods: int) -> int:
        """The largest number of pods, up to this one, that the job can run on."""
        for count in range(min(pods, self._nodes), 0, -1):
            with suppress(ConfigError):
                deepspeed_config(launch.job, sum(pod.slots for pod in self._pods[:count]))
                return count
        return 0


def main(arguments: Sequence[str]) -> int:
    """Be one pod of a job; returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="[capt] %(message)s", stream=sys.stderr)
    given = _options().parse_args(arguments)
    try:
        # First of all: the kubelet ends a pod that does not touch this file.
        threading.Thread(target=_keep_alive, args=(given.alive,), name="alive", daemon=True).start()
        variables = environment.inherited()
        index, address = int(variables.get("JOB_COMPLETION_INDEX", "0")), variables.get("MASTER_ADDR", "127.0.0.1")
        port = int(variables.get("MASTER_PORT", DEFAULT_PORT))
        # Only a signal ends the attendance; by 75 Kubernetes replaces the pod without counting it.
        if index:
            # The ranks meet at the port itself, the pods at the next one.
            attend(address, port + 1, index)
            return STOPPED
        pods = [Host(f"pod-{number}", given.ranks) for number in range(given.pods)]
        launcher = Pods(Door(port + 1, given.pods), address, port, pods, given.nodes or given.pods)
        return lead(
            launcher, given.words, Options(launcher="kubernetes", master_addr=address), variables.get("CAPT_JOB", "")
        )
    except Exception as error:
        text = user_text(error)
        if text is None:
            raise
        sys.stderr.write(f"error: {text}\n")
        return exit_code_of(error) if isinstance(error, UserError) else FAILED


def lead(launcher: Pods, words: Sequence[str], options: Options, name: str) -> int:
    """Carry the job out as its head; ``name`` is the same for all pods of the job, so that restarts are counted."""
    module, *rest = words
    job = job_of(parse(rest))
    launch = Launch(module, tuple(rest), job, options)
    while True:
        begun = holds_run(job.run.dir)
        code = carry_on(replace(launch, again=begun), launcher, name_of_job=name)
        # Stopped to continue with more pods, and not to end.
        if code == STOPPED and launcher.grown():
            continue
        return DONE if code == STOPPED and _has_reached_its_stop(job) else code


def _has_reached_its_stop(job: Job) -> bool:
    stop = job.schedule.stop_after
    return stop is not None and last_step(job.run.dir) >= stop


def _keep_alive(path: Path) -> None:
    """Touch a file for as long as this process runs: suspended, or with its interpreter locked, it does not."""
    while True:
        with suppress(OSError):
            path.touch()
        time.sleep(_BEAT)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m capt.launcher.pod", description="Be one pod of a job.")
    parser.add_argument("--pods", type=int, required=True, help="pods of the job")
    parser.add_argument("--nodes", type=int, help="pods that run ranks; the others are spares")
    parser.add_argument("--ranks", type=int, required=True, help="ranks of each pod")
    parser.add_argument("--alive", type=Path, required=True, help="file that is touched while this process runs")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="MODULE ARGUMENT...", help="the job")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
