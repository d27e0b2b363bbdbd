"""Environments as Slurm's manuals and a Slurm of two nodes show them, and what is read from each."""

from __future__ import annotations

import logging
import random
import subprocess
from pathlib import Path

import pytest

from capt.launcher.allocation import OWN_ID, Allocation
from capt.launcher.ssh import Host
from capt.pretrain.base.errors import ConfigError, MachineError


@pytest.fixture(autouse=True)
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of ``n[1-N]``, as ``scontrol show hostnames`` prints them."""
    body = 'range="${3#n[}"; range="${range%]}"; range="${range#n}"\nfor i in $(seq ${range/-/ }); do echo "n$i"; done'
    (tmp_path / "scontrol").write_text(f'#!/bin/bash\n[ "$1 $2" = "show hostnames" ] || exit 1\n{body}\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def allocation(text: str) -> Allocation:
    words = (word.split("=", 1) for word in text.split())
    return Allocation({f"SLURM_{name}": value for name, value in words})


TWO = "JOB_ID=77 JOB_NODELIST=n[1-2] JOB_NUM_NODES=2 NNODES=2"
IN_STEP = "STEP_ID=0 PROCID=0"


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        # salloc -N 2 ...
        (f"{TWO} TASKS_PER_NODE=96(x2)", [1, 1]),  # without tasks these are processors
        (f"{TWO} TASKS_PER_NODE=96,48", [1, 1]),
        (f"{TWO} TASKS_PER_NODE=96(x2) GPUS_ON_NODE=4", [4, 4]),
        (f"{TWO} NTASKS=16 NPROCS=16 TASKS_PER_NODE=8(x2)", [8, 8]),  # -n 16
        (f"{TWO} NTASKS=16 NPROCS=16", [8, 8]),
        (f"{TWO} NTASKS=16 TASKS_PER_NODE=8(x2) GPUS_PER_TASK=1", [8, 8]),
        (f"{TWO} NTASKS=16 TASKS_PER_NODE=8(x2) GPUS=16 GPUS_ON_NODE=8", [8, 8]),
        (f"{TWO} NTASKS_PER_NODE=8 TASKS_PER_NODE=8(x2)", [8, 8]),
        (f"{TWO} NTASKS_PER_NODE=8", [8, 8]),
        (f"{TWO} NTASKS=12 NTASKS_PER_NODE=8 TASKS_PER_NODE=6(x2)", [6, 6]),  # with -n, a maximum
        (f"{TWO} NTASKS=2 TASKS_PER_NODE=1(x2)", [1, 1]),
        (f"{TWO} NTASKS=2 TASKS_PER_NODE=1(x2) GPUS_ON_NODE=8", [8, 8]),
        (f"{TWO} NTASKS=2 NTASKS_PER_NODE=1 TASKS_PER_NODE=1(x2) GPUS_ON_NODE=8", [1, 1]),
        ("JOB_ID=7 JOB_NODELIST=n[1-5] NTASKS=20 TASKS_PER_NODE=4(x2),4,4(x2)", [4] * 5),
        ("JOBID=7 NODELIST=n1 NTASKS=3 TASKS_PER_NODE=3", [3]),  # the older names
        (f"{TWO} HET_SIZE=1 NTASKS=4 TASKS_PER_NODE=2(x2)", [2, 2]),
        # a shell that salloc starts as an interactive step, and one of srun --preserve-env: the job's own numbers
        (f"{TWO} NTASKS=16 TASKS_PER_NODE=8(x2) STEP_ID=4294967290 STEP_NODELIST=n1 STEP_NUM_NODES=1 "
         "STEP_NUM_TASKS=1 STEP_TASKS_PER_NODE=1 PROCID=0", [8, 8]),
        (f"{TWO} NTASKS=16 TASKS_PER_NODE=8(x2) {IN_STEP} STEP_NODELIST=n1 STEP_TASKS_PER_NODE=1", [8, 8]),
        # srun --pty bash: of the whole allocation; and one task where the job was asked for eight a node
        (f"{TWO} NTASKS=16 TASKS_PER_NODE=8(x2) {IN_STEP} STEP_NODELIST=n[1-2] STEP_TASKS_PER_NODE=8(x2)", [8, 8]),
        (f"{TWO} NTASKS=16 {IN_STEP} STEP_TASKS_PER_NODE=8(x2)", [8, 8]),
        ("JOB_ID=8 JOB_NODELIST=n1 NTASKS=1 TASKS_PER_NODE=1 PROCID=0 STEP_ID=0 STEP_NODELIST=n1 "
         "STEP_TASKS_PER_NODE=1 GPUS_ON_NODE=8", [8]),
        (f"{TWO} NNODES=1 NTASKS=1 NTASKS_PER_NODE=8 TASKS_PER_NODE=1 {IN_STEP} STEP_NODELIST=n1 "
         "STEP_NUM_NODES=1 STEP_TASKS_PER_NODE=1", [8, 8]),
    ],
)  # fmt: skip
def test_the_ranks_of_each_node(variables: str, ranks: list[int]) -> None:
    hosts = allocation(variables).hosts()
    assert hosts == tuple(Host(f"n{number}", count) for number, count in enumerate(ranks, start=1))


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (f"{TWO} NTASKS=12 TASKS_PER_NODE=4,8", "n1 has 4 tasks, n2 has 8: every node runs the same number of ranks"),
        ("JOB_NODELIST=n[1-4] NTASKS=7 TASKS_PER_NODE=2(x3),1", "n1 has 2 tasks, n4 has 1: .*--ntasks-per-node=N"),
        (f"{TWO} NTASKS=16 TASKS_PER_NODE=15,1", "TASKS_PER_NODE=15,1: n1 has 15 tasks, n2 has 1"),
        (f"{TWO} NTASKS=5", "NTASKS=5: not the same number for each of 2 nodes"),
        (f"{TWO} HET_SIZE=2", "SLURM_HET_SIZE=2: the parts of a heterogeneous job"),
        ("JOB_ID=7 HET_SIZE=3 JOB_NODELIST_HET_GROUP_0=n1", "SLURM_HET_SIZE=3"),
        (f"{TWO} NTASKS=16 TASKS_PER_NODE=8(x2) STEP_ID=0 PROCID=3", "SLURM_PROCID=3: srun has started several"),
        (f"{TWO} NNODES=1 NTASKS=1 TASKS_PER_NODE=1 {IN_STEP} STEP_NODELIST=n1 STEP_TASKS_PER_NODE=1",
         "TASKS_PER_NODE=1: a job step of 1 node, in an allocation of 2 nodes .n.1-2.*--preserve-env"),
        ("JOB_NODELIST=n[1-4] NTASKS=16 TASKS_PER_NODE=8(x2)", "TASKS_PER_NODE=8.x2.*allocation of 4 nodes"),
        (f"{TWO} NTASKS=16 TASKS_PER_NODE=8(x2) GPUS_ON_NODE=4", "8 tasks and 4 GPUs of a node.*--ntasks-per-node=4"),
        (f"{TWO} NTASKS=6000 TASKS_PER_NODE=3000(x2)", "3000 tasks a node: 1 to 512 ranks"),
        ("JOB_ID=7 NTASKS=2", "SLURM_JOB_NODELIST is not set in job 7"),
        ("JOB_ID=7 JOB_NODELIST=x NTASKS=2", "scontrol show hostnames x: "),
        *[(f"{TWO} NTASKS={text}", f"SLURM_NTASKS='{text}'") for text in ("x", "-1", "1.5", "٣", "99999999999")],
        *[(f"{TWO} NTASKS=9 TASKS_PER_NODE={text}", "not of the form 8.x2.")
          for text in ("x", "8(x", "8x2", "8(x2),", ",8", "-1", "8(x999999)", "8(x2)(x2)", "٣")],
    ],
)  # fmt: skip
def test_what_cannot_be_one_job_is_refused_by_name(variables: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        allocation(variables).hosts()


def test_a_scontrol_that_fails_or_is_not_there_is_a_machines(tmp_path: Path) -> None:
    """A job that is queued again, onto a node in disorder, is not refused for good."""
    for body in ("exit 1", None):
        (tmp_path / "scontrol").write_text(f"#!/bin/bash\n{body}\n") if body else (tmp_path / "scontrol").unlink()
        with pytest.raises(MachineError, match="scontrol"):
            allocation(f"{TWO} NTASKS=2").hosts()


def test_gpus_that_stay_idle_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    allocation(f"{TWO} NTASKS_PER_NODE=1 GPUS_ON_NODE=8").hosts()
    assert "7 GPUs of 8 on each node stay idle: --ntasks-per-node=8" in caplog.text


def test_counts_are_read_as_slurm_writes_them() -> None:
    """Random layouts, written by the rule of the manual of sbatch; only equal ones are ranks."""
    draw = random.Random(5)
    for _ in range(60):
        nodes = draw.randint(1, 9)
        counts = [draw.randint(1, 3)] * nodes if draw.random() < 0.6 else [draw.randint(1, 2) for _ in range(nodes)]
        runs: list[list[int]] = []
        for count in counts:
            if runs and runs[-1][0] == count and draw.random() < 0.8:  # a run may be split
                runs[-1][1] += 1
            else:
                runs.append([count, 1])
        text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
        here = allocation(f"JOB_NODELIST=n[1-{nodes}] NTASKS={sum(counts) + nodes} TASKS_PER_NODE={text}")
        if len(set(counts)) == 1:
            assert [host.slots for host in here.hosts()] == counts
        else:
            with pytest.raises(ConfigError, match="every node runs the same number"):
                here.hosts()


@pytest.mark.parametrize(
    ("variables", "own_id"),
    [
        ("JOB_ID=100", "100"),
        ("JOB_ID=101 ARRAY_JOB_ID=100 ARRAY_TASK_ID=1", "100_1"),
        ("JOB_ID=100 ARRAY_JOB_ID=100 ARRAY_TASK_ID=3", "100_3"),  # the last to start has the array's number
        ("JOB_ID=100 ARRAY_JOB_ID=100 ARRAY_TASK_ID=0", "100_0"),
    ],
)
def test_a_task_of_an_array_names_itself_alone(variables: str, own_id: str) -> None:
    here = allocation(variables)
    assert here.own_id == own_id
    script = ["bash", "-uc", f"echo {OWN_ID}"]
    said = subprocess.run(script, env=dict(here.variables), capture_output=True, text=True, check=True).stdout
    assert said == f"{own_id}\n"


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ("", []),
        ("CPUS_PER_TASK=12", ["--cpus-per-task=96"]),
        ("GPUS_PER_NODE=8", []),  # a step has what the job has there
        ("GPUS=16", ["--gpus-per-node=8"]),
        ("GPUS_PER_TASK=a100:1 CPUS_PER_TASK=2", ["--cpus-per-task=16", "--gpus-per-node=8"]),
        ("TRES_PER_TASK=cpu=2,gres/gpu=1", ["--gpus-per-node=8"]),
        ("TRES_PER_TASK=cpu=2", []),
    ],
)
def test_a_step_of_one_task_has_what_the_tasks_of_its_node_have(variables: str, options: list[str]) -> None:
    assert allocation(variables).step_options(8) == options
    left = allocation(f"{variables} NTASKS=16 NTASKS_PER_NODE=8 JOB_ID=7 CONF=x").step_environment()
    assert {"SLURM_JOB_ID", "SLURM_CONF"} <= left.keys()
    assert not {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_PER_TASK"} & left.keys()
