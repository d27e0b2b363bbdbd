"""With which arguments a job is started again, and from which checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.plan import End, Launch, Options
from launcher.restart import supervise
from pretrain.config.load import load_job
from pretrain.engine.run_folder import FAILED


def _checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


def _set_aside(folder: Path) -> None:
    folder.rename(folder.with_name(f"abandoned-{folder.name}-1"))


def _arguments(run: Path, first: tuple[str, ...], goes_back: list[bool]) -> list[tuple[str, ...]]:
    """The arguments of each attempt; ``goes_back``: whether it sets the later checkpoints aside before it dies."""
    (run / "config.yaml").write_text("")
    seen = []

    def attempt(launch: Launch) -> End:
        seen.append(launch.arguments)
        if len(seen) > len(goes_back):
            return End(0)
        if goes_back[len(seen) - 1]:
            _set_aside(run / "checkpoints" / "step-00000004")
            _checkpoint(run, 4)  # of the new future
        return End(FAILED)

    job = load_job("capt_tiny", [f"run.dir={run}", "supervise.restarts=2"])
    supervise(Launch("pretrain", first, job, Options()), attempt)
    return seen


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("launcher.restart.again", lambda *args: True)
    for step in (2, 4):
        _checkpoint(tmp_path / "run", step)
    return tmp_path / "run"


def test_a_job_that_starts_again_waits_for_the_lock_of_a_lost_host(run: Path) -> None:
    _, second = _arguments(run, ("merged.yaml", "--merged", "--debug"), [False])
    assert second == (str(run / "config.yaml"), "--resume", "--debug", "--wait", "180")
    config = str(run / "config.yaml")
    given = (config, "optimizer.lr=1e-4", "--resume")
    assert _arguments(run, given, [False, False])[1:] == [(*given, "--wait", "180")] * 2


def test_a_job_that_dies_before_it_went_back_still_goes_back(run: Path) -> None:
    """Else it would go on with the future that it was told to leave."""
    given = (str(run / "config.yaml"), "--resume", "--checkpoint", "step-00000002")
    seen = _arguments(run, given, [False, True])
    assert seen == [given, (*given, "--wait", "180"), (given[0], "--resume", "--wait", "180")]
