"""Links in a sweep's folder from somebody else: nothing outside is written, truncated or removed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from capt.launcher.supervisor import processes
from capt.launcher.sweep.run import _refuse_links
from capt.launcher.sweep.trial import _trial_lock
from capt.launcher.sweep.trial_log import TrialLog, remove_checkpoints
from capt.pretrain.base.errors import ConfigError, DataError
from tests.unit.launcher.test_sweep_records import make_plan, make_run


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Folders and files of somebody, which must stay."""
    (tmp_path / "home" / "thesis" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "home" / "thesis" / "only-copy.txt").write_text("precious")
    return tmp_path / "home"


def _is_whole(home: Path) -> bool:
    kept = home / "thesis" / "only-copy.txt"
    return kept.read_text() == "precious" and (home / "thesis" / "checkpoints" / "step-00000001").is_dir()


def test_pruning_removes_nothing_through_a_link(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(home)
    with pytest.raises(DataError, match=r"checkpoints: a link is in the place of a folder of our own"):
        remove_checkpoints(run)
    (tmp_path / "linked").symlink_to(home / "thesis")
    with pytest.raises(DataError, match="a link is in the place"):
        remove_checkpoints(tmp_path / "linked")
    assert _is_whole(home)


def test_a_book_names_no_run_beyond_a_link(home: Path, tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "sweep")
    (tmp_path / "sweep").mkdir()
    trial_log = TrialLog(plan, keep=0)
    record = trial_log.add(make_run(plan, 1, 0.5), "done")
    (tmp_path / "sweep" / "out").symlink_to(home)
    trial_log.records["out/thesis"] = record.model_copy(update={"run": "out/thesis"})
    with pytest.raises(DataError, match="leads out of the sweep's folder by a link"):
        trial_log.drop_checkpoints("s")
    assert _is_whole(home)


@pytest.mark.parametrize(
    "name", ["trials", "trials/s", "trials/s/a", "trials/s/a/checkpoints", "trials/s/a/log", ".tune"]
)
def test_a_sweep_with_a_link_is_refused(name: str, home: Path, tmp_path: Path) -> None:
    link = tmp_path / "sweep" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(home)
    with pytest.raises(ConfigError, match="a link is in the place"):
        _refuse_links(tmp_path / "sweep")


def test_a_sweep_without_links_is_taken(tmp_path: Path) -> None:
    make_run(make_plan(tmp_path), 1, 0.5)
    _refuse_links(tmp_path)


def test_the_lock_and_the_log_of_a_trial_follow_no_link(home: Path, tmp_path: Path) -> None:
    precious = home / "thesis" / "only-copy.txt"
    for name in (".lock", "trial.log"):
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(DataError, match="a link, FIFO or folder"), _trial_lock(tmp_path):
        pytest.fail("the block must not run")
    with pytest.raises(DataError, match="a link, FIFO or folder"):
        processes.start(["echo", "x"], {}, on_parent_death=signal.SIGKILL, output=tmp_path / "trial.log")
    assert _is_whole(home)
