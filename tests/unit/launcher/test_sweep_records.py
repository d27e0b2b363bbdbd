"""Run folders as sweeps read them: rows as they are written, how to restart, the log of trials."""

from __future__ import annotations

import json
import logging
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from capt.launcher.sweep import trial
from capt.launcher.sweep.run import check_base_jobs, say_best
from capt.launcher.sweep.trial_log import TrialLog, TrialState, ValidationRows, best_row, started_trials, write_spec
from capt.launcher.sweep.trials import StudyPlan, SweepPlan, TrialSpec
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.engine.metrics_file import MetricsRow
from capt.pretrain.engine.step_folders import step_folder
from capt.pretrain.report.sweeps import Study, TrialRecord, format_number, read_sweep


def row(step: int, **values: Any) -> str:
    return json.dumps({"step": step, "split": "validation", **values}) + "\n"


def make_plan(folder: Path, mode: Any = "max", population: bool = False, seeds: tuple[int, ...] = ()) -> SweepPlan:
    study = StudyPlan("s", "accuracy", mode, {"task": {"type": "toy"}}, folder / "trials" / "s")
    return SweepPlan(folder, folder, "capt.pretrain", {"s": study}, 1, 1, 1, population, seeds=seeds)


def make_run(plan: SweepPlan, seed: int, *values: float, lr: float = 0.1) -> TrialSpec:
    spec = TrialSpec("s", {"optimizer.lr": lr}, seed)
    run = plan.run_dir(spec)
    for step in range(1, len(values) + 1):
        folder = step_folder(run, step)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    rows = [row(step, accuracy=value, samples=8) for step, value in enumerate(values, start=1)]
    (run / "metrics.jsonl").write_text("".join(rows))
    return spec


def test_rows_are_read_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = ValidationRows(path)
    assert rows.next() is None
    path.write_text('{"step": 1, "loss": 2}\n' + row(1, a=1) + row(2, a=2)[:10])
    assert rows.next() == MetricsRow(1, "validation", {"a": 1.0})
    assert not rows.waiting()
    with path.open("a") as f:
        f.write(row(2, a=2)[10:])
    assert rows.next() == MetricsRow(2, "validation", {"a": 2.0})
    replacement = tmp_path / "new"  # a resumed run drops rows, and does their steps again
    replacement.write_text(row(1, a=1) + row(2, a=2) + row(3, a=3))
    replacement.replace(path)
    assert rows.next() == MetricsRow(3, "validation", {"a": 3.0})
    assert (rows.next(), rows.count) == (None, 3)
    again = ValidationRows(path)
    again.skip(2)
    assert again.next() == MetricsRow(3, "validation", {"a": 3.0})
    assert again.count == 3


def test_a_run_begins_anew_continues_or_adopts(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    run, other = (plan.run_dir(make_run(plan, seed, 0.1, 0.2, 0.3)) for seed in (1, 2))
    (step_folder(run, 3) / "manifest.json").unlink()
    (run / "checkpoints" / "step-\u00b2").mkdir()  # a digit that is not a number
    assert trial.prepare_restart(run, None) == (("--resume", "--checkpoint", "step-00000002"), 2)
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]

    source = step_folder(other, 2)
    (source / "weights").write_text("theirs")
    (run / "checkpoints" / "best").symlink_to("step-00000003")
    (run / "best.json").write_text("{}")
    assert trial.prepare_restart(run, {"checkpoint": str(source), "step": 2})[1] == 2
    assert (step_folder(run, 2) / "weights").read_text() == "theirs"
    assert not (run / "best.json").exists(), "the best checkpoint was of a future that is gone"
    assert not step_folder(run, 3).exists()

    for step in (1, 2):
        (step_folder(run, step) / "manifest.json").unlink()
    assert trial.prepare_restart(run, None) == ((), 0)
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("status", "log", "code", "said"),
    [
        ({"state": "failed", "reason": "ValueError: no"}, "x", 1, "ValueError: no"),
        (
            {"state": "running", "reason": ""},
            "warning\nerror: the file is empty\n[rank 0] bye\n",
            2,
            "the file is empty",
        ),
        (None, "one\ntwo\n\n", -9, "two (killed by SIGKILL"),
        (None, "", 1, "exit code 1"),
    ],
)
def test_what_went_wrong(tmp_path: Path, status: Any, log: str, code: int, said: str) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "trial.log").write_text(log)
    if status:
        (tmp_path / "status.json").write_text(json.dumps(status))
    assert trial.what_went_wrong(tmp_path, code).startswith(said)


@pytest.mark.parametrize(("mode", "score", "step"), [("max", 0.9, 2), ("min", 0.1, 1)])
def test_the_score_is_the_best_validation(tmp_path: Path, mode: str, score: float, step: int) -> None:
    plan = make_plan(tmp_path, mode)
    spec = make_run(plan, 1, 0.1, 0.9, 0.9, 0.5)
    TrialState(attempts=2, seconds=3.456, node="n").write(plan.run_dir(spec))
    record = TrialLog(plan, 1).add(spec, "done")
    assert (record.score, record.best_step, record.metrics) == (score, step, {"accuracy": score})
    assert (record.attempts, record.seconds, record.node) == (2, 3.46, "n")
    line = json.loads((tmp_path / "trials.jsonl").read_text())
    assert TrialRecord.model_validate(line) == record
    assert list(line) == list(TrialRecord.model_fields)


def test_a_score_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    study = make_plan(tmp_path).studies["s"]
    rows = [
        MetricsRow(step, "validation", {"accuracy": value}) for step, value in ((1, math.nan), (2, 0.1), (3, math.nan))
    ]
    best = best_row(rows, study)
    assert best is not None
    assert best.step == 2


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_the_median_seed_of_the_best_setting_keeps_its_checkpoint(tmp_path: Path, keep: int) -> None:
    seeds = (1, 2, 3)
    plan = make_plan(tmp_path, seeds=seeds)
    trial_log = TrialLog(plan, keep)
    lucky, steady = {1: 0.3, 2: 0.99, 3: 0.4}, {1: 0.82, 2: 0.8, 3: 0.9}

    def kept() -> set[tuple[float, int]]:
        return {
            (lr, seed)
            for lr in (0.1, 0.2)
            for seed in seeds
            if step_folder(plan.run_dir(TrialSpec("s", {"optimizer.lr": lr}, seed)), 1).exists()
        }

    for lr, values in ((0.1, lucky), (0.2, steady)):
        for seed in seeds[:2]:
            trial_log.add(make_run(plan, seed, values[seed], lr=lr), "done")
        if keep:
            assert {(lr, 1), (lr, 2)} <= kept(), "the third seed decides which is the median"
        trial_log.add(make_run(plan, 3, values[3], lr=lr), "done")
    best = [(trial.params["optimizer.lr"], trial.seed) for trial in _study(trial_log).representatives]
    assert best == [(0.2, 1), (0.2, 2), (0.2, 3), (0.1, 3), (0.1, 1), (0.1, 2)]
    assert kept() == set(best[:keep])


def _study(trial_log: TrialLog) -> Study:
    study = trial_log.study("s")
    assert study is not None
    return study


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_sweep_says_what_the_report_shows(tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Any number of seeds, any order of their ends, equal scores, lost seeds: one setting, median and checkpoint."""
    caplog.set_level(logging.INFO)
    draw = random.Random(0)
    for number in range(20):
        folder = tmp_path / str(number)
        seeds = tuple(range(1, draw.randint(1, 4) + 1))
        plan = make_plan(folder, mode, seeds=seeds)
        folder.mkdir()
        trial_log = TrialLog(plan, 1)
        points = [(lr, seed) for lr in (0.3, 0.1, 0.2) for seed in seeds]
        for lr, seed in draw.sample(points, len(points)):
            state = draw.choice(["done"] * 6 + ["failed", "pruned"])
            trial_log.add(make_run(plan, seed, draw.choice([0.25, 0.5, 0.75]), lr=lr), state)
        trial_log.drop_checkpoints("s", ended=True)
        (shown,) = read_sweep(folder).studies
        caplog.clear()
        say_best(trial_log, "s")
        if shown.best is None:
            assert not caplog.messages
            continue
        assert shown.best.median == statistics.median(shown.best.scores)
        said = f"lr={shown.best.params['optimizer.lr']}; median accuracy {format_number(shown.best.median)} "
        assert said in caplog.messages[0]
        assert shown.chosen is not None
        assert f"seed={shown.chosen.seed} " in caplog.messages[0]
        assert step_folder(shown.chosen.path, 1).exists(), "a submission predicts with it"


def test_a_seed_that_failed_costs_no_other_its_checkpoint(tmp_path: Path) -> None:
    """The median of those that are left was removed before it could be known: the study ended without a checkpoint."""
    plan = make_plan(tmp_path, seeds=(1, 2, 3, 4, 5))
    trial_log = TrialLog(plan, 1)
    trial_log.add(make_run(plan, 1, 0.9), "done")
    trial_log.add(make_run(plan, 2, 0.1), "failed")
    for seed, value in ((3, 0.7), (4, 0.8), (5, 0.6)):
        trial_log.add(make_run(plan, seed, value), "done")
    best = _study(trial_log).chosen
    assert best is not None
    assert (best.seed, best.score) == (3, 0.7)
    assert step_folder(tmp_path / best.run, 1).exists()


def test_a_setting_that_lost_seeds_is_never_before_a_whole_one(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, seeds=(1, 2, 3, 4, 5))
    trial_log = TrialLog(plan, 1)
    trial_log.add(make_run(plan, 1, 0.9), "done")
    for seed in (2, 3, 4, 5):
        trial_log.add(make_run(plan, seed, 0.52), "pruned")
    for seed in (1, 2, 3, 4, 5):
        trial_log.add(make_run(plan, seed, 0.8, lr=0.2), "done")
    assert _study(trial_log).ranked[0].params == {"optimizer.lr": 0.2}
    assert not list(plan.run_dir(TrialSpec("s", {"optimizer.lr": 0.1}, 1)).glob("checkpoints/*"))


def test_a_trial_log_whose_last_line_is_torn(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    specs = [make_run(plan, seed, 0.5) for seed in (1, 2, 3)]
    trial_log = TrialLog(plan, 3)
    for spec in specs:
        trial_log.add(spec, "done")
    path = tmp_path / "trials.jsonl"
    path.write_text(path.read_text()[:-9])
    again = TrialLog(plan, 3)
    assert [again.is_over(spec) for spec in specs] == [True, True, False]
    (plan.run_dir(specs[2]) / "status.json").write_text('{"state": "done"}')
    assert again.is_over(specs[2]), "its run says so, and it is recorded now"
    assert len(TrialLog(plan, 3).records) == 3
    again.add(specs[0], "failed", "broken")
    assert not TrialLog(plan, 3).is_over(specs[0]), "the last line of a run counts"


def test_a_resume_with_other_keys_is_refused(tmp_path: Path) -> None:
    def plan(name: str = "s", metric: str = "accuracy", **base: Any) -> SweepPlan:
        study = StudyPlan(name, metric, "max", {"optimizer": {"lr": 0.1}, **base}, tmp_path / "trials" / name)
        return SweepPlan(tmp_path, tmp_path, "capt.pretrain", {name: study}, 1, 1, 1, False)

    check_base_jobs(plan())
    check_base_jobs(plan())
    check_base_jobs(plan("another", optimizer={"lr": 0.2}))
    for changed, said in (
        (plan(optimizer={"lr": 0.2}), r"study s: optimizer.lr is 0.2, but the sweep in .* began with 0.1"),
        (plan(data={"path": "b"}), r"study s: data.path is \"b\", but .* began with unset"),
        (plan(metric="f1"), r"study s: metric is"),
        (plan("another"), "study another: optimizer.lr is 0.1"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_base_jobs(changed)
    for damaged in ("[]", '{"s": 3}', '{"s": {"metric": 1, "mode": "max", "base": {}}}', "{"):
        (tmp_path / "bases.json").write_text(damaged)
        with pytest.raises(DataError, match=r"bases\.json: "):
            check_base_jobs(plan())


def test_begun_trials_are_found_if_they_are_of_the_same_base(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    specs = [make_run(plan, seed, 0.5) for seed in (1, 2)]
    for spec in specs:
        write_spec(plan.run_dir(spec), spec)
    (plan.run_dir(specs[1])).rename(plan.folder / "trials" / "s" / "of-another-base")
    assert started_trials(plan.studies["s"]) == [specs[0]]
