"""The deepspeed backend through the real ``deepspeed`` and ``pdsh``, with a stand-in for ssh that runs a shell here."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capt.launcher.backends import deepspeed
from capt.launcher.environment import forwarded_env, inherited
from capt.launcher.plan import Launch, Options
from capt.launcher.ssh import Host
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job
from tests.support import free_port
from tests.unit.base.test_sensitive import NAMES

ROOT = Path(__file__).parents[3]
SSH = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/ssh.log"
while :; do case "$1" in -o) shift 2;; -*) shift;; *) break;; esac; done
shift
exec sh -c "$*"
"""
# A job that needs no torch: it says what reached it, and how it ended as the real one does.
JOB = """
import json, os, pathlib, signal, sys, time
rank = os.environ["RANK"]
pathlib.Path(f"rank-{rank}.json").write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
def end(state, code):
    if rank == "0":
        pathlib.Path("run/status.json").write_text(json.dumps({"state": state, "exit_code": code}))
    os._exit(code)
signal.signal(signal.SIGUSR1, lambda *_: end("stopped", 75))
signal.signal(signal.SIGTERM, lambda *_: end("stopped", 75))
if "wait=1" in sys.argv:
    pathlib.Path(f"ready-{rank}").touch()
    time.sleep(60)
end("done", 0)
"""
DRIVER = """
import sys
from pathlib import Path
from capt.launcher.backends import deepspeed
from capt.launcher.plan import Launch, Options
from capt.pretrain.base.files import write_text
from capt.pretrain.config.load import load_job
launch = Launch("echo_job", tuple(sys.argv[2:]), load_job("capt_tiny", ["run.dir=run"]),
                Options(hostfile=Path("hosts"), master_port=int(sys.argv[1])))
plan = deepspeed.plan(launch)
for path, text in plan.files.items():
    write_text(path, text, private=True)
sys.exit(deepspeed.start(launch, plan).code)
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in forwarded_env(inherited()):  # what the one who runs the tests has set travels, too
        monkeypatch.delenv(name)
    (tmp_path / "hosts").write_text("node-1 slots=1\nnode-2 slots=2\n")
    job = load_job("capt_tiny", ["run.dir=run", "batch.micro=4", "batch.global=24"])
    return Launch("capt.pretrain", ("capt_tiny", "run.dir=run"), job, Options(hostfile=Path("hosts")))


def with_options(launch: Launch, **options: object) -> Launch:
    return Launch(launch.module, launch.arguments, launch.job, Options(**options))  # type: ignore[arg-type]


def test_the_plan_names_hosts_command_and_files(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/tmp/nccl.%h")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "canary")
    monkeypatch.setenv("PYTHONPATH", "/src")
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\n")
    plan = deepspeed.plan(launch)
    assert plan.world == 3
    (command,) = plan.commands
    assert command.argv[1:] == (
        *("--hostfile", str(tmp_path / "hosts"), "--master_addr", "node-1", "--master_port", "29500"),
        *("--force_multi", "--no_ssh_check", "--module", "capt.pretrain", "capt_tiny", "run.dir=run"),
    )
    ((path, text),) = plan.files.items()
    assert command.env["DS_ENV_FILE"] == str(path) == str(tmp_path / "run" / "launch.env")
    lines = ["NCCL_DEBUG_FILE=/tmp/nccl.%%h", "GLOO_SOCKET_IFNAME=eth0"]  # pdsh reads %h, unless doubled
    assert text.splitlines() == ["PYTHONPATH=/src", *lines]
    assert "canary" not in str(plan)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs --hostfile"),
        ({"hostfile": Path("hosts"), "nproc": 2}, "--nproc does not go with --hostfile"),
        ({"hostfile": Path("nowhere")}, "no hostfile nowhere"),
    ],
)
def test_contradictions_are_refused(launch: Launch, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        deepspeed.plan(with_options(launch, **options))


def test_a_working_folder_that_a_shell_would_split_is_refused(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    (tmp_path / "a b" / "hosts").write_text("node-1 slots=1\n")
    with pytest.raises(ConfigError, match="working folder"):
        deepspeed.plan(launch)


def test_arguments_with_control_characters_are_refused() -> None:
    with pytest.raises(ConfigError, match="control character"):
        deepspeed.remote_word("a=1\ntouch X")


def test_without_pdsh_it_can_only_be_shown(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install pdsh" in deepspeed.plan(launch).blocked_reason


def test_signals_go_to_the_ranks_of_this_job_only() -> None:
    command = deepspeed.signal_command((Host("a", 1), Host("b", 2)), 29501, signal.SIGUSR1)
    assert command[:6] == ["pdsh", "-S", "-f", "1024", "-w", "a,b"]
    assert "pkill -USR1 -P" in command[6]
    assert "--master_port=29501 " in command[6]


def user_environment(folder: Path, **extra: str) -> dict[str, str]:
    tools = folder / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(SSH)
    (tools / "ssh").chmod(0o755)
    (folder / "hosts").write_text("node-1 slots=1\nnode-2 slots=1\n")
    (folder / "echo_job.py").write_text(JOB)
    keep = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(folder), "PYTHONPATH": f"{ROOT}:{folder}"}
    return {**keep, **extra}


needs_pdsh = pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs the package pdsh")


@needs_pdsh
def test_every_argument_arrives_as_it_was_no_secret_travels_and_sigterm_ends_the_job(tmp_path: Path) -> None:
    words = [
        "wait=1",
        "data.files=[a.txt,b.txt]",
        "a=$(touch X)",
        "b=`touch X` $(touch X) \\",
        'c=it\'s "quoted" $HOME',
        "d='%h' %n 100%",
        "e=ä; touch X & #",
        "f={x: 1, y: '*'}",
        "",
    ]
    secrets = dict.fromkeys((*NAMES, "MLFLOW_TRACKING_PASSWORD", "PYTHONSTARTUP", "UCX_X_TOKEN"), "canary")
    env = user_environment(tmp_path, NCCL_DEBUG="INFO", **secrets)
    code, said = terminated(tmp_path, env, words, ["ready-0", "ready-1"])
    assert code == 75, said
    for rank in range(2):
        argv, environment = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert argv == ["--local_rank=0", *words]
        assert environment["WORLD_SIZE"] == "2"
        assert environment["NCCL_DEBUG"] == "INFO"
        assert environment["PYTHONPATH"] == env["PYTHONPATH"]  # DeepSpeed's own would begin with the working folder
    assert not (tmp_path / "X").exists()
    sent = (tmp_path / "bin" / "ssh.log").read_text()
    assert "canary" not in sent + said
    assert "BatchMode=yes" in sent


@needs_pdsh
def test_sigterm_ends_a_job_that_is_starting(tmp_path: Path) -> None:
    env = user_environment(tmp_path)
    (tmp_path / "hosts").write_text("node-1 slots=1\n")
    code, said = terminated(tmp_path, env, ["wait=1"], ["bin/ssh.log"])
    assert code in (1, 75), said  # a rank that has not come to install its handler dies of the signal


def terminated(folder: Path, env: dict[str, str], words: list[str], awaited: list[str]) -> tuple[int, str]:
    """Exit code and output of a job that is sent SIGTERM as soon as the awaited files are there."""
    argv, log = [sys.executable, "-c", DRIVER, str(free_port()), *words], folder / "log"
    with log.open("w") as out, subprocess.Popen(argv, cwd=folder, env=env, stdout=out, stderr=out) as process:
        try:
            deadline = time.monotonic() + 60
            while not all((folder / name).exists() for name in awaited) and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            return process.wait(timeout=60), log.read_text()
        finally:
            process.kill()
