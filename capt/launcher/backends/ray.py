"""Ray: one rank a bundle of a placement group, each rank a process of its own on the bundle's node.

``capt pretrain --launcher ray --nproc N`` runs its ranks so (on the cluster that ``RAY_ADDRESS`` names, else on one of
its own), and so does every trial of a sweep.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capt.launcher import environment, raycluster
from capt.launcher.plan import Command, End, Launch, Plan
from capt.launcher.ssh import Host
from capt.launcher.supervisor import processes
from capt.pretrain.engine.run_folder import BAD_INPUT, DONE, FAILED, STOPPED

log = logging.getLogger(__name__)

_GRACE = 5.0
_POLL = 0.2


@dataclass(frozen=True)
class Place:
    """The place of a rank."""

    node: str
    address: str
    gpus: tuple[str, ...]
    port: int


class Rank:
    """The process of a rank. Lives in the process that holds the rank's bundle, and dies with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> Place:
        """This process's node, its GPUs, and a port that is free there."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        with socket.socket() as s:
            # Given up again immediately; rank 0, which has the rendezvous, takes it a little later.
            s.bind(("", 0))
            port = int(s.getsockname()[1])
        return Place(context.get_node_id(), raycluster.own_address(), gpus, port)

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path | None) -> None:
        """Start the process."""
        merged = {**environment.of_ranks(), **env}
        if environment.THREADS not in env:  # Ray's own: a thread for each of its CPUs, whatever cores are there
            merged.pop(environment.THREADS, None)
        self._process = processes.start(argv, merged, on_parent_death=signal.SIGKILL, cwd=cwd, output=output)

    def poll(self) -> int | None:
        """The process's exit code; None while it runs."""
        if self._process is None or not processes.ended(self._process):
            return None
        return int(self._process.returncode)

    def send(self, number: int) -> None:
        """Signal the process; SIGKILL takes its descendants too."""
        if self._process is None:
            return
        if number == signal.SIGKILL:
            processes.kill_tree(self._process)
            self._process.wait()
        else:
            processes.send(self._process, signal.Signals(number))


class RankGroup:
    """The ranks of a job: ``Rank`` objects of this process, and handles of Ray actors that are one."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self._ranks = list(ranks)
        self._failed: tuple[int, float] | None = None

    def start(self, argv: Sequence[str], cwd: Path, output: Path | None, forwarded: Mapping[str, str]) -> None:
        """Start all ranks with the forwarded environment and the variables that ``torch.distributed`` reads."""
        self._failed = None
        # Every rank needs the address of the first one: all places before any start.
        places: list[Place] = self._all("place")
        ranks_on = Counter(place.node for place in places)
        seen: Counter[str] = Counter()
        for rank, (handle, place) in enumerate(zip(self._ranks, places, strict=True)):
            gpus = [gpu for other in places if other.node == place.node for gpu in other.gpus]
            env = {
                **forwarded,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(seen[place.node]),
                "LOCAL_WORLD_SIZE": str(ranks_on[place.node]),
                "MASTER_ADDR": places[0].address,
                "MASTER_PORT": str(places[0].port),
            }
            if gpus:  # each rank sees its node's ranks' GPUs, so that they reach each other
                env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            seen[place.node] += 1
            _get([_call(handle, "start", argv, env, cwd, output)])

    def poll(self) -> int | None:
        """None while ranks run; then 0 or 75 when all ended so, else the code of the first that did not.

        The other ranks of one that failed would wait for it in a collective: they get SIGTERM, and SIGKILL later.
        """
        codes = self._all("poll")
        bad = [code for code in codes if code not in (None, DONE, STOPPED)]
        if bad and self._failed is None:
            self._failed = (bad[0], time.monotonic() + _GRACE)
            self.send(signal.SIGTERM)
        if None in codes:
            if self._failed and time.monotonic() > self._failed[1]:
                self.send(signal.SIGKILL)
            return None
        if self._failed:
            return BAD_INPUT if self._failed[0] == BAD_INPUT else FAILED
        return int(codes[0]) if len(set(codes)) == 1 else FAILED

    def send(self, number: signal.Signals) -> None:
        """Signal all ranks."""
        self._all("send", int(number))

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return _get([_call(rank, method, *arguments) for rank in self._ranks])


def remote_ranks(group: Any, bundles: Sequence[int], need: Mapping[str, float]) -> list[Any]:
    """Ray actors that are a ``Rank`` each, in these bundles of a placement group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor = ray.remote(Rank)
    return [
        actor.options(
            num_cpus=need["CPU"],
            num_gpus=need.get("GPU", 0),
            resources={name: amount for name, amount in need.items() if name not in ("CPU", "GPU")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in bundles
    ]


def plan(launch: Launch) -> Plan:
    """Return what every rank runs; the nodes are Ray's choice.

    Raises:
        ConfigError: a hostfile is given, or without a cluster this machine has too few cores or GPUs.
    """
    options = launch.options
    options.refuse("ray", "hostfile", "master_addr", "master_port", because="Ray chooses the nodes")
    ranks = options.nproc or max(1, len(environment.visible_gpus()))
    address = raycluster.chosen_address()
    if address is None:
        raycluster.check_here(_need(None), ranks, "lower --nproc, or name a cluster: RAY_ADDRESS=HOST:6379")
    command = Command((sys.executable, "-m", launch.module, *launch.arguments))
    return Plan(
        "ray",
        (Host(f"Ray cluster at {address}" if address else "a Ray cluster of its own", ranks),),
        (command,) * ranks,
        launch.files,
    )


def start(launch: Launch, plan: Plan) -> End:
    """Run all ranks to their end."""
    address = raycluster.chosen_address()
    with raycluster.cluster(address, chatty=True):
        import ray

        need = _need(address)
        raycluster.check_cluster(need, plan.world)
        group = ray.util.placement_group([need] * plan.world)
        log.info("waiting for room on the cluster")
        ray.get(group.ready())
        ranks = RankGroup(remote_ranks(group, range(plan.world), need))
        with processes.stop_signals(ranks.send, lambda: ranks.send(signal.SIGKILL)):
            ranks.start(plan.commands[0].argv, Path.cwd(), None, raycluster.rank_environment(address))
            try:
                while (code := ranks.poll()) is None:
                    time.sleep(_POLL)
            except ray.exceptions.RayActorError as error:
                log.error("a node of the job was lost: %s", " ".join(str(error).split())[:200])
                code = FAILED
    return End(code)


def _need(address: str | None) -> dict[str, float]:
    return raycluster.bundle(1, int(raycluster.has_gpus(address)))


def _call(rank: Any, method: str, *arguments: Any) -> Any:
    """The answer of a rank of this process, or the reference to an actor's."""
    if isinstance(rank, Rank):
        return getattr(rank, method)(*arguments)
    return getattr(rank, method).remote(*arguments)


def _get(answers: Sequence[Any]) -> list[Any]:
    import ray

    return [ray.get(answer) if isinstance(answer, ray.ObjectRef) else answer for answer in answers]
