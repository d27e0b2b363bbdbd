"""Table 3 and Figure 3 (centre): rows by initial model, medians over seeds, and what is synthetic is called so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from capt.pretrain.report.runs import RunRecord, read_run
from capt.pretrain.report.sweeps import read_sweep
from tests.studies.papers.visual import PUBLISHED, describe_initial, run_sections, sections
from tests.sweep_folders import add_trial, write_sweep


def pretrained(folder: Path, weight: float, answers: float = 0.0, source: str = "files") -> Path:
    """A finished run of ``capt_vl``, as far as a report reads it."""
    folder.mkdir(parents=True)
    config = {
        "task": {"type": "capt_vl"},
        "contrast": {"weight": weight},
        "objectives": {"answers": answers},
        "data": {"source": source},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def fine_tuned(folder: Path, task: str, init: Path | str, curve: list[float], every: int = 100, **data: Any) -> Path:
    folder.mkdir(parents=True)
    config = {"task": {"type": "visual"}, "data": {"task": task, **data}, "model": {"init": str(init)}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "status.json").write_text(json.dumps({"state": "done"}))
    more = {"consistency": 0.25, "validation_samples": 6982} if task == "nlvr2" else {}
    rows = [
        {"step": every * number, "samples": 8, "split": "validation", "accuracy": value, **more}
        for number, value in enumerate(curve, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[RunRecord]:
    capt = pretrained(tmp_path / "capt", 1.0)
    lxmert = pretrained(tmp_path / "lxmert", 0.0, answers=1.0)
    folders = [
        fine_tuned(tmp_path / f"{init.name}-{task}-{seed}", task, init, [low + seed / 100, high + seed / 100, low])
        for init, low, high in ((capt, 0.5, 0.6), (lxmert, 0.4, 0.58))
        for task in ("gqa", "nlvr2")
        for seed in (1, 2, 4)
    ]
    folders.append(fine_tuned(tmp_path / "none", "vqa", "scratch", [0.3], source="microworld"))
    return [read_run(folder) for folder in folders]


def test_rows_are_initial_models_and_cells_medians_over_seeds(runs: list[RunRecord]) -> None:
    (section,) = run_sections(runs)
    rows = {row[0]: dict(zip(section.tables[0].header, row, strict=True)) for row in section.tables[0].rows}
    assert list(rows) == [*PUBLISHED, "capt", "lxmert", "no pretraining"]
    assert (rows["CAPT"]["NLVR2 dev"], rows["ViLBERT"]["GQA test-dev"]) == ("75.12", "")
    assert rows["capt"]["GQA, validation"] == "62.00"
    assert rows["capt"]["NLVR2 dev"] == "62.00", "6,982 rows are the official dev set"
    assert rows["capt"]["NLVR2, validation"] == ""
    assert rows["capt"]["pretraining"] == "CAPT, without QA"
    assert rows["lxmert"]["pretraining"] == "LXMERT objectives, with QA"
    assert rows["no pretraining"]["VQA, validation"] == "30.00 (synthetic)"
    assert section.notes == ["synthetic data (microworld): VQA"]
    spread = {(row[0], row[1]): row[2:] for row in section.tables[1].rows}
    assert spread["lxmert", "NLVR2"] == ["3", "60.00", "60.33", "1.53", "59.00, 60.00, 62.00", "25.00"]


def test_other_files_than_the_official_dev_set_have_a_column_of_their_own(tmp_path: Path) -> None:
    run = fine_tuned(tmp_path / "run", "nlvr2", "scratch", [0.5])
    text = (run / "metrics.jsonl").read_text().replace("6982", "500")
    (run / "metrics.jsonl").write_text(text)
    (section,) = run_sections([read_run(run)])
    row = dict(zip(section.tables[0].header, section.tables[0].rows[-1], strict=True))
    assert (row["NLVR2 dev"], row["NLVR2, validation"]) == ("", "50.00")


def test_curves_compare_the_start_of_fine_tuning(runs: list[RunRecord]) -> None:
    (section,) = run_sections(runs)
    assert [figure.name for figure in section.figures] == ["finetuning-curves"]
    assert section.figures[0].light.png[:4] == b"\x89PNG"
    early = {row[0]: row[1:] for row in section.tables[2].rows}
    assert early["GQA"] == [f"{100 * (0.52 + 0.62 + 0.5) / 3:.2f}", f"{100 * (0.42 + 0.6 + 0.4) / 3:.2f}", ""]


def test_sweeps_show_the_best_configuration_of_each_study(tmp_path: Path) -> None:
    init = pretrained(tmp_path / "capt", 1.0, source="microworld")
    sweep = write_sweep(tmp_path / "mine", [1, 2])
    config = {"task": {"type": "visual"}, "data": {"task": "vqa"}, "model": {"init": str(init)}}
    for rate, score in ((1e-5, 0.6), (5e-5, 0.7)):
        for seed in (1, 2):
            add_trial(sweep, "vqa", {"optimizer.lr": rate}, seed, [score + seed / 100], config=config)
    add_trial(sweep, "other", {}, 1, [0.9])
    (section,) = sections([read_sweep(sweep)])
    row = dict(zip(section.tables[0].header, section.tables[0].rows[-1], strict=True))
    assert (row["model"], row["VQA, validation"]) == ("capt", "71.50")
    assert row["pretraining"] == "CAPT, without QA, on synthetic data"


def test_other_runs_add_nothing(tmp_path: Path) -> None:
    other = write_sweep(tmp_path / "other", [1])
    add_trial(other, "one", {}, 1, [0.9])
    assert sections([read_sweep(other)]) == []
    assert run_sections([]) == []


def test_an_initial_model_that_is_gone_has_a_name_only(tmp_path: Path) -> None:
    assert describe_initial(tmp_path / "gone" / "checkpoints" / "step-00000010", tmp_path)[:2] == ("gone", "")
    first = fine_tuned(tmp_path / "first", "gqa", pretrained(tmp_path / "capt", 1.0), [0.5])
    assert describe_initial(first, tmp_path)[:2] == ("first", "CAPT, without QA, then gqa")


def test_models_that_differ_in_the_seed_alone_share_a_row(tmp_path: Path) -> None:
    runs = []
    for seed, score in ((1, 0.5), (2, 0.7), (3, 0.6)):
        init = pretrained(tmp_path / f"capt-seed{seed}", 1.0)
        text = yaml.safe_load((init / "config.yaml").read_text())
        (init / "config.yaml").write_text(yaml.safe_dump({**text, "run": {"seed": seed, "dir": str(init)}}))
        runs.append(read_run(fine_tuned(tmp_path / f"vqa-{seed}", "vqa", init, [score])))
    longer = pretrained(tmp_path / "capt-longer", 2.0)
    runs.append(read_run(fine_tuned(tmp_path / "vqa-longer", "vqa", longer, [0.9])))
    (section,) = run_sections(runs)
    assert [row[:2] + row[2:4] for row in section.tables[1].rows] == [
        ["capt", "VQA", "3", "60.00"], ["capt-longer", "VQA", "1", "90.00"]
    ]  # fmt: skip
