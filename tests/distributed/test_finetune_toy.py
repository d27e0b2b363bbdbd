"""The shared fine-tuning under a task that is nothing like GLUE: it learns, validates, selects, resumes and dumps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capt.finetune.batches import to_device
from capt.finetune.evaluation import EvaluationSets, as_text, evaluate_checkpoint, results_of_all_rows
from capt.finetune.glue.evaluate import load_classifier
from capt.finetune.load import load_fine_tuned
from capt.pretrain.base.errors import CheckpointError, DataError
from capt.pretrain.engine.checkpoint import find_best
from capt.pretrain.registry import TASKS
from tests.runs import training_rows, validations
from tests.support import run_ranks, train_job
from tests.toy_finetune.config import ToyJob
from tests.toy_finetune.task import Inputs, Pair, Rows, SoftTargets, dump

TASKS["toy_finetune"] = "tests.toy_finetune"


def _train(mapping: dict[str, Any], resume: bool = False) -> int | str:
    return train_job(mapping, resume)  # a function of this module, so that the rank knows its task


def _mapping(run: Path, **changes: Any) -> dict[str, Any]:
    return {
        "task": {"type": "toy_finetune"},
        "run": {"dir": str(run), "log_every": 1, "tensorboard": False, "threads": 1},
        "batch": {"global": 8, "micro": 2},
        "schedule": {"epochs": 6, "warmup_epochs": 1},
        "optimizer": {"lr": 3e-2, "weight_decay": 0.0},
        "engine": {"zero_stage": 0},
        "validate": {"per_epoch": 2},
        "checkpoint": {"best": "accuracy", "keep": 2},
        **changes,
    }


def _losses(run: Path) -> list[tuple[float, ...]]:
    return [(row["step"], row["loss"], row["tokens"]) for row in training_rows(run)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("toy") / "run"
    assert run_ranks(_train, 2, _mapping(run)) == [0, 0]
    return run


def test_it_learns_in_the_steps_of_its_epochs_and_keeps_its_best(whole: Path) -> None:
    losses = _losses(whole)
    assert len(losses) == 28  # 6 epochs of 37 rows in batches of 8
    assert losses[-1][1] < 0.8 * losses[0][1]
    rates = [row["lr"] for row in training_rows(whole)]
    assert np.argmax(rates) == 3, "an epoch of warmup is 4 steps"
    values = {row["step"]: row["accuracy"] for row in validations(whole)}
    assert list(values) == [*range(3, 28, 3), 28], "every half of an epoch, and the end"
    best = json.loads((whole / "best.json").read_text())
    assert best["value"] == max(values.values()) == values[best["step"]] > 0.5
    assert find_best(whole).name == f"step-{best['step']:08d}"


def test_a_resumed_run_is_the_uninterrupted_one(whole: Path, tmp_path: Path) -> None:
    stopped = _mapping(tmp_path / "run", schedule={"epochs": 6, "warmup_epochs": 1, "stop_after": 11})
    assert run_ranks(_train, 2, stopped) == [75, 75]
    refused = run_ranks(_train, 1, _mapping(tmp_path / "run", rows=40), True)[0]
    assert "trained on toy-37, this job's rows is toy-40" in str(refused)
    assert run_ranks(_train, 2, _mapping(tmp_path / "run"), True) == [0, 0]
    assert _losses(tmp_path / "run") == _losses(whole)


def test_evaluation_and_dump_repeat_the_best_validation(whole: Path, tmp_path: Path) -> None:
    trained = load_fine_tuned(whole, ToyJob, "toy_finetune", lambda job, checkpoint: Pair())
    rows, best = Rows(23, 2), json.loads((whole / "best.json").read_text())
    result = evaluate_checkpoint(
        trained, EvaluationSets("toy", {"": rows, "_other": Rows(5, 3)}, SoftTargets()), batch=4
    )
    assert result["metrics"]["accuracy"] == best["value"]
    assert result["rows"] == {"dev": 23, "dev_other": 5}
    assert "toy (dev 23 rows, dev_other 5 rows)" in as_text(result)
    results = results_of_all_rows(trained.model, rows, SoftTargets(), 4, torch.device("cpu"))
    assert {name: values.shape for name, values in results.items()} == {"answer": (23,), "probability": (23,)}
    answers = json.loads(dump(results, tmp_path / "answers.json", 23).read_text())
    assert [row["answer"] for row in answers] == results["answer"].tolist()
    with pytest.raises(DataError, match=r"short\.json was not written: 23 answers; there are 24 questions"):
        dump(results, tmp_path / "short.json", 24)
    assert [path.name for path in tmp_path.iterdir()] == ["answers.json"]
    with pytest.raises(CheckpointError, match="a checkpoint of task toy_finetune, not of glue"):
        load_classifier(whole)


def _accuracies() -> tuple[list[int], list[int]]:
    torch.manual_seed(0)
    rows, model = Rows(23, 2), Pair().eval()
    share = results_of_all_rows(model, rows, SoftTargets(), 4, torch.device("cpu"))["answer"]
    inputs = rows.batch(np.arange(23)).inputs
    return share.tolist(), model(*inputs).argmax(1).tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_has_the_results_of_all_rows_in_order(world: int) -> None:
    for gathered, expected in run_ranks(_accuracies, world):
        assert gathered == expected


def test_structures_keep_their_kind_on_another_device() -> None:
    batch = Rows(4, 1).batch(np.arange(2)).to(torch.device("meta"))
    assert isinstance(batch.inputs, Inputs)
    assert [picture.device.type for picture in batch.inputs.pictures] == ["meta", "meta"]
    assert (batch.inputs.scale, batch.labels["soft"].device.type) == (2.0, "meta")
    assert to_device([None, "text"], torch.device("meta")) == [None, "text"]
