"""Defaults of a job of pairs that follow the data and the encoder, and old jobs, which keep those that they had."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.config.load import job_from_mapping, load_job
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.engine.callbacks.progress import validation_summary
from capt.pretrain.engine.judgement import direction, error_of
from capt.pretrain.engine.run_folder import _given_keys_of_another_job
from capt.pretrain.pairs.config import PairJob
from capt.pretrain.pairs.load import own_length, reading
from capt.pretrain.pairs.metric_names import RECALLS
from capt.pretrain.pairs.prepare import held_out_share
from capt.pretrain.pairs.sources import longest_behind
from capt.pretrain.pairs.task import PairTask
from capt.pretrain.pairs.validation import standard_error
from tests.pairs import pairs_mapping, write_pairs

NAMED = ["data.files=pairs.jsonl", "model.init=encoder"]


def _job(config: str, *overrides: str) -> PairJob:
    job = load_job(config, [*NAMED, *overrides])
    assert isinstance(job, PairJob)
    return job


@pytest.mark.parametrize(
    ("rows", "epochs"), [(502, 10.0), (2_200, 10.0), (25_600, 10.0), (100_000, 2.56), (256_000, 1.0), (10**6, 1.0)]
)
def test_epochs_follow_from_the_number_of_pairs(rows: int, epochs: float) -> None:
    made = _job("capt_pairs").schedule.in_steps(rows, 256)
    assert made.max_steps == math.ceil(epochs * rows / 256)
    assert made.warmup_steps == int(0.1 * made.max_steps)
    assert made.in_steps(rows, 256) == made, "a resumed run has the same steps"


def test_steps_and_epochs_take_the_place_of_each_other() -> None:
    steps = _job("capt_pairs", "schedule.max_steps=400").schedule
    assert (steps.epochs, steps.max_steps, steps.warmup_steps) == (None, 400, 100), "as before there were epochs"
    assert steps.in_steps(2_200, 256) == steps
    epochs = _job("pairs_tiny", "schedule.epochs=3").schedule.in_steps(2_560, 256)
    assert epochs.max_steps == 30
    short = _job("capt_pairs", "schedule.epochs=3", "schedule.warmup_ratio=null")
    with pytest.raises(ValueError, match="warmup_steps 100 is longer than the 30 steps of 3 epochs of 2,560 pairs"):
        short.schedule.in_steps(2_560, 256)
    both = _job("capt_pairs", "schedule.epochs=3", "schedule.max_steps=7", "schedule.warmup_steps=0").schedule
    assert both.in_steps(2_560, 256).max_steps == 7, "the fewer of both"
    assert _job("pairs_weak").schedule.in_steps(14_000 * 16_384, 16_384).max_steps == 14_000


def test_a_run_from_before_keeps_its_defaults(tmp_path: Path) -> None:
    """The merged job of an older release has all keys that there were, and none of the later ones."""
    mapping = pairs_mapping(tmp_path, schedule={"max_steps": 1000, "warmup_steps": 100})
    mapping["data"] |= {"validation_fraction": 0.02, "sequence_length": None, "query_length": None}
    job = job_from_mapping(mapping, "config.yaml")
    assert isinstance(job, PairJob)
    assert (job.schedule.epochs, job.schedule.in_steps(60, 8).max_steps) == (None, 1000)
    assert job.data.validation_fraction == 0.02
    (source,) = job.data.each()
    assert (source.document_length, source.own_length) == (None, None)
    assert longest_behind(0, "", source.document_length, 512, "", source.own_length) == 128


def test_a_run_whose_steps_were_computed_is_resumed_by_the_same_job(tmp_path: Path) -> None:
    job = _job("capt_pairs")
    written = job.model_copy(update={"schedule": job.schedule.in_steps(2_200, 256)})
    (tmp_path / "config.yaml").write_text(job_to_yaml(written))
    assert _given_keys_of_another_job(tmp_path, job) == {}
    assert _given_keys_of_another_job(tmp_path, _job("capt_pairs", "schedule.epochs=2")) == {
        "schedule.epochs": ("auto", 2.0)
    }


@pytest.mark.parametrize(
    ("pairs", "share"), [(0, 0.1), (60, 0.1), (2_000, 0.1), (2_500, 0.08), (10_000, 0.02), (12_345, 0.02)]
)
def test_so_many_pairs_are_held_out_that_a_recall_means_something(pairs: int, share: float) -> None:
    rows: list[Any] = [(str(number), None) for number in range(pairs)]
    found, kept = held_out_share(iter(rows))
    assert found == pytest.approx(share)
    assert list(kept) == rows, "each pair once, in its place"


def test_a_recall_has_a_standard_error() -> None:
    assert standard_error(0.5, 200) == pytest.approx(math.sqrt(0.25 / 204))
    assert standard_error(1.0, 39) == pytest.approx(0.0321, abs=1e-4), "all of few found is not certain"
    values = {"recall/to_document": 0.9487, error_of("recall/to_document"): 0.0389, "mrr/to_document": 0.97}
    shown = validation_summary(values, _job("capt_pairs"))
    assert shown == "recall/to_document 0.9487 ±0.039  mrr/to_document 0.97"
    assert direction(error_of("recall/to_document")) == 0
    assert {error_of(name) for name in RECALLS} <= _job("capt_pairs").metric_names()


def test_texts_are_as_long_as_the_encoder_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mapping = pairs_mapping(tmp_path)
    del mapping["data"]["sequence_length"], mapping["data"]["validation_fraction"]
    encoder = tmp_path / "encoder"
    assert own_length(encoder, 64) == 64, "its positions, where the folder does not say"
    assert own_length(encoder, 8192) == 512
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 10}')
    write_pairs(tmp_path / "pairs.jsonl", 80)
    with caplog.at_level(logging.INFO):
        task = PairTask(job_from_mapping(mapping, "test"), tmp_path / "run")
    assert task.job.data.own_length == 10
    assert "cut to 10 tokens (data.sequence_length, or query_length of a side)" in caplog.text
    assert task.pools.pairs is not None
    assert 2 <= len(task.pools.pairs) <= 9
    assert "step" in caplog.text
    # The written job says the length by itself, for the export and for a resume, whatever becomes of model.init.
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    path = tmp_path / "config.yaml"
    path.write_text(job_to_yaml(task.job))
    again = load_job(str(path), resolved=True)
    assert isinstance(again, PairJob)
    assert reading(again, task.tokenizer, 64)[1:] == (10, 10)
    assert PairTask(again, tmp_path / "run").job.data.own_length == 10
