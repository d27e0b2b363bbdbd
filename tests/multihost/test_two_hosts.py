"""A job on two hosts: real ssh, also with pdsh and ``deepspeed --hostfile``, over a network of their own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from capt.pretrain.config.reader import job_to_yaml
from tests.multihost.network import ADDRESSES, INTERFACE, Hosts, two_hosts
from tests.multihost.test_tasks import JOBS
from tests.runs import losses
from tests.small_job import ROOT, write_job
from tests.support import free_port, run_capt

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(300)]

BIN = Path(sys.executable).parent
CAPT = (sys.executable, "-m", "capt.launcher.cli", "pretrain")
STEPS = 6
QUEUE = 37  # odd and smaller than three steps: the shards differ in size and wrap


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture(scope="module")
def workplace(hosts: Hosts) -> Path:
    """The folder that both hosts share: a text, a job, the interface for gloo."""
    folder = write_job(
        hosts.folder / "work",
        schedule={"max_steps": 5000, "warmup_steps": 2},
        contrast={"queue": QUEUE},
        checkpoint={"every": 0},
    )
    (folder / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={INTERFACE}\n")
    return folder


@contextmanager
def started(hosts: Hosts, folder: Path, name: str, *argv: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A command that runs on the first host, and its log; afterwards nothing of it may be left on either."""
    log = hosts.folder / f"{name}.log"
    process = hosts.popen([str(word) for word in argv], cwd=folder, log=log, PYTHONPATH=str(ROOT))
    try:
        yield process, log
    finally:
        process.kill()
    assert [hosts.pids(0), hosts.pids(1)] == [[], []], f"processes were left behind:\n{log.read_text()[-6000:]}"


def run(hosts: Hosts, folder: Path, name: str, *argv: str | Path) -> str:
    """Run a command until it stops at ``schedule.stop_after``, and return what it said."""
    with started(hosts, folder, name, *argv) as (process, log):
        assert process.wait(timeout=200) == 75, log.read_text(errors="replace")[-6000:]
    return log.read_text(errors="replace")


@pytest.fixture(scope="module")
def one_host(workplace: Path) -> dict[int, float]:
    """The losses of two processes on one host."""
    words = ("pretrain", "job.yaml", "run.dir=one", f"schedule.stop_after={STEPS}", "--nproc", "2")
    done = run_capt(*words, cwd=workplace, env=dict(os.environ))
    assert done.returncode == 75, done.stderr
    found = losses(workplace / "one")
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def check_two_hosts(said: str, folder: Path, expected: dict[int, float], launcher: str = "deepspeed") -> None:
    for rank, address in enumerate(ADDRESSES if launcher == "deepspeed" else ()):
        assert re.search(rf"^{re.escape(address)}: .*nnodes=2, num_local_procs=1, node_rank={rank}", said, re.MULTILINE)
    assert {step: loss for step, loss in losses(folder).items() if step <= STEPS} == expected
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    shards = sorted(folder.glob(f"checkpoints/step-{status['step']:08}/queue-*.safetensors"))
    assert [path.name for path in shards] == [f"queue-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
    rows = [len(load_file(path)["rows"]) for path in shards]
    assert sum(rows) == QUEUE
    assert max(rows) <= -(-QUEUE // 2)


@pytest.mark.slow
def test_the_raw_deepspeed_launcher(hosts: Hosts, workplace: Path, one_host: dict[int, float]) -> None:
    said = run(
        hosts,
        workplace,
        "raw",
        *(BIN / "deepspeed", "--hostfile", hosts.hostfile(), "--master_addr", ADDRESSES[0]),
        *("--module", "capt.pretrain", "job.yaml", "run.dir=raw", f"schedule.stop_after={STEPS}"),
    )
    check_two_hosts(said, workplace / "raw", one_host)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "vision_language"])
def test_the_raw_deepspeed_launcher_with_other_jobs(hosts: Hosts, kind: str) -> None:
    folder = hosts.folder / kind
    folder.mkdir()
    (folder / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={INTERFACE}\n")
    (folder / "job.yaml").write_text(job_to_yaml(JOBS[kind](folder)))
    words = ["job.yaml", "validate.every=0", "schedule.stop_after=4"]
    one = run_capt("pretrain", *words, "run.dir=one", "--nproc", "2", cwd=folder, env=dict(os.environ))
    assert one.returncode == 75, one.stderr
    deepspeed = (BIN / "deepspeed", "--hostfile", hosts.hostfile(), "--master_addr", ADDRESSES[0])
    run(hosts, folder, kind, *deepspeed, "--module", "capt.pretrain", *words, "run.dir=two")
    assert sorted(losses(folder / "one")) == [1, 2, 3, 4]
    assert losses(folder / "two") == losses(folder / "one")


@pytest.mark.slow
def test_the_raw_deepspeed_launcher_says_which_variable_gloo_needs(hosts: Hosts) -> None:
    """On hosts whose names are loopback addresses, and without the variable; both launchers end."""
    if not ip_address(socket.gethostbyname(socket.gethostname())).is_loopback:
        pytest.skip("needs a machine whose name is a loopback address")
    folder = write_job(hosts.folder / "names")
    deepspeed = (BIN / "deepspeed", "--hostfile", hosts.hostfile(), "--master_addr", ADDRESSES[0])
    with started(hosts, folder, "names", *deepspeed, "--module", "capt.pretrain", "job.yaml") as (process, log):
        assert process.wait(timeout=150) == 1, log.read_text(errors="replace")[-6000:]
    said = log.read_text(errors="replace")
    assert re.search(
        rf"^{ADDRESSES[0]}: error: rank 0 on .*GLOO_SOCKET_IFNAME={INTERFACE} into \.deepspeed_env", said, re.M
    )
    assert "Traceback" not in said


@pytest.mark.parametrize("launcher", [pytest.param("ssh", marks=pytest.mark.slow), "deepspeed"])
def test_capt_with_a_hostfile_until_sigterm(
    hosts: Hosts, workplace: Path, one_host: dict[int, float], launcher: str
) -> None:
    # a port of its own: pdsh finds the ranks by it, and the two hosts share this machine's process table
    words = ["job.yaml", f"run.dir={launcher}", "--hostfile", hosts.hostfile(), "--master-port", str(free_port())]
    run_dir = workplace / launcher
    with started(hosts, workplace, launcher, *CAPT, *words, "--launcher", launcher) as (process, log):
        deadline = time.monotonic() + 120
        while len(losses(run_dir)) < STEPS and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)  # every rank on every host saves at the same step
        assert process.wait(timeout=60) == 75, log.read_text(errors="replace")[-6000:]
    check_two_hosts(log.read_text(errors="replace"), run_dir, one_host, launcher)


def test_an_unknown_host_key_is_an_error_and_not_a_question(hosts: Hosts, workplace: Path) -> None:
    known = hosts.folder / "ssh" / "known_hosts"
    kept = known.read_text()
    known.write_text("")
    try:
        command = [*CAPT, "job.yaml", "run.dir=key", "--hostfile", hosts.hostfile()]
        with started(hosts, workplace, "key", *command) as (process, log):
            assert process.wait(timeout=60) == 2
    finally:
        known.write_text(kept)
    said = log.read_text()
    assert "Host key verification failed" in said
    assert ADDRESSES[1] in said
    assert not (workplace / "key" / "config.yaml").exists()


def test_nothing_is_left_of_the_hosts(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as both:
        tag = both.names[0].split("-")[1]  # other tests may make hosts of their own at the same time
        sleeper = both.popen(["sleep", "60"], cwd=tmp_path, log=tmp_path / "log")
        answer = both.popen(["ssh", ADDRESSES[1], "echo", "hello"], cwd=tmp_path, log=tmp_path / "answer")
        assert answer.wait(timeout=20) == 0
        assert (tmp_path / "answer").read_text() == "hello\n"
        assert network(tag) == {*both.names, f"br-{tag}", f"v0-{tag}", f"v1-{tag}"}
    assert sleeper.wait(timeout=5) == -9
    assert network(tag) == set()


def network(tag: str) -> set[str]:
    """Namespaces and interfaces of this machine whose names hold ``tag``."""
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    names = [line.split()[0] for line in namespaces.splitlines()]
    return {name for name in (*names, *os.listdir("/sys/class/net")) if tag in name}
