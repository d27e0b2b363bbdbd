"""A Ray cluster to run on: one of our own on this machine, or one that is there; and whether it has room.

Ray 2.60 turns token authentication on for a cluster of its own, but writes the token world-readable into ``~/.ray``;
here it is a private file that lives as long as the cluster.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher import environment, machine, runfolder
from tokenizer.errors import ConfigError

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
_STORE = 100 * 2**20
_TIMEOUT = 3.0


def bundle(cpus: int, gpus: int) -> dict[str, float]:
    """What one rank takes of a node."""
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})


def check_here(need: Mapping[str, float], count: int) -> None:
    """Refuse ``count`` ranks that this machine can never hold together, before Ray is started.

    Raises:
        ConfigError: it has too few cores or GPUs.
    """
    here = {"CPU": float(machine.cores()), "GPU": float(len(environment.visible_gpus()))}
    if any(need[name] * count > here.get(name, 0.0) for name in need):
        raise ConfigError(
            f"{count} ranks of {_text(need)} each do not fit this machine ({_text(here)}): "
            "lower trial.workers, trial.cpus or trial.gpus, or join a cluster with --address"
        )


def check_cluster(need: Mapping[str, float], count: int) -> None:
    """Refuse ``count`` ranks that the nodes of the cluster can never hold together. Raises ``ConfigError``."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(node.get(name, 0.0) // need[name]) for name in need) for node in nodes)
    if room < count:
        have = "; ".join(_text(node) for node in nodes)
        raise ConfigError(f"{count} ranks of {_text(need)} each do not fit the cluster's nodes ({have})")


def has_gpus(address: str | None) -> bool:
    """Whether the cluster (after ``cluster`` has joined it) or this machine has GPUs."""
    if address is None:
        return bool(environment.visible_gpus())
    import ray

    return bool(ray.cluster_resources().get("GPU"))


def own_address() -> str:
    """The address under which the cluster knows the node of this process."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own)


def check_address(address: str) -> None:
    """Refuse an address that nobody listens on. Raises ``ConfigError``."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigError(f"--address {address!r}: give HOST:PORT as 'ray start --head' prints it (6379), or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--address {address}: cannot be reached ({error})") from None


@contextmanager
def cluster(address: str | None, *, chatty: bool = False) -> Iterator[None]:
    """Join the cluster at ``address``, or start one on this machine's cores and GPUs; leave or end it afterwards.

    Raises:
        ConfigError: there is no cluster at the address, or it does not let us in.
    """
    os.environ.update(_QUIET)
    private: Path | None = None
    if address is None and "RAY_AUTH_MODE" not in environment.inherited():
        private = Path(tempfile.mkdtemp(prefix="capt-ray-"))
        runfolder.write_private(private / "token", secrets.token_hex(32))
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(private / "token"))
    import ray
    from ray._raylet import Config  # type: ignore[attr-defined]

    Config.initialize("")  # where Ray was imported before, it has read the environment already
    common: dict[str, Any] = {"include_dashboard": False} if address is None else {}
    common |= {"log_to_driver": chatty, "logging_level": logging.ERROR, "configure_logging": True}
    try:
        if address is None:
            gpus = len(environment.visible_gpus())
            ray.init(
                "local",
                num_cpus=machine.cores(),
                num_gpus=gpus,
                object_store_memory=_STORE,
                **common,
            )
        else:
            _join(address, common)
        yield
    finally:
        ray.shutdown()
        if private is not None:
            for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
                os.environ.pop(name, None)
            shutil.rmtree(private)


def _join(address: str, common: Mapping[str, Any]) -> None:
    import ray

    check_address(address)
    try:
        ray.init(address, **common)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise ConfigError(f"--address {address}: {' '.join(str(error).split())[:300]}") from None


def _text(resources: Mapping[str, float]) -> str:
    names = {"CPU": "cores", "GPU": "GPUs"}
    return ", ".join(f"{resources[key]:g} {name}" for key, name in names.items() if key in resources)
