"""Leftovers of other launchers in the shell: no rank of ours inherits them, and one started by hand says so."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from capt.launcher.backends import deepspeed, local, ray, torchrun
from capt.launcher.plan import Command, Launch, Options, Plan
from capt.launcher.ssh import Host
from capt.launcher.supervisor.node import Supervisor
from capt.pretrain.__main__ import main
from capt.pretrain.base.process import leave_other_launchers
from capt.pretrain.config.load import load_job
from tests.small_job import write_job
from tests.support import run_capt, start_forked

LEFT = {
    "Open MPI": "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_MCA_pmix=^s1 OMPI_UNIVERSE_SIZE=4 PMIX_RANK=1 PMIX_NAMESPACE=x PRTE_LAUNCHED=1",
    "MPICH": "PMI_RANK=1 PMI_SIZE=4 PMI_FD=9 HYDRA_BSTRAP=ssh HYDI_CONTROL_FD=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4",
    "Intel MPI": "I_MPI_PIN=1 I_MPI_HYDRA_TOPOLIB=x PMI_RANK=1 MPI_LOCALRANKID=1",
    "MVAPICH2": "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MPISPAWN_ID=0",
    "Slurm": "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS=4 SLURM_JOB_ID=7 SLURM_STEP_NUM_TASKS=4 SLURMD_NODENAME=n1",
    "others of clusters": "PALS_RANKID=1 ALPS_APP_PE=1 JSM_NAMESPACE_RANK=1 FLUX_TASK_RANK=1",
    "SageMaker": "SM_TRAINING_ENV={} SM_CURRENT_HOST=algo-1 SM_NUM_GPUS=8",
    "Azure ML": "AZUREML_EXPERIMENT_ID=x AZ_BATCH_MASTER_NODE=10.0.0.4:6000 AZ_BATCHAI_MPI_MASTER_NODE=10.0.0.4",
    "torchrun": "TORCHELASTIC_RUN_ID=x TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2 GROUP_RANK=1 "
    "GROUP_WORLD_SIZE=2 ROLE_RANK=1 ROLE_NAME=default ROLE_WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 LOCAL_RANK=3 PET_NNODES=2",
    "DeepSpeed": "RANK=1 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_SIZE=4 CROSS_RANK=0 CROSS_SIZE=1 MASTER_ADDR=x MASTER_PORT=1",
}
ALL = {name: value for line in LEFT.values() for name, value in (word.split("=", 1) for word in line.split())}
KEPT = {"NCCL_DEBUG": "WARN", "UCX_TLS": "tcp", "OMP_NUM_THREADS": "1", "SLURM_CONF": "/etc/slurm.conf"}
OURS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
WRITES = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


def _local(argv: tuple[str, ...], folder: Path) -> None:
    local.run_ranks((Command(argv, OURS),))


def _node(argv: tuple[str, ...], folder: Path, *, signalled: bool = False) -> None:
    reading, writing = os.pipe()
    supervisor = Supervisor(os.dup(reading), writing, signalled=signalled)
    supervisor._start(list(argv), {}, [OURS], [])
    while supervisor._ranks.codes == [None]:
        supervisor._ranks.look(0.05)
    supervisor._ranks.close()


def _node_of_slurm(argv: tuple[str, ...], folder: Path) -> None:
    _node(argv, folder, signalled=True)


def _foreign(start: Callable[[Launch, Plan], object]) -> Callable[[tuple[str, ...], Path], None]:
    def begin(argv: tuple[str, ...], folder: Path) -> None:
        job = load_job("capt_tiny", [f"run.dir={folder / 'run'}"])
        env = {**OURS, "PDSH_SSH_ARGS_APPEND": ""}
        start(Launch("capt.pretrain", (), job, Options()), Plan("", (Host("localhost", 1),), (Command(argv, env),)))

    return begin


def _ray(argv: tuple[str, ...], folder: Path) -> None:
    rank = ray.Rank()
    # Ray sets the number of threads itself, so the launcher says that of the user, as it does here.
    rank.start(argv, {**OURS, "OMP_NUM_THREADS": KEPT["OMP_NUM_THREADS"]}, folder, None)
    assert rank._process is not None
    rank._process.wait()


LAUNCHERS = {
    "local": _local, "a node of ssh or Kubernetes": _node, "a node of srun": _node_of_slurm,
    "torchrun": _foreign(torchrun.start), "deepspeed": _foreign(deepspeed.start), "ray": _ray,
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_inherits_nothing_of_another_launcher(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**ALL, **KEPT}.items():
        monkeypatch.setenv(name, value)
    LAUNCHERS[launcher]((sys.executable, "-c", WRITES, str(tmp_path / "seen")), tmp_path)
    seen = json.loads((tmp_path / "seen").read_text())
    expected = KEPT if launcher != "deepspeed" else {name: value for name, value in KEPT.items() if name[0] in "OS"}
    if launcher == "a node of srun":
        expected = {**expected, **{name: value for name, value in ALL.items() if name.startswith("SLURM")}}
    met = {"MASTER_PORT"} if launcher == "local" else set()
    assert {name: seen[name] for name in seen.keys() & (ALL | KEPT | OURS).keys() - met} == {**expected, **OURS}


@pytest.mark.parametrize("others", LEFT)
def test_a_rank_that_is_started_by_hand_keeps_nothing(others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's variables stay, which no library takes for a rank's; a number of processes is said."""
    left = dict(word.split("=", 1) for word in LEFT[others].split())
    monkeypatch.setattr(os, "environ", {**left, **KEPT})
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    warning = leave_other_launchers(by_deepspeed=False)
    assert {name for name in os.environ if not name.startswith(("SLURM", "PET_"))} == KEPT.keys() - {"SLURM_CONF"}
    counts = [name for name in left if name.endswith(("COMM_WORLD_SIZE", "PMI_SIZE", "NUM_TASKS"))]
    assert warning.startswith(f"{counts[0]}=4 is of " if counts else "")
    assert bool(warning) == bool(counts)


def test_the_launcher_of_a_rank_keeps_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's stay beside RANK, and go where DeepSpeed has started the rank; MPI's go in any case."""
    for by_deepspeed in (False, True):
        monkeypatch.setattr(os, "environ", dict(ALL))
        assert leave_other_launchers(by_deepspeed=by_deepspeed) == ""
        assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR"} <= os.environ.keys()
        torchruns = {"TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE"}
        assert bool(torchruns & os.environ.keys()) == (not by_deepspeed)
        assert not [name for name in os.environ if name.startswith(("OMPI_", "PMI_", "MV2_", "SM_"))]


def test_a_job_trains_where_everything_was_left(tmp_path: Path) -> None:
    """By our launcher, and by hand with all but a whole place among ranks."""
    folder = write_job(tmp_path / "work", schedule={"max_steps": 1, "warmup_steps": 0}, contrast={"queue": 16})
    words = ("pretrain", "job.yaml", "run.dir=run", "--nproc", "2", "--no-preflight")
    done = run_capt(*words, cwd=folder, env={**os.environ, **ALL})
    assert done.returncode == 0, done.stderr
    alone = start_forked(_by_hand, str(folder), {name: value for name, value in ALL.items() if name != "RANK"})
    alone.join(120)
    assert alone.exitcode == 0, (folder / "said").read_text()
    assert "OMPI_COMM_WORLD_SIZE=4 is of mpirun" in (folder / "said").read_text()


def _by_hand(folder: str, left: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(left)
    with open("said", "w") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(main(["job.yaml", "run.dir=alone"]))
