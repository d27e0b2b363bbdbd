"""A Ray cluster to run on: one of our own on this machine, or one that is there; and whether it has room.

Ray 2.60 turns token authentication on for a cluster of its own, but writes the token world-readable into ``~/.ray``;
here it is a private file that lives as long as the cluster. Such a cluster listens on the loopback interface alone.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from capt.launcher import environment
from capt.pretrain.base.errors import ConfigError, MachineError, counted
from capt.pretrain.base.files import write_text
from capt.pretrain.base.process import usable_cores
from capt.pretrain.base.sensitive import is_secret

log = logging.getLogger(__name__)

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "0",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "120",
}
_TRACKED_RUN = ("MLFLOW_RUN_ID", "WANDB_RESUME", "WANDB_RUN_ID")
"""Variables by which a tracker continues a run that it has, instead of beginning one."""
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""A variable that, set to 0, has Ray give this machine the address 127.0.0.1 and listen there alone, on Linux too."""
_RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
_STORE = 100 * 2**20
_TIMEOUT = 3.0
_LONGEST = 20
"""Bytes of the name of the folder for temporary files: sockets in Ray's session have names of at most 107."""


def chosen_address(address: str | None = None) -> str | None:
    """The cluster to join: ``address`` (``--address``), else ``RAY_ADDRESS``; None for one of our own."""
    found = address or environment.inherited().get("RAY_ADDRESS") or None
    return None if found == "local" else found


def bundle(cpus: float, gpus: float, others: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return what one rank takes of a node."""
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {}) | dict(others or {})


def check_here(need: Mapping[str, float], count: int, remedy: str) -> None:
    """Refuse ``count`` ranks that this machine can never hold together, before Ray is started.

    Raises:
        ConfigError: it has too few cores or GPUs.
    """
    here = {"CPU": float(usable_cores()), "GPU": float(len(environment.visible_gpus()))}
    if _room(here, need) < count:
        raise MachineError(
            f"{counted(count, 'rank')} of {_text(need)} each do not fit this machine ({_text(here)}): {remedy}"
        )


def check_cluster(need: Mapping[str, float], count: int) -> None:
    """Refuse ``count`` ranks that the cluster cannot hold, even with the nodes that it may add.

    Raises:
        ConfigError: they do not fit.
    """
    check_room(need, count, _nodes(), addable())


def check_room(
    need: Mapping[str, float],
    count: int,
    nodes: Sequence[Mapping[str, float]],
    more: Sequence[tuple[Mapping[str, float], float]],
) -> None:
    """``check_cluster`` for these nodes, and those that may be added. Raises ``ConfigError``."""
    rooms = [(_room(node, need), 1.0) for node in nodes] + [(_room(node, need), number) for node, number in more]
    if sum(room * number for room, number in rooms if room) < count:
        have = "; ".join(_text(node) for node in nodes)
        added = "; ".join(f"{'any number' if math.isinf(n) else n} of {_text(node)}" for node, n in more)
        have += f", with what it may add: {added}" if more else ""
        raise MachineError(f"{counted(count, 'rank')} of {_text(need)} each do not fit the cluster's nodes ({have})")


def _nodes() -> list[Mapping[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def addable() -> list[tuple[Mapping[str, float], float]]:
    """Return what nodes of each kind hold that the cluster's autoscaler may start, and how many; none without one.

    Nodes that it has started already are among them: this is a bound on what can ever be there.
    """
    from ray._private.state import state  # Ray offers the sum over all kinds alone, which says nothing of one node

    config = state.get_cluster_config()
    return groups_of(config) if config is not None else []


def groups_of(config: Any) -> list[tuple[Mapping[str, float], float]]:
    """The groups of Ray's ``ClusterConfig``, in which -1 represents any number."""

    def unbounded(number: float) -> float:
        return math.inf if number < 0 else number

    groups = [
        ({k: unbounded(v) for k, v in g.resources.items()}, unbounded(g.max_count)) for g in config.node_group_configs
    ]
    return [(resources, number) for resources, number in groups if number]


def _room(node: Mapping[str, float], need: Mapping[str, float]) -> float:
    """Count the ranks that a node holds, in Ray's fractions of a ten-thousandth."""
    return min(math.inf if math.isinf(node.get(k, 0)) else (node.get(k, 0) + 1e-5) // need[k] for k in need)


def rank_environment(address: str | None) -> dict[str, str]:
    """The variables of this process that the ranks get; on a cluster of our own they inherit all others anyway."""
    given = environment.forwarded_env(environment.inherited())
    return given if address is not None else {name: given[name] for name in (environment.THREADS,) if name in given}


def has_gpus(address: str | None) -> bool:
    """Return whether the cluster (after ``cluster`` has joined it) or this machine has GPUs."""
    if address is None:
        return bool(environment.visible_gpus())
    return any(node.get("GPU") for node in (*_nodes(), *(node for node, _ in addable())))


def own_address() -> str:
    """The address under which the cluster knows the node of this process."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own)


def check_reachable(address: str) -> None:
    """Refuse an address that nobody listens on. Raises ``ConfigError``."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isascii() or not port.isdigit():
        raise ConfigError(
            f"--address (RAY_ADDRESS) {address[:200]!r}: give HOST:PORT as 'ray start --head' prints it (6379), or auto"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT).close()
    except (OSError, OverflowError, ValueError) as error:  # ValueError: a host name that IDNA does not take
        raise MachineError(f"--address (RAY_ADDRESS) {address[:200]!r}: cannot be reached ({error})") from None


@contextmanager
def without_tracked_run() -> Iterator[None]:
    """Leave the run of a tracker that this process belongs to: all trials of a sweep would log into that one."""
    left = {name: os.environ.pop(name) for name in _TRACKED_RUN if name in os.environ}
    if left:
        log.warning("%s not passed on: every trial is a run of its own at the tracker", ", ".join(left))
    try:
        yield
    finally:
        os.environ.update(left)


@contextmanager
def cluster(address: str | None, *, chatty: bool = False) -> Iterator[None]:
    """Join the cluster at ``address``, or start one on this machine's cores and GPUs; leave or end it afterwards.

    Meanwhile this process's environment holds no secrets: Tune hands those of AWS to its workers in a form that is
    in Ray's logs and command lines. A cluster of our own has inherited them before, as every process of this machine.
    Ray puts the folder in which it is joined on the module path of all workers: this process joins it in an empty one.

    Raises:
        ConfigError: there is no cluster at the address, or it does not let us in.
    """
    before = environment.inherited()
    os.environ.update(_QUIET)
    usual = tempfile.gettempdir()
    place = usual if len(os.fsencode(usual)) <= _LONGEST else "/tmp"
    private = Path(tempfile.mkdtemp(prefix="capt-ray-", dir=place))
    own = dict[str, str]()
    if address is None:
        own[_LOOPBACK] = "0"
        if "RAY_AUTH_MODE" not in before:
            write_text(private / "token", secrets.token_hex(32), private=True)
            own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(private / "token")}
    os.environ.update(own)
    import ray
    from ray._raylet import Config  # type: ignore[attr-defined]

    Config.initialize("")  # where Ray was imported before, it has read the environment already
    common: dict[str, Any] = {"include_dashboard": False} if address is None else {}
    common |= {"log_to_driver": chatty, "logging_level": logging.ERROR, "configure_logging": True}
    withheld: dict[str, str] = {}
    try:
        if address is None:
            gpus = len(environment.visible_gpus())
            with chdir(private):
                ray.init(
                    "local",
                    num_cpus=usable_cores(),
                    num_gpus=gpus,
                    object_store_memory=_STORE,
                    _temp_dir=str(private / "s"),  # Ray's own is open to all users, with its logs
                    **common,
                )
        withheld = {
            name: os.environ.pop(name) for name, value in environment.inherited().items() if _is_withheld(name, value)
        }
        if address is not None:
            with chdir(private):
                _join(address, common)
        yield
    finally:
        ray.shutdown()
        os.environ.update(withheld)
        for name in own:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in own if name in before})
        shutil.rmtree(private, ignore_errors=True)  # what Ray has just ended may still write


def _is_withheld(name: str, value: str) -> bool:
    return name.startswith("AWS_") or (is_secret(name, value) and not name.startswith("RAY_"))


def _join(address: str, common: Mapping[str, Any]) -> None:
    import ray
    from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

    check_reachable(address)
    try:
        ray.init(address, **common)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise MachineError(f"--address (RAY_ADDRESS) {address}: {' '.join(str(error).split())[:300]}") from None
    if get_authentication_mode() == AuthenticationMode.DISABLED:
        log.warning(
            "the Ray cluster at %s has no authentication: all who reach it can run code on its nodes; the guide's page "
            "\"Ray clusters\" starts one with a token", address,
        )  # fmt: skip


def _text(resources: Mapping[str, float]) -> str:
    def several(key: str, noun: str) -> str:
        return f"{resources[key]:g} {noun}{'' if resources[key] == 1 else 's'}"

    nouns = [several(key, noun) for key, noun in (("CPU", "core"), ("GPU", "GPU")) if key in resources]
    own = [f"{resources[key]:g} {key}" for key in resources if key.isidentifier() and key not in _RAYS_OWN]
    return ", ".join(nouns + own)
