"""The ``glue`` job: its recipe, what follows from the data, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capt.finetune.glue.config import GlueJob
from capt.finetune.glue.tasks import GLUE
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import job_from_mapping, load_job
from tests.finetune import glue_mapping

HERE = ["data.path=glue", "model.init=encoder"]


def _job(**changes: Any) -> GlueJob:
    job = job_from_mapping(glue_mapping(Path("."), **changes), "test")
    assert isinstance(job, GlueJob)
    return job


@pytest.mark.parametrize(
    ("task", "batch", "lr"),
    [
        ("cola", 16, 1e-5), ("sst2", 32, 1e-5), ("mrpc", 16, 1e-5), ("stsb", 16, 2e-5), ("qqp", 32, 1e-5),
        ("mnli", 32, 1e-5), ("qnli", 32, 1e-5), ("rte", 16, 2e-5), ("wnli", 16, 1e-5),
    ],
)  # fmt: skip
def test_shipped_jobs_are_robertas_recipe(task: str, batch: int, lr: float) -> None:
    job = load_job(task, HERE)
    assert isinstance(job, GlueJob)
    assert (job.data.task, job.batch.global_, job.optimizer.lr) == (task, batch, lr)
    assert job.checkpoint.best == GLUE[task].metric
    assert job.run.dir == Path("runs") / task
    adam = job.optimizer
    assert (adam.betas, adam.eps, adam.weight_decay, adam.clip) == ((0.9, 0.98), 1e-6, 0.1, 0.0)
    assert (job.schedule.epochs, job.schedule.type) == (10, "linear")
    assert job.schedule.warmup_ratio == (0.25 if task == "qqp" else 0.06)
    assert job.model.dropout == job.model.attention_dropout == 0.1


def test_steps_follow_from_the_data() -> None:
    rte = load_job("rte", HERE)
    assert isinstance(rte, GlueJob)
    job = rte.with_steps(2490).with_encoder({"model_type": "roberta"}, 514)
    assert (job.schedule.max_steps, job.schedule.warmup_steps, job.validate_.every) == (1557, 93, 156)
    assert (job.data.sequence_length, job.model.encoder) == (512, {"model_type": "roberta"})
    assert job.with_steps(2490).with_encoder({"model_type": "roberta"}, 514) == job, (
        "a resumed run completes its job once more"
    )
    assert job_from_mapping(job.model_dump(mode="json", by_alias=True), "again") == job


def test_the_smaller_number_of_steps_counts() -> None:
    capped = _job(schedule={"epochs": 2, "max_steps": 7, "warmup_ratio": 0.5}).with_steps(80)
    assert (capped.schedule.max_steps, capped.schedule.warmup_steps) == (7, 3)
    steps = _job(schedule={"epochs": None, "max_steps": 50, "warmup_ratio": None, "warmup_steps": 9})
    steps = steps.with_steps(80)
    assert (steps.schedule.max_steps, steps.schedule.warmup_steps) == (50, 9)
    warmup = _job(schedule={"epochs": 2, "warmup_epochs": 0.25}).with_steps(80).schedule
    assert (warmup.max_steps, warmup.warmup_steps) == (20, 2), "epochs of warmup count before their ratio"
    every = _job(validate={"per_epoch": 4}).with_steps(80)
    assert every.validate_.every == 3
    assert _job(validate={"per_epoch": None, "every": 5}).with_steps(80).validate_.every == 5


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_steps 9 is longer than the 3 steps"):
        _job(schedule={"max_steps": 10**6, "warmup_ratio": None, "warmup_steps": 9}).with_steps(10)
    with pytest.raises(ConfigError, match=r"schedule\.warmup_epochs 3 \(30 steps\) is longer than the 20 steps"):
        _job(schedule={"epochs": 2, "warmup_epochs": 3}).with_steps(80)
    with pytest.raises(ConfigError, match=r"data\.sequence_length 65 is longer than the encoder's 64 positions"):
        _job(data={"sequence_length": 65}).with_encoder({}, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"task": "rtee"}}, r"data\.task: 'rtee': unknown GLUE task 'rtee'; did you mean 'rte'"),
        ({"data": {"task": "ax"}}, "no training data"),
        ({"data": {"path": None}}, r"data\.path is missing"),
        ({"data": {"sequence_length": 4}}, "greater than or equal to 8"),
        ({"model": {"inti": "x"}}, r"model\.inti: unknown key; did you mean 'init'"),
        ({"schedule": {"epoch": 3}}, r"schedule\.epoch: unknown key; did you mean 'epochs'"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _job(**changes)


def test_the_encoder_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"rte: model\.init: required key is missing: a run or checkpoint of ours"):
        load_job("rte", ["data.path=glue"])
