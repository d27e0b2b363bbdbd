"""Checkpoint from which a run continues, where a file system or a disk is not at its best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine import run
from capt.pretrain.engine.run import choose_checkpoint


@pytest.fixture
def job(tmp_path: Path) -> Job:
    for step in (2, 4):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    return load_job("capt_tiny", [f"run.dir={tmp_path}"])


def _other_rank(monkeypatch: pytest.MonkeyPatch, *views: Path) -> None:
    """A second rank, on a host that sees these newest checkpoints, one after another."""
    left = list(views)

    def gather(value: Any) -> list[Any]:
        other = left.pop(0) if len(left) > 1 else left[0]
        return [value, (other, value[1]) if isinstance(value, tuple) else value]  # of verdicts

    monkeypatch.setattr(distributed, "gather_objects", gather)
    monkeypatch.setattr(run, "verify_together", lambda source: None)
    monkeypatch.setattr(run, "_PAUSE", 0.01)


def test_a_host_that_sees_the_newest_checkpoint_late_is_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: a host that has listed the folder within the last minute does not see what another has put there since."""
    older, newest = sorted((job.run.dir / "checkpoints").iterdir())
    _other_rank(monkeypatch, older, older, newest)
    assert choose_checkpoint(job) == newest


def test_hosts_that_go_on_seeing_other_checkpoints_do_not_train(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    older, _ = sorted((job.run.dir / "checkpoints").iterdir())
    _other_rank(monkeypatch, older)
    monkeypatch.setattr(run, "_DISAGREE", 0.1)
    with pytest.raises(ConfigError, match="ranks see different checkpoints"):
        choose_checkpoint(job)


def test_a_checkpoint_that_cannot_be_read_just_now_is_not_set_aside(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(source: Path) -> None:
        error = CheckpointError(f"{source}: Stale file handle")
        error.passing = passing
        raise error

    monkeypatch.setattr(run, "verify_together", verify)
    passing = True
    with pytest.raises(CheckpointError, match="step-00000004: Stale"):
        choose_checkpoint(job, skip_damaged=True)
    names = {path.name for path in (job.run.dir / "checkpoints").iterdir()}
    assert names == {"step-00000002", "step-00000004"}
    passing = False
    with pytest.raises(CheckpointError, match="step-00000002: Stale"):
        choose_checkpoint(job, skip_damaged=True)
