"""Reports of sweeps: best by median, all seeds, what is no result, curves, parameters, and two sweeps side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain import registry
from capt.pretrain.base.errors import DataError
from capt.pretrain.report.sweep_page import Curves, read_curves
from capt.pretrain.report.sweeps import TRIALS, Study, comparable, format_number, is_sweep, read_sweep
from capt.pretrain.report.write import report
from tests.sweep_folders import add_trial, write_sweep
from tests.unit.report.test_report import Page, write_run

SEEDS = [1, 2, 3]
LOW, HIGH = {"optimizer.lr": 1e-5, "batch.global": 16}, {"optimizer.lr": 3e-4, "batch.global": 16}


def a_sweep(folder: Path, shift: float = 0.0, **options: Any) -> Path:
    """LOW has the best single seed, HIGH the best median."""
    sweep = write_sweep(folder, SEEDS)
    for seed, score in zip(SEEDS, (0.50, 0.61, 0.95), strict=True):
        add_trial(sweep, "one", LOW, seed, [score - 0.1, score + shift, score - 0.05], loss=0.5, **options)
    for seed, score in zip(SEEDS, (0.70, 0.62, 0.69), strict=True):
        add_trial(sweep, "one", HIGH, seed, [score - 0.1, score - 0.02, score + shift], loss=0.25, **options)
    return sweep


def only(sweep: Path) -> Study:
    (study,) = read_sweep(sweep).studies
    return study


def test_the_best_configuration_has_the_best_median(tmp_path: Path) -> None:
    study = only(a_sweep(tmp_path / "sweep"))
    assert [c.params for c in study.configurations] == [LOW, HIGH]
    best = study.best
    assert best is not None
    assert best.params == HIGH
    assert (best.median, best.mean, best.std) == pytest.approx((0.69, 0.67, 0.043588989))
    assert [trial.seed for trial in best.trials] == SEEDS
    assert [trial.best_step for trial in best.trials] == [30, 30, 30]
    assert study.configurations[0].median == pytest.approx(0.61)
    assert best.metric_median("loss") == 0.25
    assert best.metric_median("absent") is None


def test_lower_may_be_better(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", [1])
    for rate, loss in ((1e-3, 2.0), (1e-4, 1.0), (1e-5, 3.0)):
        add_trial(sweep, "lm", {"optimizer.lr": rate}, 1, [9.0, loss], metric="loss/mlm", mode="min")
    best = only(sweep).best
    assert best is not None
    assert (best.params, best.median, best.std) == ({"optimizer.lr": 1e-4}, 1.0, None)


def test_configurations_that_lack_seeds_do_not_win_by_luck(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path / "sweep")
    lucky = {"optimizer.lr": 1e-3, "batch.global": 16}
    add_trial(sweep, "one", lucky, 1, [0.99])
    add_trial(sweep, "one", lucky, 2, [0.99], state="pruned")
    add_trial(sweep, "one", lucky, 3, state="failed", error="rank 0 ended with 1")
    found = read_sweep(sweep)
    (study,) = found.studies
    assert study.best is not None
    assert study.best.params == HIGH
    assert found.notes == ["one: 1 of 3 configurations lack the score of a seed"]
    none_whole = write_sweep(tmp_path / "other", SEEDS)
    add_trial(none_whole, "one", LOW, 1, [0.4])
    add_trial(none_whole, "one", HIGH, 1, [0.5])
    best = only(none_whole).best
    assert best is not None
    assert best.params == HIGH
    only_failed = write_sweep(tmp_path / "failed", SEEDS)
    add_trial(only_failed, "one", LOW, 1, state="failed", error="out of memory")
    assert only(only_failed).best is None
    page = Page(report([only_failed], tmp_path / "out"))
    assert "no trial has a score" in page.text
    assert "out of memory" in page.text


def test_trials_that_a_scheduler_stopped_are_no_failures(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", [1])
    add_trial(sweep, "one", LOW, 1, [0.9], state="pruned")
    add_trial(sweep, "one", HIGH, 1, [0.5, 0.6])
    found = read_sweep(sweep)
    assert found.notes == []
    assert found.studies[0].best is not None
    assert found.studies[0].best.params == HIGH
    page = Page(report([sweep], tmp_path / "out"))
    assert "Trials that are no result" not in page.text + (tmp_path / "out/report.md").read_text()


def test_a_population_has_no_seeds_to_lack(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", SEEDS)
    for params in (LOW, HIGH):
        add_trial(sweep, "one", params, 1, [0.5])
    assert read_sweep(sweep).notes != []
    with (sweep / "sweep.yaml").open("a") as file:
        file.write("scheduler: {type: pbt}\n")
    assert read_sweep(sweep).notes == []


def test_trials_that_are_no_result_are_flagged_and_shown(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", [1, 2, 3, 4])
    add_trial(sweep, "rte", {}, 1, [0.53], degenerate=1.0, baseline=0.53)
    add_trial(sweep, "rte", {}, 2, [0.52], degenerate=0.0, baseline=0.53)
    add_trial(sweep, "rte", {}, 3, [0.60], degenerate=0.0, baseline=0.53)
    add_trial(sweep, "rte", {}, 4, state="failed", error="killed | by\nsignal 9")
    flags = [trial.flag for trial in only(sweep).trials]
    assert flags == ["constant prediction", "no better than a constant prediction", None, "failed"]
    page = Page(report([sweep], tmp_path / "out"))
    assert "0.5300†, 0.5200†, 0.6000, failed" in page.text
    markdown = (tmp_path / "out/report.md").read_text()
    assert "| sweep | rte | as in the base | 4 | failed |  | killed \\| by signal 9 |" in markdown
    study = json.loads((tmp_path / "out/report.json").read_text())["sweeps"][0]["studies"]["rte"]
    assert [trial["flag"] for trial in study["best"]["trials"]] == flags
    assert study["best"]["median"] == 0.53


def test_the_last_line_of_a_run_counts_and_torn_ones_are_said(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", [1])
    add_trial(sweep, "one", LOW, 1, state="failed", error="first try")
    add_trial(sweep, "one", LOW, 1, [0.8])
    with (sweep / TRIALS).open("a") as file:
        file.write('{"study": "one", "par')
    found = read_sweep(sweep)
    assert [trial.score for trial in found.studies[0].trials] == [0.8]
    assert found.notes == [f"damaged lines of {TRIALS} were left out: 3"]


def test_one_sweep(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path / "sweep")
    page_path = report([sweep], tmp_path / "out")
    page = Page(page_path)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["curves.png", "hyperparameters.png", "report.html", "report.json", "report.md"]
    assert len(page.loads) == 2 * 2
    assert not re.search(r"https?:|url\(|@import", re.sub("base64,[A-Za-z0-9+/=]+", "", page_path.read_text()))
    markdown = (tmp_path / "out/report.md").read_text()
    assert "# Sweep sweep" in markdown
    row = "| one | accuracy ↑ | batch.global=16, optimizer.lr=0.0003 | 0.6900 | 0.6700 ± 0.044 | 0.7000, 0.6200, 0.6900"
    assert row in markdown
    assert "![curves](curves.png)" in markdown
    assert "All configurations of one" in page.text


def test_two_sweeps_are_compared(tmp_path: Path) -> None:
    first, second = a_sweep(tmp_path / "mlm", every=400), a_sweep(tmp_path / "capt", shift=0.02, every=400)
    add_trial(second, "two", {}, 1, [0.5])
    report([first, second], tmp_path / "out")
    markdown = (tmp_path / "out/report.md").read_text()
    assert "# Comparison of 2 sweeps" in markdown
    assert "| study, median | A: mlm | B: capt | B - A |" in markdown
    assert "| one | 0.6900 | 0.7100 | +0.0200 |" in markdown
    assert "| two |  | 0.5000 |  |" in markdown
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {"curves.png", "hyperparameters.png"}


def test_curves_of_seeds_and_their_median(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path / "sweep")
    study = only(sweep)
    curves = read_curves(study, study.configurations[1])
    assert curves is not None
    assert curves.seeds[0][1] == pytest.approx([0.6, 0.68, 0.7])
    steps, values = curves.median()
    assert (steps, values) == ([10, 20, 30], pytest.approx([0.59, 0.67, 0.69]))
    uneven = Curves("accuracy", [([10, 20, 2000], [1.0, 2.0, 9.0]), ([20, 2000], [4.0, 9.0])])
    assert uneven.median() == ([20, 2000], [3.0, 9.0])
    assert uneven.last == 2000


def test_curves_are_compared_at_the_same_configuration(tmp_path: Path) -> None:
    sweeps = [write_sweep(tmp_path / name, [1]) for name in "ab"]
    for sweep, scores in zip(sweeps, ((0.9, 0.8), (0.5, 0.8)), strict=True):
        for params, score in zip((LOW, HIGH), scores, strict=True):
            add_trial(sweep, "one", params, 1, [score])
    first, second = (only(sweep) for sweep in sweeps)
    assert first.best is not None
    assert first.best.params == LOW
    assert [c and c.params for c in comparable([first, second])] == [HIGH, HIGH]
    assert [c and c.params for c in comparable([first, None])] == [LOW, None]
    for sweep in sweeps:
        add_trial(sweep, "one", LOW, 2, [0.1])
    first, second = (only(sweep) for sweep in sweeps)
    assert [c and c.params for c in comparable([first, second])] == [LOW, LOW], "HIGH has one seed of two"
    add_trial(other := write_sweep(tmp_path / "c", [1]), "one", {"optimizer.lr": 1.0}, 1, [0.1])
    assert [c and c.params for c in comparable([first, only(other)])] == [LOW, {"optimizer.lr": 1.0}]


def test_a_sweep_whose_runs_were_removed_still_has_its_table(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path / "sweep")
    (sweep / "trials").rename(tmp_path / "elsewhere")
    study = only(sweep)
    assert all(read_curves(study, configuration) is None for configuration in study.configurations)
    report([sweep], tmp_path / "out")
    assert not (tmp_path / "out/curves.png").exists()
    assert "0.6900" in (tmp_path / "out/report.md").read_text()


def test_parameters_of_any_kind_are_drawn(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", [1])
    for kind, betas, size in (("lamb", [0.9, 0.98], 8), ("adamw", [0.9, 0.999], 16), ("adamw", [0.9, 0.98], 512)):
        add_trial(sweep, "one", {"optimizer.type": kind, "optimizer.betas": betas, "batch.global": size}, 1, [0.5])
    report([sweep], tmp_path / "out")
    assert (tmp_path / "out/hyperparameters.png").exists()


def test_the_tasks_own_sections_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package/glimmer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "config.py").write_text("from capt.pretrain.config.schema import Job as JOB\n")
    (package / "report.py").write_text(
        "from capt.pretrain.report.document import ReportSection, Table\n"
        "def sections(sweeps):\n"
        "    table = Table(['who'], [[sweeps[0].name]])\n"
        "    return [ReportSection('Glimmers', tables=[table], data={'glimmers': 3})]\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setitem(registry.TASKS, "glimmer", "glimmer")
    sweep = write_sweep(tmp_path / "sweep", [1])
    add_trial(sweep, "one", {}, 1, [0.5], config={"task": {"type": "glimmer"}})
    assert "Glimmers" in Page(report([sweep], tmp_path / "out")).text
    assert json.loads((tmp_path / "out/report.json").read_text())["Glimmers"] == {"glimmers": 3}
    other = a_sweep(tmp_path / "other")
    assert "Glimmers" not in Page(report([other], tmp_path / "out")).text


def test_what_is_no_sweep(tmp_path: Path) -> None:
    run, sweep = write_run(tmp_path / "run"), a_sweep(tmp_path / "sweep")
    assert (is_sweep(run), is_sweep(sweep)) == (False, True)
    with pytest.raises(DataError, match=r"sweep is a sweep and .*run is not; give runs or sweeps"):
        report([run, sweep], tmp_path / "out")
    begun = write_sweep(tmp_path / "begun", SEEDS)
    with pytest.raises(DataError, match=r"trials\.jsonl: no such file; a sweep folder holds trials\.jsonl once"):
        report([begun], tmp_path / "out")
    (begun / TRIALS).write_text("\n{}\n")
    with pytest.raises(DataError, match="no line is a finished trial"):
        report([begun], tmp_path / "out")
    (begun / TRIALS).write_text('{"run": "trials/one/x", "study": "one", "params": {}}\n')
    with pytest.raises(DataError, match=r"no line is a finished trial's .*left out: 1 \('seed'\)"):
        report([begun], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5000"), (1e-5, "1e-05"), (12345.678, "1.235e+04"), (0.0, "0.0000"), (-0.25, "-0.2500")]
)
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text
