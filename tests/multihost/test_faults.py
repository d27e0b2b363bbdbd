"""Faults of a job on several hosts: it comes back by itself, and nothing is left over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.multihost.network import ADDRESSES, INTERFACE, SPARE, Hosts, missing, several_hosts

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(360)]

ROOT = Path(__file__).parents[2]
CAPT = (sys.executable, "-m", "launcher.cli")
STEPS = 100
LINE = "the cat sat on a mat while the old dog ran over green hills and far away birds sang"
FIRST, OTHER = ADDRESSES
NODE = r"^\S+ -E -u -c import sys"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := missing():
        pytest.skip(reason)
    with several_hosts(tmp_path_factory.mktemp("hosts"), (*ADDRESSES, SPARE)) as all_of_them:
        yield all_of_them


@pytest.fixture(scope="module")
def work(hosts: Hosts) -> Path:
    """The folder that all hosts share: a text and a job."""
    folder = hosts.folder / "work"
    folder.mkdir()
    words = LINE.split()
    lines = [" ".join(words[(i * j) % len(words)] for j in range(1, 8 + i % 9)) for i in range(1, 400)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    job = {
        "base": "capt_tiny",
        "run": {"log_every": 1, "threads": 1, "tensorboard": False},
        "data": {"files": ["text.txt"], "sequence_length": 32, "cache": str(folder / "cache"), "workers": 1},
        "tokenizer": {"vocab_size": 370},
        "model": {"layers": 1, "hidden": 32, "heads": 2, "ffn": 64},
        "batch": {"global": 8, "micro": 2},
        "schedule": {"max_steps": STEPS, "warmup_steps": 2},
        "contrast": {"queue": 37},
        "validate": {"every": 0, "samples": 8},
        "checkpoint": {"every": 10, "keep": 2},
        "supervise": {"stall": 3.0},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    (folder / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={INTERFACE}\n")
    return folder


@contextmanager
def running(hosts: Hosts, work: Path, run: str, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command on the first host. Afterwards no process, shared memory or temporary file is left on any."""
    log = work / f"{run}.log"
    process = hosts.popen([*CAPT, *argv], cwd=work, log=log, PYTHONPATH=str(ROOT))
    try:
        yield process
    except BaseException:
        sys.stderr.write(log.read_text(errors="replace")[-8000:])
        raise
    finally:
        process.kill()
        process.wait()
    until = time.monotonic() + 15
    while hosts.left() and time.monotonic() < until:
        time.sleep(0.1)
    assert hosts.left() == {}


def wait_until(true: Callable[[], object], seconds: float) -> float:
    """Seconds until it was true."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds, f"not within {seconds:g} s"
        time.sleep(0.05)
    return time.monotonic() - begun


def pretrain(run: str, *more: str) -> list[str]:
    return ["pretrain", "job.yaml", f"run.dir={run}", "--no-preflight", *more]


def losses(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last one may be half written
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def step(run: Path) -> int:
    return max(losses(run), default=0)


def crashes(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run / "crashes").glob("*.json"))]


def processes(hosts: Hosts, host: int, pattern: str) -> list[int]:
    found = [(pid, Path(f"/proc/{pid}/cmdline")) for pid in hosts.pids(host)]
    return [pid for pid, path in found if path.exists() and re.search(pattern, path.read_text().replace("\0", " "))]


def rank_of(hosts: Hosts, host: int) -> int:
    """The process of a host's rank: a child of the supervisor there."""
    (node,) = processes(hosts, host, NODE)
    ranks = set(processes(hosts, host, " -m pretrain "))
    (rank,) = [pid for pid in ranks if f"\nPPid:\t{node}\n" in Path(f"/proc/{pid}/status").read_text()]
    return rank


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)


def test_every_fault_of_a_node_costs_the_steps_since_the_last_checkpoint(hosts: Hosts, work: Path) -> None:
    listed = ["--hostfile", str(hosts.hostfile()), "--nodes", "2"]
    with running(hosts, work, "calm", *pretrain("calm", *listed)) as process:
        start = wait_until(lambda: step(work / "calm") > 0, 100)
        assert process.wait(timeout=100) == 0
    undisturbed = losses(work / "calm")
    assert sorted(undisturbed) == list(range(1, STEPS + 1))

    run, back = work / "faults", {}
    more = ["supervise.restarts=4", "supervise.on_lost_node=spare", *listed]

    def strike(fault: Callable[[], object], host: int = 1) -> float:
        """Seconds from a fault to the end of all ranks of before; waits until another checkpoint is there."""
        pids = [rank_of(hosts, host) for host in (0, 1)]
        at = step(run)
        fault()
        ended = wait_until(lambda: gone(pids), 40)
        back[fault] = ended + wait_until(lambda: step(run) > at, 120)
        wait_until(lambda: step(run) >= at + 11, 60)
        return ended

    with running(hosts, work, "faults", *pretrain("faults", *more)) as process:
        wait_until(lambda: step(run) >= 12, 60)
        kill_a_rank = lambda: os.kill(rank_of(hosts, 1), signal.SIGKILL)  # noqa: E731
        stop_a_rank = lambda: os.kill(rank_of(hosts, 1), signal.SIGSTOP)  # noqa: E731
        kill_the_node = lambda: os.kill(processes(hosts, 1, NODE)[0], signal.SIGKILL)  # noqa: E731
        cut_it_off = lambda: hosts.link(1, "down")  # noqa: E731
        try:
            seconds = [strike(fault) for fault in (kill_a_rank, stop_a_rank, kill_the_node, cut_it_off)]
            assert process.wait(timeout=60) == 0
        finally:
            hosts.link(1, "up")
    sys.stderr.write(f"ranks gone after {seconds}, next new step after {list(back.values())}\n")
    assert losses(run) == undisturbed
    killed, stopped, node, cut = crashes(run)
    assert (killed["host"], killed["rank"], killed["signal"]) == (OTHER, 1, "SIGKILL")
    assert f"rank 1 on {OTHER} was killed by SIGKILL" in killed["cause"]
    assert (stopped["host"], stopped["rank"]) == (OTHER, 1)
    assert "it is suspended" in stopped["cause"]
    assert node["host"] == cut["host"] == OTHER
    assert f"{OTHER} is lost: nothing heard for" in cut["cause"]
    assert all(crash["step"] >= 12 for crash in (killed, stopped, node, cut))
    assert f"{SPARE} takes the place of {OTHER}" in (work / "faults.log").read_text()
    assert max(back.values()) < max(45, 6 * start)  # 45 is promised; a busy machine takes longer for every start
    check_ledger(hosts, work, "faults")


def test_a_killed_head_leaves_no_rank_and_a_lost_host_is_done_without(hosts: Hosts, work: Path) -> None:
    run = work / "head"
    more = [
        "supervise.on_lost_node=shrink",
        "schedule.max_steps=60",
        "--hostfile",
        str(hosts.hostfile()),
        "--nodes",
        "2",
    ]
    with running(hosts, work, "head", *pretrain("head", *more)) as process:
        wait_until(lambda: step(run) >= 12, 60)
        pids = [rank_of(hosts, host) for host in (0, 1)]
        process.kill()
        seconds = wait_until(lambda: gone(pids), 15)  # what is promised
        sys.stderr.write(f"head killed: ranks gone after {seconds:.1f} s\n")
    with running(hosts, work, "head-again", "resume", "head", "--no-preflight") as process:
        before = step(run)
        wait_until(lambda: step(run) > before, 60)
        pids = [rank_of(hosts, host) for host in (0, 1)]
        hosts.link(1, "down")
        try:
            wait_until(lambda: gone(pids), 20)  # also those on the host that hears of nobody
            assert process.wait(timeout=60) == 0
        finally:
            hosts.link(1, "up")
    assert sorted(losses(run)) == list(range(1, 61))
    assert f"the job goes on with 1 ranks on {FIRST}" in (work / "head-again.log").read_text()
    check_ledger(hosts, work, "head")


def check_ledger(hosts: Hosts, work: Path, run: str) -> None:
    log = work / "ledger.log"
    checked = hosts.popen([*CAPT, "ledger", "check", run], cwd=work, log=log, PYTHONPATH=str(ROOT))
    assert checked.wait(timeout=60) == 0, log.read_text()
