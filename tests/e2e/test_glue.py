"""A ``glue`` job from start to export: it learns, resumes to the digit, is the same on two ranks, keeps its best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from capt.finetune.glue.config import GlueJob
from capt.finetune.glue.evaluate import as_text, load_classifier, predict
from capt.finetune.glue.evaluate import command as evaluate
from capt.finetune.glue.export import command as export
from capt.finetune.glue.files import read_split
from capt.finetune.glue.tasks import GLUE
from capt.finetune.load import load_backbone
from capt.finetune.task import best_so_far
from capt.launcher.cli import app
from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.engine.checkpoint import find_best, read_job
from tests.finetune import glue_mapping, write_encoder, write_task
from tests.runs import rows_of
from tests.support import run_ranks, train_job


def _rows(run_dir: Path | str, split: str | None = None) -> list[dict[str, Any]]:
    return [row for row in rows_of(run_dir) if row.get("split") == split]


def _losses(run_dir: Path | str) -> list[tuple[float, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in _rows(run_dir)]


def _in(mapping: dict[str, Any], run_dir: Path, **schedule: Any) -> dict[str, Any]:
    schedule = {**mapping["schedule"], **schedule}
    return {**mapping, "run": {**mapping["run"], "dir": str(run_dir)}, "schedule": schedule}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glue")
    write_encoder(folder / "encoder")
    for task, train in (("rte", 61), ("stsb", 61), ("mnli", 61), ("cola", 200)):
        write_task(folder / "glue", task, train=train, dev=31)
    return folder


@pytest.fixture(scope="module")
def learnt(folder: Path) -> Path:
    """CoLA's stand-in (does a sentence begin with "No"?), learnt with the best step kept."""
    mapping = glue_mapping(
        folder, "cola", batch={"global": 8, "micro": 8}, schedule={"epochs": 6},
        checkpoint={"best": "matthews", "keep": 1},
    )  # fmt: skip
    mapping = _in(mapping, folder / "learnt")
    assert run_ranks(train_job, 1, mapping) == [0]
    return folder / "learnt"


def test_it_learns_and_reports_the_tasks_metrics(learnt: Path) -> None:
    validations = _rows(learnt, "validation")
    assert [row["step"] for row in validations] == [25, 50, 75, 100, 125, 150]
    assert {"matthews", "accuracy", "loss", "degenerate", "baseline"} <= validations[0].keys()
    assert max(row["matthews"] for row in validations) > 0.9
    best = json.loads((learnt / "best.json").read_text())
    assert best["value"] == max(row["matthews"] for row in validations)
    assert find_best(learnt).name == f"step-{best['step']:08d}"
    job = read_job(find_best(learnt))
    assert isinstance(job, GlueJob)
    said = f"best matthews {best['value']:.4f} at epoch {best['step'] / 25:.3g}, step {best['step']},"
    assert best_so_far(learnt, job, 200) == said
    assert best_so_far(learnt.parent, job, 200) is None


def test_evaluation_and_prediction_repeat_the_best_validation(learnt: Path, folder: Path) -> None:
    best = json.loads((learnt / "best.json").read_text())
    row = next(row for row in _rows(learnt, "validation") if row["step"] == best["step"])
    result = evaluate(learnt, out=folder / "evaluation.json")
    assert json.loads((folder / "evaluation.json").read_text())["metrics"] == result["metrics"]
    for name, value in result["metrics"].items():
        assert value == pytest.approx(row[name], abs=1e-6)
    assert result["rows"] == {"dev": 31}
    assert "matthews" in as_text(result)
    examples = read_split(folder / "glue", GLUE["cola"], "dev")
    seen: list[tuple[int, int]] = []
    found = predict(learnt, examples, batch=7, progress=lambda done, total: seen.append((done, total)))
    assert examples.labels is not None
    assert np.mean(found == examples.labels) == pytest.approx(row["accuracy"])
    assert seen[-1] == (31, 31)
    with pytest.raises(ConfigError, match="a task of single texts"):
        predict(learnt, read_split(folder / "glue", GLUE["rte"], "dev"))


def test_the_commands_know_a_fine_tuned_checkpoint(learnt: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    found = runner.invoke(app, ["evaluate", str(learnt), "--json"])
    assert json.loads(found.stdout)["metrics"]["matthews"] > 0.9
    assert runner.invoke(app, ["convert", str(learnt), str(tmp_path / "hf"), "--to", "hf"]).exit_code == 0
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    for arguments, message in (
        (["evaluate", str(learnt), "--sts", "x"], "--sts has no meaning"),
        (["convert", str(learnt), str(tmp_path / "st"), "--to", "word2vec"], "can be written as hf"),
    ):
        refused = runner.invoke(app, arguments)
        assert isinstance(refused.exception, ConfigError)
        assert message in str(refused.exception)


def test_files_that_have_moved_can_be_named(learnt: Path, folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder / "glue", moved)
    assert evaluate(learnt, data=moved)["metrics"] == evaluate(learnt)["metrics"]


def test_export_is_transformers_own_class(learnt: Path, tmp_path: Path) -> None:
    from transformers import pipeline

    out = export(learnt, tmp_path / "out", to="hf")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["RobertaForSequenceClassification"]
    assert config["id2label"] == {"0": "unacceptable", "1": "acceptable"}
    classify = pipeline("text-classification", model=str(out), device="cpu")
    labels = [found["label"] for found in classify(["No bird sings the night.", "Yes bird sings the night."])]
    assert labels == ["acceptable", "unacceptable"]
    with pytest.raises(CheckpointError, match="not empty"):
        export(learnt, out, to="hf")


def test_a_run_starts_from_the_encoder_of_another_task(learnt: Path, folder: Path, tmp_path: Path) -> None:
    """MNLI initialisation: the encoder is kept, the head is not."""
    first = load_classifier(learnt).model
    encoder = load_backbone(learnt).encoder.state_dict()
    assert all(torch.equal(encoder[name], tensor) for name, tensor in first.encoder.model.state_dict().items())
    mapping = _in(glue_mapping(folder, model={"init": str(learnt)}), tmp_path / "run", max_steps=1)
    assert run_ranks(train_job, 1, mapping) == [0]
    second = load_classifier(tmp_path / "run").model
    for name, tensor in second.encoder.model.state_dict().items():
        torch.testing.assert_close(tensor, encoder[name], rtol=0, atol=4e-3)  # one step at a rate of 3e-3
    assert not torch.allclose(first.dense.weight, second.dense.weight, atol=0.02)


def test_a_run_that_was_killed_in_its_second_epoch_repeats_it(folder: Path, tmp_path: Path) -> None:
    """At ZeRO 3 with dropout: it has the first epoch's checkpoint alone. Both of MNLI's dev sets, no row twice."""
    mapping = glue_mapping(
        folder, "mnli", model={"init": str(folder / "encoder"), "dropout": 0.1, "attention_dropout": 0.1},
        engine={"zero_stage": 3}, validate={"per_epoch": 2}, checkpoint={"keep": 2},
    )  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_ranks(train_job, 2, _in(mapping, whole)) == [0, 0]
    saved = sorted(path.name for path in (whole / "checkpoints").glob("step-*"))
    assert saved == ["step-00000008", "step-00000016"], "one an epoch"
    last, alone = _rows(whole, "validation")[-1], evaluate(whole)
    assert alone["rows"] == {"dev": 31, "dev_mismatched": 31}
    for name in ("accuracy", "accuracy_mismatched", "loss", "loss_mismatched"):
        assert last[name] == pytest.approx(alone["metrics"][name], abs=1e-6)
    shutil.copytree(whole, killed, symlinks=True)
    shutil.rmtree(killed / "checkpoints" / saved[1])
    assert run_ranks(train_job, 2, _in(mapping, killed), True) == [0, 0]
    assert len(_losses(killed)) == 16
    assert _losses(killed) == _losses(whole)


def test_two_ranks_are_one_rank(folder: Path, tmp_path: Path) -> None:
    mapping = glue_mapping(folder, "stsb")
    assert run_ranks(train_job, 1, _in(mapping, tmp_path / "one")) == [0]
    assert run_ranks(train_job, 2, _in(mapping, tmp_path / "two")) == [0, 0]
    np.testing.assert_allclose(_losses(tmp_path / "one"), _losses(tmp_path / "two"), rtol=2e-4)
    one, two = (_rows(tmp_path / name, "validation")[-1] for name in ("one", "two"))
    assert one.keys() == two.keys() >= {"pearson", "spearman", "loss"}
    assert one["pearson"] == pytest.approx(two["pearson"], abs=2e-3)
    scores = predict(tmp_path / "one", read_split(folder / "glue", GLUE["stsb"], "dev"))
    assert scores.dtype == np.float32
    assert scores.min() >= 0
    assert scores.max() <= 5
    out = export(tmp_path / "one", tmp_path / "out", to="hf")  # compares the logits, five times ours
    assert json.loads((out / "config.json").read_text())["problem_type"] == "regression"


def test_an_encoder_of_transformers_goes_the_same_way(folder: Path, tmp_path: Path) -> None:
    init = write_encoder(tmp_path / "bert", "BertForMaskedLM")
    mapping = glue_mapping(folder, "rte", model={"init": str(init)}, data={"max_train": 24})
    assert run_ranks(train_job, 1, _in(mapping, tmp_path / "run", epochs=1)) == [0]
    assert len(_rows(tmp_path / "run")) == 3
    shutil.rmtree(init)  # the checkpoint needs nothing beside itself
    assert evaluate(tmp_path / "run")["metrics"]["loss"] == pytest.approx(
        _rows(tmp_path / "run", "validation")[-1]["loss"]
    )
    out = export(tmp_path / "run", tmp_path / "out", to="hf")
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]


def test_mistakes_end_with_their_reason(folder: Path, learnt: Path, tmp_path: Path) -> None:
    mapping = glue_mapping(folder)
    other = run_ranks(train_job, 1, _in(mapping, learnt), True)[0]
    assert "trained on cola, this job's data.task is rte" in str(other)
    empty = {**mapping, "data": {**mapping["data"], "path": str(tmp_path)}}
    assert "train.tsv" in str(run_ranks(train_job, 1, _in(empty, tmp_path / "a"))[0])
    metric = {**mapping, "checkpoint": {"best": "accuracie"}}
    message = str(run_ranks(train_job, 1, _in(metric, tmp_path / "b", epochs=1))[0])
    assert "accuracie" in message
    assert "accuracy" in message
    with pytest.raises(CheckpointError):
        load_classifier(folder / "encoder")
