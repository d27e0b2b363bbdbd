import json
import os
from pathlib import Path

import pytest

from launcher import runfolder
from launcher.runfolder import StatusWatch
from tokenizer.errors import ConfigError


def write_status(folder: Path, **status: object) -> None:
    (folder / "new").write_text(json.dumps(status))
    (folder / "new").replace(folder / "status.json")


@pytest.mark.parametrize("mark", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_a_folder_with_a_run_is_refused_and_the_way_on_named(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).touch()
    with pytest.raises(ConfigError, match=r"already holds a run.*capt resume"):
        runfolder.check_is_free(tmp_path)


def test_new_and_merely_planned_folders_are_free(tmp_path: Path) -> None:
    (tmp_path / "launch.json").touch()
    runfolder.check_is_free(tmp_path)
    runfolder.check_is_free(tmp_path / "new")


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        runfolder.check_is_free(tmp_path / "file")
    with pytest.raises(ConfigError, match="not a run folder"):
        runfolder.config_of(tmp_path)


def test_a_missing_checkpoint_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        runfolder.check_checkpoint(tmp_path, "step-3")
    for name in ("step-00000010", "step-00000020", "half-written"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if name.startswith("step"):
            (tmp_path / "checkpoints" / name / "manifest.json").touch()
    with pytest.raises(ConfigError, match=r"it has step-00000010, step-00000020$"):
        runfolder.check_checkpoint(tmp_path, "half-written")
    runfolder.check_checkpoint(tmp_path, "step-00000010")


def test_private_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        runfolder.write_private(tmp_path / "new" / "file", "text")
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
