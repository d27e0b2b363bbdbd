"""The plan of a job in a Slurm allocation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from capt.launcher.allocation import Allocation
from capt.launcher.backends import slurm, srun
from capt.launcher.backends.slurm import SlurmCluster, load_cluster
from capt.launcher.plan import End, Launch, Options, Plan
from capt.launcher.ssh import Host
from capt.launcher.supervisor.link import Link
from capt.launcher.supervisor.output import Output
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes of eight tasks; stand-ins for Slurm's commands."""
    for name, body in (("srun", "exit 1"), ("scontrol", 'printf "n1\\nn2\\nn3\\n"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, value in (("JOB_ID", "123456"), ("JOB_NODELIST", "n[1-3]"), ("NTASKS_PER_NODE", "8")):
        monkeypatch.setenv(f"SLURM_{name}", value)


def launch(folder: Path, *overrides: str, launcher: str = "srun", **options: object) -> Launch:
    job = load_job("capt_tiny", [f"run.dir={folder / 'run'}", *overrides])
    return Launch("capt.pretrain", ("job.yaml",), job, Options(launcher=launcher, **options))  # type: ignore[arg-type]


def test_the_allocation_says_where_ranks_run(allocation: None, tmp_path: Path) -> None:
    plan = srun.plan(launch(tmp_path))
    assert plan.hosts == tuple(Host(name, 8) for name in ("n1", "n2", "n3"))
    assert (plan.world, plan.master_port, plan.blocked_reason) == (24, 23456, "")
    assert plan.commands[9].host == "n2"
    assert plan.commands[9].env["RANK"] == "9"
    assert plan.commands[9].env["LOCAL_RANK"] == "1"
    assert plan.commands[9].env["MASTER_ADDR"] == "n1"


def test_nodes_beyond_those_asked_for_are_spares(allocation: None, tmp_path: Path) -> None:
    plan = srun.plan(launch(tmp_path, "supervise.on_lost_node=spare", nodes=2))
    assert [host.name for host in plan.hosts] == ["n1", "n2"]
    assert [host.name for host in plan.spares] == ["n3"]
    with pytest.raises(ConfigError, match="--nodes 2 keeps the last one as a spare"):
        srun.plan(launch(tmp_path, "supervise.on_lost_node=spare"))
    with pytest.raises(ConfigError, match="only 3 nodes"):
        srun.plan(launch(tmp_path, nodes=4))


def test_outside_an_allocation_it_cannot_be_started(
    allocation: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    assert "after salloc" in srun.plan(launch(tmp_path)).blocked_reason


def test_a_step_has_all_cores_that_the_job_has_on_a_node() -> None:
    command = srun.srun_command(Host("n2", 8), Allocation({"SLURM_CPUS_PER_TASK": "12"}), SlurmCluster())
    assert command[0] == "srun"
    assert {"--nodelist=n2", "--ntasks=1", "--overlap", "--cpus-per-task=96"} <= set(command)
    assert command[command.index("-c") - 3] == sys.executable
    assert not any("cpus-per-task" in word for word in srun.srun_command(Host("n2", 8), Allocation({}), SlurmCluster()))


def test_ranks_and_their_supervisors_run_in_the_container(allocation: None, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("container: [apptainer, exec, --nv, my image.sif]\nsrun: [--mpi=none]\npython: /opt/python\n")
    plan = srun.plan(launch(tmp_path, cluster=path))
    assert {command.argv[0] for command in plan.commands} == {"/opt/python"}
    words = srun.srun_command(Host("n2", 8), Allocation({}), load_cluster(path))
    at = words.index("apptainer")
    assert words[at - 1 : at + 5] == ["--mpi=none", "apptainer", "exec", "--nv", "my image.sif", "/opt/python"]
    assert words[at + 5 :] == srun.srun_command(Host("n2", 8), Allocation({}), SlurmCluster())[-4:]


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        ("srun: [--mpi=none]", 30.0),
        ("container: [apptainer, exec, capt.sif]", 600.0),
        ('srun: ["--container-image=/images/capt.sqsh"]', 600.0),
    ],
)
def test_a_node_that_unpacks_an_image_has_longer_to_answer(
    allocation: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, seconds: float
) -> None:
    (tmp_path / "cluster.yaml").write_text(f"{lines}\n")
    waits: list[float] = []

    def run(launch: Launch, plan: Plan, connect: Callable[..., Link], *_: object) -> End:
        output = Output()
        link = connect(Host("n2", 8), output)
        waits.append(link._answer)
        link.close()
        output.close(1.0)
        return End(0)

    monkeypatch.setattr(srun.on_hosts, "run", run)
    started = launch(tmp_path, cluster=tmp_path / "cluster.yaml")
    srun.start(started, srun.plan(started))
    assert waits == [seconds]


def test_an_allocation_outlives_a_lost_node_only_where_the_job_does(tmp_path: Path) -> None:
    def script(*overrides: str, **options: object) -> str:
        (text,) = slurm.plan(launch(tmp_path, *overrides, launcher="slurm", **options)).files.values()
        return text

    assert "--no-kill" not in script()
    assert "#SBATCH --no-kill\n" in script("supervise.on_lost_node=shrink")
    assert "#SBATCH --nodes=2\n" in script("supervise.on_lost_node=spare", nodes=1)
    with pytest.raises(ConfigError, match="no host of the cluster file is left over"):
        script("supervise.on_lost_node=spare")
