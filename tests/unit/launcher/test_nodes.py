"""The supervisor of a node and the head's end of its line, through a stand-in for ssh that runs a shell here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from capt.launcher.backends import hosts as on_hosts
from capt.launcher.backends.watching import Watcher
from capt.launcher.plan import End, Launch, Options, Plan
from capt.launcher.ssh import Host, ssh_command
from capt.launcher.supervisor import node, processes
from capt.launcher.supervisor.link import Link, end, pump
from capt.launcher.supervisor.messages import MARK, SILENCE
from capt.launcher.supervisor.output import Output
from capt.launcher.supervisor.remote import RemoteRanks
from capt.pretrain.base.process import born
from capt.pretrain.config.load import load_job
from capt.pretrain.config.reader import job_to_yaml

ROOT = Path(__file__).parents[3]
SSH = r"""#!/bin/sh
while :; do case "$1" in -o) shift 2;; -*) shift;; *) break;; esac; done
[ "$1" = away ] && { echo "ssh: connect to host away port 22: No route to host" >&2; exit 255; }
printf 'hello\nwelcome to %s' "$1"; shift
exec sh -c "$*"
"""
SLEEPS = "import time; print('here', flush=True); time.sleep(60)"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.fixture
def output() -> Iterator[Output]:
    made = Output()
    yield made
    made.close(2.0)


def connected(environment: dict[str, str], output: Output, *names: str, signalled: bool = False) -> list[Link]:
    links = [
        Link.through(
            name, ssh_command(name, environment, node.PROGRAM), environment, [str(ROOT)], output, signalled=signalled
        )
        for name in names
    ]
    until = time.monotonic() + 30
    while any(link.up is None and not link.lost for link in links) and time.monotonic() < until:
        pump(links, 0.1)
    return links


def wait_for_ranks(ranks: RemoteRanks, links: list[Link]) -> list[int]:
    """The processes of all ranks."""
    until = time.monotonic() + 20
    while not all(link.ranks for link in links) and time.monotonic() < until:
        ranks.look(0.1)
    assert all(link.ranks for link in links), [f"{link.host}: {link.lost}" for link in links]
    return [rank.pid for link in links for rank in link.ranks]


def test_a_host_that_says_nothing_is_lost_after_its_time(environment: dict[str, str], output: Output) -> None:
    slow = Link.through("slow", ["sleep", "30"], environment, [], output, answer=0.3)
    usual = Link.through("usual", ["sleep", "30"], environment, [], output)
    until = time.monotonic() + 10
    while not slow.lost and time.monotonic() < until:
        pump([slow, usual], 0.1)
    assert (slow.lost, usual.lost) == ("no answer in 0.3 s", "")
    slow.close()
    usual.close()


def test_a_port_that_is_taken_at_a_resume_is_a_machines(tmp_path: Path, environment: dict[str, str]) -> None:
    """`capt resume` gives the port of the first launch again; at a first start it may be mistyped."""
    job = load_job("capt_tiny", [f"run.dir={tmp_path / 'run'}"])
    hosts = (Host("n1", 1), Host("n2", 1))
    with socket.create_server(("", 0)) as other:
        plan = Plan("ssh", hosts, (), master_port=other.getsockname()[1])

        def connect(host: Host, output: Output) -> Link:
            return Link.through(
                host.name, ssh_command(host.name, environment, node.PROGRAM), environment, [str(ROOT)], output
            )

        launch = Launch("capt.pretrain", (), job, Options())
        ended = on_hosts.run(launch, plan, connect, {})
        assert (ended.code, "Address already in use" in ended.reason) == (2, True)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.yaml").write_text(job_to_yaml(job))
        assert on_hosts.run(launch, plan, connect, {}).code == 1


def run(links: list[Link], programs: list[str], fault: str = "") -> tuple[End, RemoteRanks, list[int]]:
    ranks = RemoteRanks(links, [1] * len(links))
    own = [{"PROGRAM": program} for program in programs]
    ranks.start([sys.executable, "-c", "import os; exec(os.environ['PROGRAM'])"], {}, own, {})
    pids = wait_for_ranks(ranks, links)
    if fault == "node":
        assert links[1].up is not None
        os.kill(links[1].up.pid, signal.SIGKILL)
        until = time.monotonic() + 2.0  # what is promised
        while born(pids[1]) is not None:
            assert time.monotonic() < until
            time.sleep(0.01)
    ended = Watcher(ranks, grace=0.5).watch()
    ranks.close()
    return ended, ranks, pids


def test_ranks_that_end_well_end_well(
    environment: dict[str, str], output: Output, capfd: pytest.CaptureFixture[str]
) -> None:
    links = connected(environment, output, "a", "b")
    ended, ranks, _ = run(links, ["print('hello')", "import sys; print('there', file=sys.stderr)"])
    assert ended == End(0)
    assert ranks.left() == {}
    output.close(2.0)
    assert sorted(capfd.readouterr().err.splitlines()) == ["a: hello", "b: there"]


@pytest.mark.parametrize(
    ("program", "says", "killed_by"),
    [
        ("raise SystemExit(3)", "rank 1 on b exited with 3", None),
        ("import os; os.kill(os.getpid(), 9)", "rank 1 on b was killed by SIGKILL", "SIGKILL"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_host_and_ends_the_others(
    environment: dict[str, str], output: Output, program: str, says: str, killed_by: str | None
) -> None:
    ended, ranks, pids = run(connected(environment, output, "a", "b"), [SLEEPS, program])
    assert ended.code == 1
    assert says in ended.reason
    assert ended.crash is not None
    assert (ended.crash.host, ended.crash.rank, ended.crash.signal) == ("b", 1, killed_by)
    assert [born(pid) for pid in pids] == [None, None]
    assert ranks.left() == {}


def test_a_killed_supervisor_takes_its_ranks_with_it_and_is_a_lost_host(
    environment: dict[str, str], output: Output
) -> None:
    ended, ranks, pids = run(connected(environment, output, "a", "b"), [SLEEPS, SLEEPS], fault="node")
    assert ended.code == 1
    assert ended.reason.startswith("b is lost: ")
    assert ended.lost_host
    assert [born(pid) for pid in pids] == [None, None]
    assert [pid for pid, _ in ranks.left()["b"].processes][1:] == [pids[1]]  # for the next start to see to
    assert "a" not in ranks.left()


def test_talkative_nodes_do_not_have_the_head_look_at_all_ranks_at_every_word(
    environment: dict[str, str], output: Output
) -> None:
    """A node of 128 says something every four milliseconds."""
    links = connected(environment, output, "a")
    ranks = RemoteRanks(links, [1])
    talks = "import time\nfor _ in range(10000): print('word', flush=True); time.sleep(0.001)"
    ranks.start([sys.executable, "-c", talks], {}, [{}], {})
    wait_for_ranks(ranks, links)
    begun = time.monotonic()
    for _ in range(5):
        ranks.look(0.1)
    assert time.monotonic() - begun >= 0.5
    ranks.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_of_slurm_to_one_node_asks_the_whole_job_to_stop(
    environment: dict[str, str], output: Output, number: signal.Signals
) -> None:
    links = connected(environment, output, "a", "b", signalled=True)
    ranks = RemoteRanks(links, [1, 1])
    saves = f"import signal, time; signal.signal({number:d}, lambda *_: exit(75)); time.sleep(60)"
    ranks.start([sys.executable, "-c", saves], {}, [{}, {}], {})
    wait_for_ranks(ranks, links)
    watcher = Watcher(ranks, grace=0.5)
    with processes.stop_signals(watcher.stop, ranks.kill):
        assert links[1].up is not None
        os.kill(links[1].up.pid, number)
        assert watcher.watch().code == 75
        assert processes.stop_asked()
    ranks.close()


def test_what_ssh_says_is_why_a_host_is_not_reached(environment: dict[str, str], output: Output) -> None:
    (link,) = links = connected(environment, output, "away")
    end(links)
    assert (link.up, link.lost) == (None, "ssh: connect to host away port 22: No route to host")


def test_a_host_that_is_silent_for_too_long_is_lost(environment: dict[str, str], output: Output) -> None:
    (link,) = links = connected(environment, output, "a")
    link.heard -= SILENCE - 1
    link.judge()
    assert link.lost == ""
    link.heard -= 1.1
    link._awake = link.heard
    link.judge()
    assert link.lost == f"nothing heard for {SILENCE:g} s"
    end(links)


def test_a_node_that_hears_nothing_kills_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "LEASE", 1.0)
    told, says = os.pipe(), os.pipe()
    job = {"argv": [sys.executable, "-c", SLEEPS], "env": {}, "each": [{}], "left": []}
    os.write(told[1], json.dumps({"do": "start", "job": job}).encode() + b"\n")
    begun = time.monotonic()
    assert node.Supervisor(told[0], says[1]).run() == 1
    assert 1.0 <= time.monotonic() - begun < 6.0  # less than the usual lease, on a busy machine too
    lines = os.read(says[0], 1 << 20).decode().splitlines()
    words = [json.loads(line.removeprefix(MARK)) for line in lines if line]
    for end_of_a_pipe in (*told, *says):
        os.close(end_of_a_pipe)
    assert words[-1]["problem"] == "nothing heard of the head for 1 s"
    (rank,) = next(word["ranks"] for word in words if word.get("ranks"))
    assert born(rank["pid"]) is None


def test_what_is_left_is_ended_by_number_and_beginning() -> None:
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    begun = [born(sleeper.pid) or 0 for sleeper in sleepers]
    wrong = (sleepers[1].pid, begun[1] + 1)  # the number was given again
    assert processes.end_recorded([(sleepers[0].pid, begun[0]), wrong], 5.0) == []
    assert sleepers[0].wait(5) == -signal.SIGKILL
    assert sleepers[1].poll() is None
    sleepers[1].kill()
    sleepers[1].wait()


def test_a_process_is_left_until_its_last_thread_has_ended() -> None:
    """A killed rank has no first thread any more, and still holds its lock while a file server lets a write wait."""
    end_of_a_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    program = (
        "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start(); "
        f"ctypes.CDLL(None).syscall({end_of_a_thread}, 0)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        begun = born(process.pid)
        while ") Z" not in Path(f"/proc/{process.pid}/stat").read_text():
            time.sleep(0.01)
        assert born(process.pid) == begun
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert born(process.pid) is None


_SMI = {
    "whole": "printf 'GPU 0: NVIDIA H100 (UUID: a)\\nGPU 1: NVIDIA H100 (UUID: b)\\n'",
    "short": "echo 'GPU 0: NVIDIA H100 (UUID: a)'",
    "fallen": "echo 'Unable to determine the device handle for GPU0000:C3:00.0: Unknown Error'; exit 255",
    "stuck": "exec sleep 60",
}
"""Stand-ins for nvidia-smi, by host."""


def test_a_job_that_is_started_again_does_without_hosts_that_have_lost_gpus(
    environment: dict[str, str], output: Output, tmp_path: Path
) -> None:
    """They answer, and their ranks would end the job at the same step again, spare hosts or not."""
    links = []
    for name, words in _SMI.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "nvidia-smi").write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / name / "nvidia-smi").chmod(0o755)
        links += connected({**environment, "PATH": f"{tmp_path / name}:{environment['PATH']}"}, output, name)
    lines = {Host(link.host, 2): link for link in links}
    job = load_job("capt_tiny", [f"run.dir={tmp_path / 'run'}"])
    launch = Launch("capt.pretrain", ("job.yaml",), job, Options(), again=True)
    plan = Plan("ssh", tuple(lines), (), master_port=29500)
    try:
        found = on_hosts._meet(launch, plan, list(lines), lines)
        assert {host.name: why for host, why in found.items()} == {
            "short": "1 GPU for 2 ranks",
            "fallen": "nvidia-smi: Unable to determine the device handle for GPU0000:C3:00.0: Unknown Error",
        }
        without = [host for host in lines if host.name in ("short", "fallen")]
        assert on_hosts._without_gpus(without, lines) == {}, "a job on processors"
    finally:
        end(links)
