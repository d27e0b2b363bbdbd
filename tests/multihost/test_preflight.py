"""The preflight on two hosts of one machine: real ssh, real networks, a folder that is not shared, a cut cable."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.multihost.network import ADDRESSES, INTERFACE, Hosts, two_hosts

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
CAPT = (sys.executable, "-m", "capt.launcher.cli")
DRIVER = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from capt.launcher.ssh import read_hostfile
from capt.launcher.preflight.run import check_cluster
hosts = read_hostfile(Path(sys.argv[1]))
checks = check_cluster(hosts, run_dir=Path(sys.argv[2]), job=None, address=None, port=29500)
print(json.dumps([asdict(check) for check in checks]))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        work = both.folder / "work"
        work.mkdir()
        (work / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={INTERFACE}\n")
        (work / "text.txt").write_text("the cat sat on a mat\n\n" * 200)
        yield both


def red(hosts: Hosts, run_dir: Path) -> dict[tuple[str, str], str]:
    """The failed checks, by host and name; afterwards nothing is left running, nor in the folder."""
    log = hosts.folder / "log"
    argv = [sys.executable, "-c", DRIVER, str(hosts.hostfile()), str(run_dir)]
    process = hosts.popen(argv, cwd=hosts.folder / "work", log=log, PYTHONPATH=str(ROOT))
    assert process.wait(timeout=120) == 0, log.read_text()
    found = json.loads(log.read_text().splitlines()[-1])
    assert [hosts.pids(0), hosts.pids(1)] == [[], []]
    assert not list(run_dir.parent.glob(".preflight-*"))
    return {(check["host"], check["name"]): check["finding"] for check in found if check["level"] == "fail"}


def test_doctor_sees_two_healthy_hosts(hosts: Hosts) -> None:
    log = hosts.folder / "log"
    words = ["doctor", "--hostfile", str(hosts.hostfile()), "--json"]
    process = hosts.popen([*CAPT, *words], cwd=hosts.folder / "work", log=log, PYTHONPATH=str(ROOT))
    code = process.wait(timeout=200)
    said = log.read_text()
    assert code == 0, said
    levels = {check["name"]: check for check in json.loads(said[said.index("[\n") :])}
    assert levels["reachable"]["finding"] == "2 hosts, by known host keys"
    assert levels["run folder"]["finding"].endswith("is shared and writable")
    assert levels["interfaces"]["finding"] == INTERFACE
    assert levels["rendezvous"]["level"] == "ok"


def test_a_used_port_is_found_on_the_first_host(hosts: Hosts) -> None:
    listen = "import socket, time; s = socket.create_server(('', 29500)); print('up', flush=True); time.sleep(100)"
    log = hosts.folder / "other"
    other = hosts.popen([sys.executable, "-S", "-c", listen], cwd=hosts.folder, log=log)
    try:
        deadline = time.monotonic() + 30
        while "up" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        argv = [sys.executable, "-c", DRIVER, str(hosts.hostfile()), "run"]
        answer = hosts.folder / "log"
        process = hosts.popen(argv, cwd=hosts.folder / "work", log=answer, PYTHONPATH=str(ROOT))
        assert process.wait(timeout=120) == 0, answer.read_text()
    finally:
        other.kill()
        other.wait()
    failed = [check for check in json.loads(answer.read_text().splitlines()[-1]) if check["level"] == "fail"]
    assert [(check["host"], check["name"]) for check in failed] == [(ADDRESSES[0], "rendezvous port")]
    assert "Address already in use" in failed[0]["finding"]


@contextmanager
def mounted_on_the_second(hosts: Hosts, folder: Path) -> Iterator[None]:
    """A disk of the second host's own in the place of a folder that both see."""
    pids = subprocess.run(["ip", "netns", "pids", hosts.names[1]], capture_output=True, text=True, check=True).stdout
    inside = ["nsenter", "-m", "-t", pids.split()[0]]  # the mounts of its sshd
    subprocess.run([*inside, "mount", "-t", "tmpfs", "own", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run([*inside, "umount", str(folder)], check=True)


def test_a_folder_that_is_not_shared_is_found(hosts: Hosts) -> None:
    folder = hosts.folder / "disk"
    folder.mkdir()
    with mounted_on_the_second(hosts, folder):
        found = red(hosts, folder / "run")
    assert list(found) == [(ADDRESSES[1], "run folder")]
    assert "is not seen there" in found[ADDRESSES[1], "run folder"]
    assert red(hosts, folder / "run") == {}


def test_a_launch_on_a_host_that_is_cut_off_is_refused_at_once(hosts: Hosts) -> None:
    log = hosts.folder / "log"
    words = ["pretrain", "capt_tiny", "data.files=text.txt", "batch.micro=4", "run.dir=cut"]
    command = [*CAPT, *words, "--hostfile", str(hosts.hostfile())]
    link = ["ip", "-n", hosts.names[1], "link", "set", INTERFACE]
    subprocess.run([*link, "down"], check=True)
    try:
        users = {"PDSH_SSH_ARGS_APPEND": "-o ConnectTimeout=2"}  # instead of ten seconds
        process = hosts.popen(command, cwd=hosts.folder / "work", log=log, PYTHONPATH=str(ROOT), **users)
        code = process.wait(timeout=60)
    finally:
        subprocess.run([*link, "up"], check=True)
    said = log.read_text()
    assert code == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert f"preflight: {ADDRESSES[1]}: reachable: ssh: connect to host" in line
    assert "--no-preflight" in line
    assert not (hosts.folder / "work" / "cut").exists()
