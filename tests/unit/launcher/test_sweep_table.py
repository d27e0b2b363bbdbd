"""The live table of a sweep, on a terminal and without one."""

from __future__ import annotations

import logging
import pickle

import pytest
from rich.console import Console

from capt.launcher.sweep.driver import ProgressTable
from capt.launcher.sweep.trials import TrialSpec
from capt.pretrain.report.sweeps import State, TrialRecord

FIRST, SECOND = (TrialSpec("rte", {"optimizer.lr": rate}, 1) for rate in (1e-5, 2e-5))


def record(state: State = "done", score: float | None = 0.75, error: str = "") -> TrialRecord:
    return TrialRecord(
        study="rte", params={}, seed=1, state=state, metric="accuracy", score=score, best_step=20, run="trials/rte",
        seconds=3.0, error=error,
    )  # fmt: skip


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressTable(3, 0) as table:
        for spec in (FIRST, SECOND):
            table.running(spec)
        table.running(FIRST, "10", "0.5", "0.6")
        table.running(FIRST)
        table.ended(SECOND, record("pruned"))
        assert pickle.loads(pickle.dumps(table)), "Tune pickles its callbacks"
        console = Console(width=100, force_terminal=False, color_system=None)
        with console.capture() as capture:
            console.print(table.render())
    shown = capture.get()
    rows = [row.split() for row in shown.splitlines()]
    assert ["rte", "lr=1e-05", "seed=1", "running", "10", "0.5", "0.6"] in rows
    assert ["rte", "lr=2e-05", "seed=1", "pruned", "20", "0.75"] in rows
    assert "1 of 3 trials over" in shown
    assert "left" in shown
    assert "rte" in capsys.readouterr().err, "the live table itself goes to stderr"


def test_elsewhere_a_line_a_trial(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with caplog.at_level(logging.INFO), ProgressTable(2, 0) as table:
        table.running(FIRST)
        table.ended(FIRST, record())
        table.ended(SECOND, record("failed", None, "the disk is full"))
    assert "1/2 done: rte lr=1e-05 seed=1: accuracy 0.75 at step 20 (3 s), about" in caplog.text
    assert "2/2 failed: rte lr=2e-05 seed=1: the disk is full (3 s)\n" in caplog.text
