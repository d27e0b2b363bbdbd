import json
import os
import shlex
import subprocess
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from capt.launcher.plan import LaunchFiles
from capt.launcher.watch import StatusWatch
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.locks import file_lock
from capt.pretrain.engine.run_folder import LOCK, Status, check_is_free, read_status


def write_status(folder: Path, **status: object) -> None:
    (folder / "new").write_text(json.dumps(status))
    (folder / "new").replace(folder / "status.json")


@pytest.mark.parametrize(
    ("mark", "way_on"), [("config.yaml", "capt resume "), ("metrics.jsonl", "mv "), ("checkpoints", "mv ")]
)
def test_a_folder_with_a_run_is_refused_and_the_way_on_named(tmp_path: Path, mark: str, way_on: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / mark).touch()
    with pytest.raises(ConfigError, match=rf"run\.dir {folder} .*{way_on}{folder}") as refusal:
        check_is_free(folder)
    if way_on == "mv ":  # what cannot be resumed: the command makes room
        subprocess.run(shlex.split(str(refusal.value).partition(": ")[2]), check=True)
        check_is_free(folder)
        assert (tmp_path / "run.old" / mark).exists()


def test_new_and_merely_planned_folders_are_free(tmp_path: Path) -> None:
    (tmp_path / "launch.json").touch()
    check_is_free(tmp_path)
    check_is_free(tmp_path / "new")


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        check_is_free(tmp_path / "file")


def test_private_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        LaunchFiles(tmp_path / "new", {tmp_path / "new" / "file": "text"}).write()
    finally:
        os.umask(old)
    assert (tmp_path / "new" / "file").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("state", "written", "launcher", "job"),
    [
        ("done", 0, 0, 0),
        ("done", 0, 1, 1),  # a rank failed after rank 0 was done
        ("stopped", 75, 1, 75),  # torchrun: every failure is 1
        ("stopped", 75, 75, 75),
        ("failed", 2, 1, 2),
        ("failed", 1, 0, 1),  # deepspeed after a killed pdsh: success
        ("failed", None, 1, 1),
        ("running", None, 0, 1),
        ("running", None, 247, 1),
    ],
)
def test_the_jobs_word_counts_more_than_the_launchers(
    tmp_path: Path, state: str, written: int | None, launcher: int, job: int
) -> None:
    watch = StatusWatch.begin(tmp_path)
    write_status(tmp_path, state=state, exit_code=written, step=3)
    assert watch.exit_code(launcher) == job


@pytest.mark.parametrize(("launcher", "job"), [(0, 1), (1, 1), (2, 2), (75, 75), (-9, 1)])
def test_an_older_status_is_not_this_launchs(tmp_path: Path, launcher: int, job: int) -> None:
    write_status(tmp_path, state="done", exit_code=0)
    assert StatusWatch.begin(tmp_path).exit_code(launcher) == job


@pytest.mark.parametrize("state", ["starting", "running"])
@pytest.mark.parametrize(("code", "truth"), [(1, "failed"), (2, "failed"), (75, "stopped")])
def test_a_job_that_is_gone_does_not_run(tmp_path: Path, state: str, code: int, truth: str) -> None:
    watch = StatusWatch.begin(tmp_path)
    write_status(tmp_path, state=state, step=3)
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n{"st')
    watch.record_end(code, "rank 0 was killed by SIGKILL")
    expected = Status(state=truth, step=7, exit_code=code, reason="rank 0 was killed by SIGKILL")
    assert read_status(tmp_path) == expected
    watch.record_end(1, "again")
    assert read_status(tmp_path) == expected


def test_a_lock_of_a_lost_node_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lose(taken: threading.Event) -> None:
        with file_lock(tmp_path / ".training"):
            taken.set()
            time.sleep(1.5)

    taken = threading.Event()
    node = threading.Thread(target=lose, args=(taken,))
    node.start()
    assert taken.wait(10)
    with pytest.raises(ConfigError, match="taken"), file_lock(tmp_path / ".training", refusal="taken"):
        pass
    with file_lock(tmp_path / ".training", refusal="taken", wait=30.0):
        assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["waiting up to 30 s for its end"]
    node.join()


def test_a_validation_tells_the_step_as_well(tmp_path: Path) -> None:
    """Training rows come every run.log_every steps: a job that is queued again must not seem to have made none."""
    watch = StatusWatch.begin(tmp_path)
    write_status(tmp_path, state="running", step=0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "split": "validation"}\n')
    watch.record_end(1, "rank 0 was killed by SIGKILL")
    status = read_status(tmp_path)
    assert status is not None
    assert status.step == 5


def test_the_status_of_another_job_that_lives_is_left_alone(tmp_path: Path) -> None:
    write_status(tmp_path, state="running", step=7)
    with file_lock(tmp_path / ".training", refusal="taken"):
        StatusWatch.begin(tmp_path).record_end(2, "refused")
        assert read_status(tmp_path) == Status(state="running", step=7)
    StatusWatch.begin(tmp_path).record_end(2, "refused")  # of one that was killed with its launcher
    assert read_status(tmp_path) == Status(state="failed", step=7, exit_code=2, reason="refused")


@pytest.mark.parametrize("content", [b"", b"[", b"[1]", b'{"state": "x"}', b'{"state": 3}', b"\xff", b"[" * 10**5])
def test_a_status_that_is_none_counts_as_none(tmp_path: Path, content: bytes) -> None:
    watch = StatusWatch.begin(tmp_path)
    (tmp_path / "status.json").write_bytes(content)
    assert (watch.state(), watch.exit_code(1), watch.exit_code(75)) == (None, 1, 75)
    watch.record_end(1, "gone")
    assert (tmp_path / "status.json").read_bytes() == content


def test_a_fifo_for_a_status_is_no_wait(tmp_path: Path) -> None:
    watch = StatusWatch.begin(tmp_path)
    os.mkfifo(tmp_path / "status.json")
    assert watch.state() is None
    watch.record_end(1, "gone")


@pytest.mark.parametrize("existing", [(), ("runs",), ("runs", "r")])
def test_a_launch_that_came_to_nothing_leaves_nothing(tmp_path: Path, existing: tuple[str, ...]) -> None:
    tmp_path.joinpath(*existing).mkdir(exist_ok=True, parents=True)
    before = sorted(tmp_path.rglob("*"))
    run = tmp_path / "runs" / "r"
    files = LaunchFiles(run, {run / "launch.json": "", run / "launch.env": ""})
    for name in ("launch.json", "launch.env", "status.json", ".training", "log/x"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    (run / "log" / "x").unlink()
    files.remove()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_job_that_another_one_keeps_out_leaves_that_ones_files(tmp_path: Path) -> None:
    """Else ``capt resume`` would launch the run of the other job as the refused one was meant to be."""
    launch, theirs = tmp_path / "launch.json", "of the job that trains"
    (tmp_path / "config.yaml").touch()
    for refused, active, expected in ((True, True, theirs), (False, True, "new"), (True, False, "new")):
        launch.write_text(theirs)
        files = LaunchFiles(tmp_path, {launch: "new"})
        files.write()
        with file_lock(tmp_path / LOCK) if active else nullcontext():
            files.remove(refused=refused)
        assert launch.read_text() == expected


def test_a_run_that_was_begun_stays(tmp_path: Path) -> None:
    files = LaunchFiles(tmp_path / "r", {tmp_path / "r" / "launch.json": ""})
    (tmp_path / "r").mkdir()
    for name in ("launch.json", "config.yaml", "status.json"):
        (tmp_path / "r" / name).touch()
    files.remove()
    assert len(list((tmp_path / "r").iterdir())) == 3
