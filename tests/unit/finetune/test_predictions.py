"""From a sweep to the zip: which checkpoint predicts which test set, and what is missing is said before any does."""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from typer.testing import CliRunner

import capt.finetune.glue.evaluate
from capt.finetune.glue.files import Examples
from capt.finetune.glue.submission import (
    SUBMISSION_FILES,
    best_checkpoints,
    predict_tests,
    prediction_summary,
)
from capt.finetune.glue.tasks import GLUE
from capt.launcher.commands.results import register
from capt.pretrain.base.errors import CheckpointError, DataError
from capt.pretrain.report.sweeps import read_sweep
from tests.studies.papers.glue import CAPT_TASKS
from tests.sweep_folders import add_trial, write_sweep
from tests.unit.finetune.test_files import HEADERS


def write_test_files(folder: Path) -> Path:
    """Test files of the sizes that a submission must have."""
    for output in SUBMISSION_FILES.values():
        header = HEADERS.get((output.task.name, "test"), HEADERS["rte", "test"])
        if output.task.name == "qnli":
            header = "index\tquestion\tsentence"
        if output.task.name == "stsb":
            header = HEADERS["stsb", "dev"].removesuffix("\tscore")
        cells = "\t".join(["x"] * header.count("\t"))
        rows = "".join(f"{number}\t{cells}\n" for number in range(output.rows))
        home = folder / output.task.folder
        home.mkdir(parents=True, exist_ok=True)
        (home / f"{output.split}.tsv").write_text(f"{header}\n{rows}")
    return folder


def add(sweep: Path, task: str, seed: int, score: float, data: Path, *, kept: bool = True) -> Path:
    config: dict[str, Any] = {
        "task": {"type": "glue"},
        "data": {"task": task, "path": str(data)},
        "model": {"init": "encoder"},
    }
    run = add_trial(sweep, task, {}, seed, [score], metric=GLUE[task].metric, config=config)
    best = run / "checkpoints/best"
    if kept:
        best.mkdir(parents=True)
        contents = {"config.yaml": yaml.safe_dump(config), "state.json": "{}"}
        files = {
            name: {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for name, text in contents.items()
        }
        about = {"task": "glue", "world_size": 1, "zero_stage": 0, "modules": {}}
        progress = {"step": 1, "samples": 1, "tokens": 1}
        manifest = {"format_version": 1, "progress": progress, **about, "files": files}
        for name, text in {**contents, "manifest.json": json.dumps(manifest)}.items():
            (best / name).write_text(text)
    return best


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Official sizes but for QQP, whose 390,965 rows take seconds each time; test_submission.py looks at them all."""
    with pytest.MonkeyPatch.context() as patch:
        few = replace(GLUE["qqp"], rows={**GLUE["qqp"].rows, "test": 500})
        patch.setitem(GLUE, "qqp", few)
        patch.setitem(SUBMISSION_FILES, "QQP", replace(SUBMISSION_FILES["QQP"], task=few))
        yield write_test_files(tmp_path_factory.mktemp("glue"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str]]:
    """Predictions without a model: class 1, or 2.5; records which checkpoint saw which file."""
    seen: list[tuple[Path, str]] = []

    def predict(checkpoint: Path, examples: Examples, progress: object = None) -> np.ndarray:
        seen.append((checkpoint, Path(examples.source).parent.name + "/" + Path(examples.source).name))
        if "STS-B" in examples.source:
            return np.full(len(examples), 2.5, dtype=np.float32)
        return np.ones(len(examples), dtype=np.int64)

    monkeypatch.setattr(capt.finetune.glue.evaluate, "predict", predict)
    return seen


def test_the_seed_with_the_median_of_each_task_predicts(
    tmp_path: Path, data: Path, calls: list[tuple[Path, str]], caplog: pytest.LogCaptureFixture
) -> None:
    sweep = write_sweep(tmp_path / "sweep", [1, 2, 3])
    for task in CAPT_TASKS:
        add(sweep, task, 1, 0.5, data)
        add(sweep, task, 2, 0.6, data)
        add(sweep, task, 3, 0.9, data)
    out = tmp_path / "submission.zip"
    app = typer.Typer(callback=lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["glue-submission", str(sweep), "--out", str(out)])
    assert result.exit_code == 0, result.exception
    assert zipfile.is_zipfile(out)
    used = {file: checkpoint.parent.parent.relative_to(sweep / "trials") for checkpoint, file in calls}
    assert used["RTE/test.tsv"] == Path("rte/s2")
    assert used["MNLI/test_matched.tsv"] == used["MNLI/test_mismatched.tsv"] == used["AX/test.tsv"] == Path("mnli/s2")
    assert len(calls) == 10
    assert "WNLI: the sweep has no study of it: its most frequent class is predicted for every row" in caplog.text
    assert "RTE        3,000  entailment 0, not_entailment 3,000" in result.output
    assert "WNLI         146  0 146, 1 0" in result.output


def test_a_study_of_wnli_is_used(
    tmp_path: Path, data: Path, calls: list[tuple[Path, str]], caplog: pytest.LogCaptureFixture
) -> None:
    sweep = write_sweep(tmp_path / "sweep", [1])
    for task in (*CAPT_TASKS, "wnli"):
        add(sweep, task, 1, 0.5, Path("gone"))
    with caplog.at_level(logging.WARNING):
        assert set(predict_tests(sweep, data)["WNLI"]) == {1}
    assert "most frequent" not in caplog.text


def test_what_is_missing_is_said_before_any_prediction(
    tmp_path: Path, data: Path, calls: list[tuple[Path, str]]
) -> None:
    sweep = write_sweep(tmp_path / "sweep", [1])
    for task in CAPT_TASKS[:6]:
        add(sweep, task, 1, 0.5, data)
    with pytest.raises(DataError, match="sweep: no study of QNLI, RTE; a submission needs every task"):
        predict_tests(sweep)
    add(sweep, "qnli", 1, 0.5, data)
    add(sweep, "rte", 1, 0.5, tmp_path)
    with pytest.raises(DataError, match=r"no test\.tsv or test\.tsv\.gz, nor a folder RTE"):
        predict_tests(sweep)
    short = tmp_path / "RTE"
    short.mkdir()
    (short / "test.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\n")
    with pytest.raises(DataError, match=r"RTE/test\.tsv: 1 rows; a submission needs the official 3,000, in order"):
        predict_tests(sweep)
    assert calls == []


def test_no_other_seed_stands_in_for_a_checkpoint_that_is_gone(tmp_path: Path, data: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", [1, 2])
    chosen = add(sweep, "rte", 1, 0.6, data)
    add(sweep, "rte", 2, 0.9, data)
    assert best_checkpoints(read_sweep(sweep)) == {"rte": chosen}
    (chosen / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"rte/s1/checkpoints/best: no checkpoint, .* sweep\.keep_checkpoints"):
        best_checkpoints(read_sweep(sweep))


def test_a_task_without_a_finished_trial(tmp_path: Path, data: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", [1])
    add_trial(sweep, "rte", {}, 1, [0.5], state="pruned", config={"task": {"type": "glue"}, "data": {"task": "rte"}})
    with pytest.raises(CheckpointError, match="no trial of rte is finished"):
        best_checkpoints(read_sweep(sweep))


def test_the_summary_counts_classes() -> None:
    text = prediction_summary({"RTE": np.array([0, 1, 1]), "STS-B": np.array([0.0, 5.0])})
    assert text.splitlines() == [
        "RTE            3  entailment 1, not_entailment 2",
        "STS-B          2  mean 2.500, from 0.000 to 5.000",
    ]
