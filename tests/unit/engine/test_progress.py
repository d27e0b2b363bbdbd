"""What a person reads while a run goes on."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pretrain.config import load_job
from pretrain.engine.callbacks.metrics import Metrics
from pretrain.engine.callbacks.next_steps import NextSteps
from pretrain.engine.callbacks.progress import ProgressDisplay, summary, validation_summary
from pretrain.engine.loop import Run
from pretrain.engine.task import Progress
from tests.support import ClosedTerminal
from tests.toy.config import ToyJob
from tests.toy.task import ToyTask

_VALUES = {"accuracy": 0.75, "loss/mlm": 2.5, "noise/cls/drift": 0.1, "validation_samples": 512.0}


def _run(tmp_path: Path, **changes: Any) -> Run:
    job = ToyJob.model_validate({"task": {"type": "toy"}, "schedule": {"max_steps": 4}, **changes})
    return Run(job, tmp_path, ToyTask(job, tmp_path), {}, Progress())


def test_the_loss_is_shown_by_its_parts() -> None:
    values = {"loss": 17.9, "loss/mlm": 8.3, "loss/capt": 9.6, "temperature": 0.55}
    assert summary(values) == "mlm 8.3000  capt 9.6000  tau 0.550"
    assert summary({"loss": 1.5}) == "loss 1.5000"


def test_the_metric_of_the_best_checkpoint_comes_first() -> None:
    job = load_job("capt_tiny", ["checkpoint.best=loss/mlm"])
    assert validation_summary(_VALUES, job) == "loss/mlm 2.5  accuracy 0.75"
    assert validation_summary(_VALUES, load_job("capt_tiny")) == "accuracy 0.75  loss/mlm 2.5"


def test_each_validation_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, display = _run(tmp_path), ProgressDisplay(Metrics())
    with caplog.at_level(logging.INFO):
        display.on_start(run)
        for step in (1, 2, 3):
            run.progress.step = step
            if step == 2:
                run.validation, run.validated_at = _VALUES, 2
            display.after_step(run, {})
        display.on_end(run)
    told = [record.message for record in caplog.records if "validation" in record.message]
    assert told == ["step 2 validation: accuracy 0.75  loss/mlm 2.5"]


def test_a_terminal_that_is_closed_ends_the_bar_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, display = _run(tmp_path), ProgressDisplay(Metrics())
    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr("pretrain.engine.callbacks.progress.Console", lambda **_: console)
    display.on_start(run)
    console.file = ClosedTerminal()
    run.progress.step, run.validation, run.validated_at = 1, _VALUES, 1
    with caplog.at_level(logging.INFO):
        display.after_step(run, {})
        display.on_end(run)
        display.close(run)
    assert [record.message for record in caplog.records] == [
        "the terminal takes no more output (Input/output error): no progress bar from here on",
        "step 1 validation: accuracy 0.75  loss/mlm 2.5",
    ]


def test_a_finished_run_says_what_to_do_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = _run(tmp_path)
    with caplog.at_level(logging.INFO):
        NextSteps().on_end(run)
        assert not caplog.records, "it has stopped early: the launcher says how to go on"
        run.progress.step = 4
        NextSteps().on_end(run)
    assert [record.message for record in caplog.records] == [f"next: capt report {tmp_path}"]
