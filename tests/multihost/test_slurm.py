"""A job under a real Slurm of two nodes: supervised in its allocation, stopped and queued again, a node lost."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from capt.launcher.allocation import Allocation
from capt.launcher.backends.slurm import SlurmCluster, render
from capt.launcher.plan import Launch, Options
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job
from tests.multihost.slurm import NODES, Cluster, missing, slurm_cluster
from tests.runs import step
from tests.small_job import ROOT, write_job
from tests.support import run_capt

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(240)]

STEPS, EVERY = 40, 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.fixture(scope="module")
def work(cluster: Cluster) -> Path:
    """The folder that both nodes share: a text, a job and a cluster file."""
    folder = write_job(
        cluster.folder / "work",
        schedule={"max_steps": STEPS, "warmup_steps": 2},
        checkpoint={"every": EVERY, "keep": 2},
        supervise={"stall": 3.0},
    )
    setup = [f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}"]
    (folder / "cluster.yaml").write_text(yaml.safe_dump({"nodes": 2, "ranks_per_node": 1, "setup": setup}))
    return folder


def submit(cluster: Cluster, work: Path, run: str, *more: str) -> int:
    """Queue a job; returns its number."""
    words = ["pretrain", "job.yaml", f"run.dir={run}", "--launcher", "slurm", "--cluster", "cluster.yaml"]
    env = {**os.environ, **cluster.env, "PYTHONPATH": str(ROOT)}
    done = run_capt(*words, "--master-addr", "127.0.0.1", *more, cwd=work, env=env)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def wait_until(true: Callable[[], object], seconds: float, log: Path) -> None:
    begun = time.monotonic()
    while not true():
        if time.monotonic() - begun > seconds:
            said = "".join(path.read_text(errors="replace")[-6000:] for path in log.glob("slurm-*.log"))
            raise AssertionError(f"not within {seconds:g} s; the job said:\n{said}")
        time.sleep(0.25)  # each look starts a command of Slurm


def ranks(run: Path) -> dict[str, int]:
    """The ranks of a run: node -> process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, env = ((path / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ"))
        except OSError:
            continue
        words = command.split("\0")
        name = re.search(r"SLURMD_NODENAME=(\w+)", env)
        started_by_node = f"SLURM_JOB_NAME=capt-{run.name}\0" in env and "-m" in words and "capt.pretrain" in words
        if name and started_by_node and "capt.launcher.batch" not in words:
            found.setdefault(name[1], int(path.name))
    return found


def check_ledger(run: Path) -> None:
    checked = run_capt("ledger", "check", str(run), cwd=run.parent, env=os.environ)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_a_rank_is_killed_and_the_time_limit_comes(cluster: Cluster, work: Path) -> None:
    """The job starts again in its allocation; stopped by Slurm's signal it saves, is queued again, and is completed."""
    run, log = work / "first", work / "first" / "log"
    job = submit(cluster, work, "first")
    wait_until(lambda: step(run) > EVERY, 100, log)
    assert set(ranks(run)) == set(NODES)
    os.kill(ranks(run)["n2"], signal.SIGKILL)
    wait_until(lambda: list((run / "crashes").glob("*.json")), 20, log)
    crash = json.loads(next((run / "crashes").glob("*.json")).read_text())
    assert (crash["host"], crash["rank"], crash["signal"]) == ("n2", 1, "SIGKILL")
    killed_at = step(run)
    wait_until(lambda: step(run) > killed_at, 100, log)
    cluster.run("scancel", "--signal=USR1", str(job))  # what --signal=USR1@120 does, two minutes before the limit
    wait_until(lambda: cluster.requeued(job) == 1, 40, log)
    assert json.loads((run / "status.json").read_text())["exit_code"] == 75
    assert not ranks(run)
    time.sleep(2)  # slurmd takes what is started in the second in which the job was ended for a part of it
    wait_until(lambda: cluster.begins_again(job), 40, log)
    wait_until(lambda: cluster.state(job) == "COMPLETED", 90, log)
    assert step(run) == STEPS
    check_ledger(run)


def test_a_cancelled_job_saves_and_stays_away(cluster: Cluster, work: Path) -> None:
    run, log = work / "third", work / "third" / "log"
    job = submit(cluster, work, "third", "schedule.max_steps=100000")
    wait_until(lambda: step(run) > 2, 100, log)
    cluster.run("scancel", str(job))
    wait_until(lambda: cluster.state(job) == "CANCELLED", 60, log)
    assert cluster.requeued(job) == 0
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert (run / "checkpoints" / f"step-{status['step']:08d}" / "manifest.json").is_file()


def test_a_task_of_an_array_queues_itself_again_and_no_other(cluster: Cluster, work: Path) -> None:
    """The last task to start has the number of the array, by which Slurm means all of its tasks."""
    settings = {"nodes": 1, "array": "1-2", "array_key": "run.seed", "setup": [f"export PYTHONPATH={ROOT}"]}
    job_file = load_job(str(work / "job.yaml"), [f"run.dir={work / 'array'}"])
    launch = Launch("capt.pretrain", ("job.yaml",), job_file, Options(launcher="slurm"))
    script = render(launch, SlurmCluster.model_validate(settings))
    # In the place of the job: the first task continues, the second one stops at its time limit.
    begins = f'touch "{work}/begun$SLURM_ARRAY_TASK_ID"'
    stops = f'{begins}; if [ "$SLURM_ARRAY_TASK_ID" = 2 ]; then exit 75; else sleep 100; fi'
    script, replaced = re.subn(r"^\S+ -m capt\.launcher\.batch .*$", f"( {stops} )", script, flags=re.MULTILINE)
    assert replaced == 1
    (work / "array.sbatch").write_text(script)
    for task in "12":
        (work / "array" / task).mkdir(parents=True)
    (work / "array" / "log").mkdir()
    job = int(cluster.run("sbatch", "--parsable", "--chdir", str(work), str(work / "array.sbatch")))
    wait_until(lambda: (work / "begun1").exists() and (work / "begun2").exists(), 30, work / "array" / "log")
    facts = cluster.run("scontrol", "show", "job", f"{job}_2", "--oneliner")
    assert f"JobId={job} ArrayJobId={job} ArrayTaskId=2 " in facts
    wait_until(lambda: cluster.requeued(f"{job}_2") == 1, 60, work / "array" / "log")
    assert (cluster.requeued(f"{job}_1"), cluster.state(f"{job}_1")) == (0, "RUNNING")
    cluster.run("scancel", str(job))


def test_an_allocation_is_read_as_slurm_describes_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--ntasks`` alone, tasks by node, none; in the allocation, in a step of a part, and in one that says all."""
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    step = "srun --overlap --nodes=1 --ntasks=1 --quiet"
    found: dict[tuple[str, str], object] = {}
    for options in ("-n4", "--ntasks-per-node=2", ""):
        line = f"env -0; echo; {step} env -0; echo; {step} --preserve-env env -0"
        said = cluster.run("salloc", "--quiet", "-N2", *options.split(), "bash", "-c", line)
        for where, lines in zip(("allocation", "step", "whole"), said.split("\0\n"), strict=True):
            variables = dict(each.split("=", 1) for each in lines.strip("\0").split("\0"))
            try:
                found[options, where] = [(host.name, host.slots) for host in Allocation(variables).hosts()]
            except ConfigError as error:
                found[options, where] = str(error)
    four, two = [("n1", 2), ("n2", 2)], [("n1", 1), ("n2", 1)]
    refused = (
        "SLURM_TASKS_PER_NODE=1: a job step of 1 node, in an allocation of 2 nodes (n[1-2]); leave the step, or start "
        "it by srun --preserve-env"
    )
    assert found == {
        ("-n4", "allocation"): four, ("-n4", "step"): refused, ("-n4", "whole"): four,
        ("--ntasks-per-node=2", "allocation"): four, ("--ntasks-per-node=2", "step"): four,
        ("--ntasks-per-node=2", "whole"): four,
        ("", "allocation"): two, ("", "step"): refused, ("", "whole"): two,
    }  # fmt: skip


_STEPS = """
import subprocess, sys
from capt.launcher.allocation import Allocation
from capt.launcher.backends.slurm import SlurmCluster
from capt.launcher.backends.srun import srun_command
here = Allocation.here()
for host in here.hosts():
    words = srun_command(host, here, SlurmCluster())
    shows = ["bash", "-c", "echo $SLURMD_NODENAME $SLURM_GPUS_ON_NODE"]
    subprocess.run([*words[: words.index(sys.executable)], *shows], env=here.step_environment(), check=True)
"""


def test_the_supervisor_of_a_node_has_the_gpus_of_its_tasks(cluster: Cluster) -> None:
    """However they were asked for: srun would count those of a total, or by task, for the supervisor's one task."""
    ways = ("--gpus=4", "--gpus-per-task=1", "--gpus-per-node=2", "--gres=gpu:2")
    for options in [*((way, "-n4", "--ntasks-per-node=2") for way in ways), ("--gpus=4", "--ntasks-per-gpu=1")]:
        said = cluster.run("salloc", "--quiet", "-N2", *options, sys.executable, "-c", _STEPS)
        assert said.splitlines() == ["n1 2", "n2 2"], options


@pytest.mark.slow
def test_a_node_is_lost(cluster: Cluster, work: Path) -> None:
    """With shrink the allocation survives, and the job continues with the node that is left."""
    run, log = work / "second", work / "second" / "log"
    job = submit(cluster, work, "second", "supervise.on_lost_node=shrink")
    wait_until(lambda: step(run) > EVERY, 100, log)
    cluster.lose("n2", ranks(run)["n2"])
    wait_until(lambda: list((run / "crashes").glob("*.json")), 30, log)
    wait_until(lambda: set(ranks(run)) == {"n1"}, 90, log)
    wait_until(lambda: cluster.state(job) == "COMPLETED", 90, log)
    assert cluster.requeued(job) == 0
    assert step(run) == STEPS
    check_ledger(run)
