"""A sweep on a Ray cluster of two nodes, each in a network of its own, and the loss of one of them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.multihost.network import ADDRESSES, INTERFACE, Hosts, two_hosts
from tests.sweep.support import CAPT, Folder, wait_for

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.timeout(300)]
RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture(scope="module")
def folder(hosts: Hosts) -> Iterator[Folder]:
    """A folder that both nodes see, and ``ray start`` on each of them, one core a node."""
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # sockets have short names only
        token = Path(short) / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        env = {
            "HOME": short,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        work = hosts.folder / "work"
        work.mkdir()
        folder = Folder(work, env, f"{ADDRESSES[0]}:{PORT}")
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={short}/ray"]
        nodes = []
        for index, role in enumerate((head, [f"--address={ADDRESSES[0]}:{PORT}"])):
            argv = [RAY, "start", "--block", "--num-cpus=1", "--num-gpus=0", f"--node-ip-address={ADDRESSES[index]}"]
            log = hosts.folder / f"ray-{index}.log"
            nodes.append(node(hosts, index, [*argv, *role], folder, log))
            wait_for(lambda log=log: "Ray runtime started" in log.read_text())
        yield folder
        for process in nodes:
            process.kill()
            process.wait()


def node(hosts: Hosts, index: int, argv: list[str], folder: Folder, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as f:
        command = ["ip", "netns", "exec", hosts.names[index], *argv]
        return subprocess.Popen(command, cwd=log.parent, env=folder.env, stdout=f, stderr=subprocess.STDOUT)


def on_the_head(hosts: Hosts, *capt: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", hosts.names[0], *capt)


def test_a_trial_of_two_ranks_spans_both_nodes(hosts: Hosts, folder: Folder) -> None:
    job = {
        "task": {"type": "toy"},
        "run": {"tensorboard": False},
        "batch": {"global": 8, "micro": 2},
        "schedule": {"max_steps": 2},
        "validate": {"every": 0},
        "checkpoint": {"every": 0},
    }
    (folder.path / "real.yaml").write_text(yaml.safe_dump(job))
    out = folder.path / "span"
    folder.sweep(
        sweep={"dir": str(out), "seeds": [1]},
        studies={"toy": {"base": "real.yaml", "metric": "loss", "mode": "min"}},
        space={},
        trial={"workers": 2, "gpus": 0},
    )
    folder.run(capt=on_the_head(hosts, sys.executable, "-P", "-m", "capt.launcher.cli"))
    (line,) = map(json.loads, (out / "trials.jsonl").read_text().splitlines())
    assert (line["state"], line["attempts"]) == ("done", 1)
    manifest = next((out / line["run"]).glob("checkpoints/step-*/manifest.json"))
    assert json.loads(manifest.read_text())["world_size"] == 2


def test_the_worker_node_is_lost(hosts: Hosts, folder: Folder) -> None:
    folder.sweep()
    process = folder.start("pace=0.01", folder.hold(1.0), capt=on_the_head(hosts, *CAPT))
    try:
        wait_for(lambda: nodes_of(folder.held()) == set(ADDRESSES))
        for pid in hosts.pids(1):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        folder.let_go()
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, out + err
    lines = folder.lines()
    assert [line["state"] for line in lines] == ["done"] * 4
    assert len({line["run"] for line in lines}) == 4
    assert {line["node"] for line in lines} == {ADDRESSES[0]}
    lost = [starts for starts in folder.starts().values() if len(starts) == 2]
    assert len(lost) == 1
    assert lost[0][1]["resume"][:1] == ["--resume"]


def nodes_of(runs: list[Path]) -> set[str]:
    found = set()
    for run in runs:
        with suppress(ValueError):
            found.add(json.loads((run / "trial.json").read_text())["node"])
    return found
