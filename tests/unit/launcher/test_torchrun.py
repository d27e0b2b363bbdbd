import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capt.launcher.backends import torchrun
from capt.launcher.plan import Launch, Options
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job
from tests.support import free_port

ROOT = Path(__file__).parents[3]
# A job that says in status.json how it ended, as the real one does, and exits with a code that torchrun turns into 1.
JOB = """
import json, os, pathlib, signal, time
def end(*_):
    if os.environ["RANK"] == "0":
        pathlib.Path("run/status.json").write_text(json.dumps({"state": "stopped", "exit_code": 75}))
    os._exit(75)
signal.signal(signal.SIGUSR1, end)
pathlib.Path("ready-" + os.environ["RANK"]).touch()
time.sleep(60)
"""
DRIVER = """
import sys
from pathlib import Path
from capt.launcher.backends import torchrun
from capt.launcher.plan import Launch, Options
from capt.pretrain.config.load import load_job
launch = Launch("slow_job", (), load_job("capt_tiny", ["run.dir=run"]), Options(nproc=2, master_port=int(sys.argv[1])))
Path("run").mkdir()
sys.exit(torchrun.start(launch, torchrun.plan(launch)).code)
"""


def launch(**options: object) -> Launch:
    return Launch("capt.pretrain", ("capt_tiny", "a.b=c d"), load_job("capt_tiny"), Options(**options))  # type: ignore[arg-type]


def test_one_host() -> None:
    plan = torchrun.plan(launch(nproc=4))
    (command,) = plan.commands
    assert (plan.world, plan.blocked_reason) == (4, "")
    text = str(command)
    assert "--nnodes 1 --node-rank 0 --nproc-per-node 4 --master-addr 127.0.0.1 --master-port 29500" in text
    assert text.endswith("-m capt.pretrain capt_tiny 'a.b=c d'")


def test_several_hosts_are_shown_but_not_started(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=2\n")
    plan = torchrun.plan(launch(hostfile=hosts, master_port=1234))
    assert plan.world == 4
    assert [command.host for command in plan.commands] == ["a", "b"]
    for rank, command in enumerate(plan.commands):
        assert f"--nnodes 2 --node-rank {rank} --nproc-per-node 2 --master-addr a --master-port 1234" in str(command)
    assert "its own host only" in plan.blocked_reason


def test_what_torchrun_cannot_do_is_refused(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=3\n")
    with pytest.raises(ConfigError, match="same slots"):
        torchrun.plan(launch(hostfile=hosts))
    with pytest.raises(ConfigError, match="--nproc does not go"):
        torchrun.plan(launch(hostfile=hosts, nproc=2))


def test_sigusr1_reaches_the_ranks_and_the_code_of_the_job_comes_back(tmp_path: Path) -> None:
    (tmp_path / "slow_job.py").write_text(JOB)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(free_port())], cwd=tmp_path, env=env) as process:
        try:
            deadline = time.monotonic() + 60
            while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            process.send_signal(signal.SIGUSR1)
            assert process.wait(timeout=60) == 75
        finally:
            process.kill()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "stopped"
