"""Progress of a run as a person reads it."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from capt.pretrain.config import load_job
from capt.pretrain.engine.callbacks.metrics import Metrics
from capt.pretrain.engine.callbacks.progress import (
    NextSteps,
    ProgressDisplay,
    ProgressView,
    summary,
    validation_summary,
    validation_table,
)
from capt.pretrain.engine.loop import Run
from capt.pretrain.engine.task import Progress
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


def test_the_baseline_is_told_before_the_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, display = _run(tmp_path, run={"log_every": 1}), ProgressDisplay(Metrics())
    display.on_start(run)
    run.validation, run.validated_at = {"loss": 4.0}, 0
    with caplog.at_level(logging.INFO):
        display.on_ready(run)
        run.progress.step = 1
        display.after_step(run, {})
    assert [" ".join(each.getMessage().split()[:3]) for each in caplog.records] == [
        "step 0 validation:", "step 1/4 eta",
    ]  # fmt: skip


@pytest.mark.parametrize(("seconds", "log_every", "said"), [(8.6, 10, True), (0.5, 10, False), (8.6, 1, False)])
def test_a_slow_first_step_is_told_where_figures_are_far_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    seconds: float, log_every: int, said: bool,
) -> None:  # fmt: skip
    run, display = _run(tmp_path, run={"log_every": log_every}), ProgressDisplay(Metrics())
    clock = iter([0.0, 100.0, *(100 + seconds * step for step in range(1, 9))])
    monkeypatch.setattr("capt.pretrain.engine.callbacks.progress.time.monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO):
        display.on_start(run)
        display.on_ready(run)  # the baseline took 100 seconds, which are none of the step
        for run.progress.step in (1, 2):
            display.after_step(run, {})
    told = [each.getMessage() for each in caplog.records if "took" in each.getMessage()]
    assert told == (
        ["step 1/4 took 8.6 s, which makes 0:00:26 for the others; figures come every 10 steps (run.log_every)"]
        if said
        else []
    )


def test_a_terminal_that_is_closed_ends_the_bar_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, display = _run(tmp_path), ProgressDisplay(Metrics())
    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr("capt.pretrain.engine.callbacks.progress.Console", lambda **_: console)
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


FIGURES = ["mlm 7.1591", "capt 11.2277", "tau 0.075", "lr 5.83e-04", "norm 6.16", "tok/s 11,987"]

PICTURES = {
    80: """\
first  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  1200/20000  6%  eta 1:23:45
mlm 7.1591  capt 11.2277  tau 0.075  lr 5.83e-04  norm 6.16  tok/s 11,987
""",
    100: """\
first  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  1200/20000  6%  eta 1:23:45
mlm 7.1591  capt 11.2277  tau 0.075  lr 5.83e-04  norm 6.16  tok/s 11,987
""",
    120: """\
first  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  1200/20000  6%  eta 1:23:45
mlm 7.1591  capt 11.2277  tau 0.075  lr 5.83e-04  norm 6.16  tok/s 11,987
""",
    40: """\
first  1200/20000  6%  eta 1:23:45
mlm 7.1591  capt 11.2277  tau 0.075
lr 5.83e-04  norm 6.16  tok/s 11,987
""",
}  # fmt: skip


def _printed(what: Any, width: int, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(what)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", PICTURES)
def test_the_display_fits_the_terminal(width: int) -> None:
    assert _printed(ProgressView("first", 20000, 1200, "1:23:45", FIGURES), width) == PICTURES[width]


def test_a_wide_terminal_takes_one_line() -> None:
    assert _printed(ProgressView("first", 20000, 1200, "1:23:45", FIGURES), 150).count("\n") == 1


@pytest.mark.parametrize(
    "name", ["r", "a-run-of-a-very-long-name" * 4, "名前" * 20, "[red]x[/] [/nothing]", "a\x1b[31m\nb"]
)
@pytest.mark.parametrize("remarks", [(), ("COLLAPSED (AU 0)", "rank 3 is slow")])
def test_no_width_and_no_name_costs_a_figure(name: str, remarks: tuple[str, ...]) -> None:
    view = ProgressView(name, 10**7, 123456, "12 days, 1:23:45", FIGURES, remarks)
    for width in range(40, 200, 4):
        text = _printed(view, width)
        for part in (*FIGURES, *remarks, "eta 12 days, 1:23:45", "123456/10000000"):
            assert any(part in line for line in text.splitlines()), f"{part} is broken or gone at {width}"
        assert all(cell_len(line) <= width for line in text.splitlines())
        assert "\x1b" not in text


@pytest.mark.parametrize("width", [40, 80, 100, 120])
def test_a_validation_is_a_table_without_broken_numbers(width: int) -> None:
    job = load_job("capt_tiny", ["checkpoint.best=accuracy/mlm"])
    values = {"loss/mlm": 2.5, "accuracy/mlm": 0.75, "retrieval/to_corrupted": 0.123456, "noise/cls/drift": 0.1}
    text = _printed(validation_table(200, values, {"loss/mlm": 3.0, "accuracy/mlm": 0.8}, job), width)
    assert re.sub(" +", " ", text) == (
        "validation at step 200 value change\naccuracy/mlm 0.75 -0.05\nloss/mlm 2.5 -0.5\n"
        "retrieval/to_corrupted 0.1235\n"
    )


def test_colours_are_for_terminals_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    view = ProgressView("first", 20, 10, "0:01", FIGURES, ["COLLAPSED"])
    assert "\x1b[" in _printed(view, 80, force_terminal=True, color_system="standard")
    assert "\x1b[" not in _printed(view, 80)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\dm", _printed(view, 80, force_terminal=True, color_system="standard"))


def _finished(tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: list[dict[str, Any]]) -> list[str]:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, callback = _run(tmp_path), NextSteps()
    with caplog.at_level(logging.INFO):
        callback.on_start(run)
        callback.on_end(run)
        assert not caplog.records, "it has stopped early: the launcher says how to go on"
        run.progress.step, run.progress.tokens = 4, 2048
        callback.on_end(run)
    return [record.message for record in caplog.records]


def test_a_finished_run_says_what_came_of_it_and_what_to_do_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"step": s, "split": "validation", "loss/mlm": v} for s, v in ((2, 3.0), (3, 1.5), (4, 1.6))]
    assert _finished(tmp_path, caplog, rows) == [
        "done: step 4, 2,048 tokens; 0:00:00",
        "validation: loss/mlm 1.6 at the end, best 1.5 at step 3",
        "judgement: learning: loss/mlm went from 3 at step 2 to 1.6 at step 4",
        f"next: capt report {tmp_path}",
    ]


def test_a_record_that_cannot_be_read_fails_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").mkdir()
    run, callback = _run(tmp_path / "run"), NextSteps()
    (tmp_path / "run/metrics.jsonl").mkdir()
    run.progress.step = 4
    with caplog.at_level(logging.INFO):
        callback.on_start(run)
        callback.on_end(run)
    told = [record.message for record in caplog.records]
    assert told[0].startswith("done: step 4")
    assert told[1].endswith("no judgement of the run")
    assert told[2].startswith("next: ")
