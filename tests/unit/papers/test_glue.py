"""Table 2: our medians beside the published rows, gaps in points, averages, and what does not compare."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from capt.finetune.glue.tasks import GLUE
from capt.pretrain.config.load import load_mapping
from capt.pretrain.report.sweeps import read_sweep
from tests.studies.papers.__main__ import write_papers
from tests.studies.papers.glue import (
    CAPT_TASKS,
    PUBLISHED_DEV,
    PUBLISHED_TEST,
    capt_average,
    leaderboard_average,
    results_of_sweep,
    sections,
)
from tests.sweep_folders import add_trial, write_sweep

SEEDS = [1, 2, 3]
MORE: dict[str, dict[str, float]] = {
    "cola": {"accuracy": 0.8},
    "mrpc": {"f1": 0.95},
    "stsb": {"spearman": 0.9},
    "qqp": {"f1": 0.88},
    "mnli": {"accuracy_mismatched": 0.9},
}


def glue_sweep(folder: Path, tasks: tuple[str, ...] = CAPT_TASKS, **more: float) -> Path:
    """Each task scores what CAPT is published with, in the median of its seeds."""
    sweep = write_sweep(folder, SEEDS)
    for task, published in zip(CAPT_TASKS, PUBLISHED_DEV["CAPT"], strict=False):
        if task in tasks:
            for seed, shift in zip(SEEDS, (-0.01, 0.0, 0.02), strict=True):
                add(sweep, task, seed, published / 100 + shift, **{**MORE.get(task, {}), **more})
    return sweep


def add(sweep: Path, task: str, seed: int, score: float, study: str | None = None, **more: float) -> None:
    metric, name = GLUE[task].metric, study or task
    config: dict[str, Any] = {"task": {"type": "glue"}, "data": {"task": task}}
    add_trial(sweep, name, {"optimizer.lr": 1e-5}, seed, [score], metric=metric, config=config, **more)


def rows_of(markdown: str, source: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in markdown.splitlines() if f"| {source}" in line]
    return {cells[0]: [cell.strip() for cell in cells[2:]] for cells in lines}


def test_the_published_rows_stand_beside_ours(tmp_path: Path) -> None:
    write_papers([glue_sweep(tmp_path / "mine")], tmp_path / "out")
    markdown = (tmp_path / "out/report.md").read_text()
    header = "| model | source | CoLA | SST-2 | MRPC | STS-B | QQP | MNLI | QNLI | RTE | Avg | Leaderboard |"
    assert header in markdown
    published = rows_of(markdown, "published, dev")
    assert list(published) == ["BERT", "XLNet", "RoBERTa", "ELECTRA", "CAPT"]
    assert published["RoBERTa"][:9] == ["68.0", "96.4", "90.9", "92.4", "92.2", "90.2", "94.7", "86.6", "88.9"]
    ours = rows_of(markdown, "ours, dev, median of 3 seeds")["mine"]
    assert ours[:8] == published["CAPT"][:8]
    leaderboard = (69.2 + 96.5 + (92.1 + 95) / 2 + (92.5 + 90) / 2 + (92.3 + 88) / 2 + (90.7 + 90) / 2 + 95 + 88) / 8
    assert ours[8:] == ["89.5", f"{leaderboard:.1f}"]
    assert rows_of(markdown, "mean")["mine"][0] == f"{69.2 + 1 / 3:.1f}"
    assert rows_of(markdown, "standard deviation")["mine"][0] == "1.53"
    data = json.loads((tmp_path / "out/report.json").read_text())
    assert data["GLUE (CAPT, Table 2)"]["mine"]["leaderboard_average"] == pytest.approx(leaderboard / 100)


def test_gaps_are_in_points_to_each_row(tmp_path: Path) -> None:
    (section,) = sections([read_sweep(glue_sweep(tmp_path / "mine"))])
    gaps = {row[0]: row[2:] for row in section.tables[2].rows}
    assert list(gaps) == [f"mine - {model}" for model in PUBLISHED_DEV]
    assert [float(cell) for cell in gaps["mine - CAPT"]] == [0.0] * 9
    assert gaps["mine - RoBERTa"][:8] == ["+1.2", "+0.1", "+1.2", "+0.1", "+0.1", "+0.5", "+0.3", "+1.4"]
    data = section.data["mine"]
    assert data["capt_average"] == pytest.approx(0.895375)
    assert data["gaps"]["BERT"]["rte"] == pytest.approx(17.6)
    assert data["medians"]["mnli"]["accuracy_mismatched"] == 0.9


def test_a_sweep_over_some_tasks_has_no_average_of_all(tmp_path: Path) -> None:
    (section,) = sections([read_sweep(glue_sweep(tmp_path / "mine", ("cola", "rte")))])
    assert section.notes == [
        "not measured: SST-2, MRPC, STS-B, QQP, MNLI, QNLI; Avg stays empty, "
        "the average of the measured columns is beside it"
    ]
    table = section.tables[0]
    assert table.header[-3:] == ["Avg", "Avg of 2 measured", "Leaderboard"]
    by_model = {row[0]: row for row in table.rows}
    assert by_model["mine"][2:] == ["69.2", *[""] * 6, "88.0", "", "78.6", ""]
    assert by_model["BERT"][-3:] == ["84.0", f"{(60.6 + 70.4) / 2:.1f}", ""]


def test_seeds_that_are_no_result_mark_their_column(tmp_path: Path) -> None:
    sweep = glue_sweep(tmp_path / "mine", ("cola",), degenerate=0.0, baseline=0.0)
    for seed in SEEDS:
        add(sweep, "rte", seed, 0.53, degenerate=float(seed == 1), baseline=0.5)
    row = sections([read_sweep(sweep)])[0].tables[0].rows[-1]
    assert row[2] == "69.2"
    assert "53.0†" in row


def test_dev_sets_that_are_not_the_official_ones_are_said(tmp_path: Path) -> None:
    sweep = glue_sweep(tmp_path / "mine", ("rte",), validation_samples=200)
    (section,) = sections([read_sweep(sweep)])
    assert section.notes[0].startswith("mine: RTE was measured on 200 dev rows, the official set has 277")
    assert not any("277" in n for n in sections([read_sweep(glue_sweep(tmp_path / "o", ("rte",)))])[0].notes)
    whole = glue_sweep(tmp_path / "whole", ("mnli",), validation_samples=9815 + 9832)
    assert not any("official set" in note for note in sections([read_sweep(whole)])[0].notes)


def test_two_sweeps_have_a_row_each(tmp_path: Path) -> None:
    sweeps = [read_sweep(glue_sweep(tmp_path / name, ("cola", "rte"))) for name in ("mlm", "capt")]
    (section,) = sections(sweeps)
    assert [row[0] for row in section.tables[0].rows] == [*PUBLISHED_DEV, "A: mlm", "B: capt"]
    assert len(section.tables[2].rows) == 2 * len(PUBLISHED_DEV)


def test_the_better_of_two_studies_counts(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "mine", [1])
    add(sweep, "rte", 1, 0.6, study="rte-from-mnli")
    add(sweep, "rte", 1, 0.5, study="rte")
    found = results_of_sweep("mine", read_sweep(sweep))
    assert found.studies["rte"].name == "rte-from-mnli"
    assert found.notes == ["mine: rte and rte-from-mnli are both rte: the better counts"]


def test_other_tasks_and_other_metrics_have_no_place_in_the_table(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "mine", [1])
    add_trial(sweep, "toy", {}, 1, [0.5])
    assert sections([read_sweep(sweep)]) == []
    config = {"task": {"type": "glue"}, "data": {"task": "rte"}}
    add_trial(sweep, "rte", {}, 1, [0.5], metric="loss", mode="min", config=config)
    found = results_of_sweep("mine", read_sweep(sweep))
    assert found.studies == {}
    assert found.notes == ["mine: rte was selected by loss, no metric of RTE"]


def pretrained(folder: Path, name: str, seed: int, **contrast: Any) -> str:
    """The last checkpoint of a run of pretraining that has logged a step."""
    run = folder / f"{name}-seed{seed}"
    run.mkdir(parents=True)
    config = {"base": "capt_tiny", "run": {"seed": seed, "dir": str(run)}, "contrast": contrast}
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    (run / "config.yaml").write_text(yaml.safe_dump(load_mapping(folder / "job.yaml")))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "samples": 8, "loss": 1.0}) + "\n")
    (run / "status.json").write_text(json.dumps({"state": "done"}))
    return str(run / "checkpoints/step-00000001")


def test_figure_3_has_a_row_for_each_pretraining_and_the_mean_over_its_seeds(tmp_path: Path) -> None:
    """Literally: of each run the best rate by the median of its seeds; then mean and deviation over the runs."""
    rng, queues, kinds = random.Random(3), (0, 64, 256), ("inverted_triangle", "constant")
    sweep = write_sweep(tmp_path / "glue", SEEDS)
    expected: dict[tuple[int, str], list[float]] = {}
    for queue, kind, seed in itertools.product(queues, kinds, (1, 2)):
        own: dict[str, Any] = {
            "queue": queue,
            "temperature": {"type": kind, "value": 0.1} if kind == "constant" else {},
        }
        init = pretrained(tmp_path / "first", f"{queue}-{kind}", seed, **own)
        best = []
        for task in ("cola", "rte"):
            by_rate = []
            for rate in (1e-5, 2e-5):
                scores = [rng.random() for _ in SEEDS]
                by_rate.append(sorted(scores)[1])
                for number, score in zip(SEEDS, scores, strict=True):
                    add_trial(
                        sweep, task, {"optimizer.lr": rate, "model.init": init}, number, [score],
                        metric=GLUE[task].metric, config={"task": {"type": "glue"}, "data": {"task": task}},
                    )  # fmt: skip
            best.append(max(by_rate))
        expected.setdefault((queue, kind), []).append(statistics.fmean(best))
    write_papers([sweep], tmp_path / "out")
    data = json.loads((tmp_path / "out/report.json").read_text())
    assert "GLUE (CAPT, Table 2)" not in data, "a best setting of several pretrainings is no model's row"
    rows = {
        (int(row["pretraining"]["contrast.queue"]), row["pretraining"]["contrast.temperature.type"]): row["Avg"]
        for row in data["GLUE by pretraining (CAPT, Figure 3)"]["rows"]
    }
    assert rows == {key: pytest.approx(values) for key, values in expected.items()}
    markdown = (tmp_path / "out/report.md").read_text()
    first = expected[0, "inverted_triangle"]
    assert f"{100 * statistics.fmean(first):.1f} ± {100 * statistics.stdev(first):.1f} |" in markdown
    assert (tmp_path / "out/glue-by-pretraining.png").stat().st_size > 1000
    assert "one pretraining run a row" not in markdown


def test_an_initial_model_that_is_gone_is_named(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "glue", [1])
    for number, init in enumerate((pretrained(tmp_path / "first", "a", 1, queue=0), str(tmp_path / "gone"))):
        add_trial(
            sweep, "rte", {"model.init": init, "n": number}, 1, [0.5], degenerate=1.0,
            config={"task": {"type": "glue"}, "data": {"task": "rte"}},
        )  # fmt: skip
    (section,) = sections([read_sweep(sweep)])
    assert any("gone was left out" in note for note in section.notes)
    assert any(note.startswith("one pretraining run a row") for note in section.notes)
    assert any(note.startswith("1 of the trials that count predicted a constant") for note in section.notes)


def scores(values: tuple[float, ...]) -> dict[str, dict[str, float]]:
    names = {"cola": "matthews", "stsb": "pearson"}
    return {task: {names.get(task, "accuracy"): value} for task, value in zip(CAPT_TASKS, values, strict=False)}


def test_capts_average_is_that_of_its_table() -> None:
    """The averages printed in Table 2 follow from its eight columns; test rows too."""
    for values in (*PUBLISHED_DEV.values(), *PUBLISHED_TEST.values()):
        average = capt_average(scores(values[:8]))
        assert average == pytest.approx(values[8], abs=0.051)
    assert capt_average(scores((69.2, 96.5, 92.1, 92.5, 92.3, 90.7, 95.0, 88.0))) == pytest.approx(89.5375)
    assert capt_average(scores(PUBLISHED_DEV["CAPT"][:7])) is None


def test_the_leaderboards_average_averages_a_tasks_metrics_first() -> None:
    table = scores((0.6, 0.9, 0.8, 0.9, 0.8, 0.7, 0.9, 0.6))
    assert leaderboard_average(table) is None
    for task, name, value in (("mrpc", "f1", 0.9), ("stsb", "spearman", 0.8), ("qqp", "f1", 0.7)):
        table[task][name] = value
    table["mnli"]["accuracy_mismatched"] = 0.72
    expected = (0.6 + 0.9 + 0.85 + 0.85 + 0.75 + 0.71 + 0.9 + 0.6) / 8
    assert leaderboard_average(table) == pytest.approx(expected)
    table["wnli"] = {"accuracy": 0.5}
    assert leaderboard_average(table) == pytest.approx((8 * expected + 0.5) / 9)
