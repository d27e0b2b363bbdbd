"""The vision-language job through its real entry: what a resumed run keeps, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from capt.pretrain.config.load import load_mapping
from capt.pretrain.engine.checkpoint import find_checkpoint
from tests.runs import rows_of
from tests.support import run_ranks, stopped_at, train_seen
from tests.vision_language import vision_language_mapping, write_sentences, write_small_store


def test_a_run_keeps_what_it_has_made_of_its_sentences(tmp_path: Path) -> None:
    """Tokenizer and answer table, where the sentences change and the cache is gone; other data must be meant."""
    job = vision_language_mapping(tmp_path)
    assert run_ranks(train_seen, 1, stopped_at(job, 1))[0][0] == 75
    write_sentences(tmp_path / "train.json", 0, 30, seed=1)
    shutil.rmtree(job["data"]["cache"])
    config = (Path(job["run"]["dir"]) / "config.yaml").read_text()
    refused = run_ranks(train_seen, 1, {**job, "run": {**job["run"], "log_every": 3}}, True)[0][0]
    assert "trained on other sentences" in str(refused)
    assert (Path(job["run"]["dir"]) / "config.yaml").read_text() == config, "a refused resume changes nothing"
    going_on = {**job, "data": {**job["data"], "allow_change": True}, "checkpoint": {"every": 1, "keep": 1}}
    assert run_ranks(train_seen, 2, going_on, True)[0][0] == 0
    kept = find_checkpoint(Path(job["run"]["dir"]))
    assert {"tokenizer", "answers.json", "regions.json"} <= {path.name for path in kept.iterdir()}


def test_other_regions_must_be_meant(tmp_path: Path) -> None:
    job = vision_language_mapping(tmp_path)
    assert run_ranks(train_seen, 1, stopped_at(job, 1))[0][0] == 75
    shutil.rmtree(tmp_path / "store")
    write_small_store(tmp_path / "store", seed=1)
    assert "trained on other regions" in str(run_ranks(train_seen, 1, job, True)[0][0])
    meant = {**job, "data": {**job["data"], "allow_change": True}}
    assert "features of another kind" in str(run_ranks(train_seen, 1, meant, True)[0][0]), "which cannot be meant"


def test_another_answer_table_is_refused(tmp_path: Path) -> None:
    """The same answers in another order fit the answer head, whose classes then mean other answers."""
    job = vision_language_mapping(tmp_path)
    assert run_ranks(train_seen, 1, stopped_at(job, 1))[0][0] == 75
    table = json.loads((find_checkpoint(Path(job["run"]["dir"])) / "answers.json").read_text())
    (tmp_path / "answers.json").write_text(json.dumps(table[::-1]))
    other = {**job, "data": {**job["data"], "answers": str(tmp_path / "answers.json")}}
    assert "trained with another answer table" in str(run_ranks(train_seen, 1, other, True)[0][0])
    (tmp_path / "answers.json").write_text(json.dumps(table))
    assert run_ranks(train_seen, 1, stopped_at(other, 2), True)[0][0] == 75


def test_without_contrast_it_is_lxmert_to_the_last_digit(tmp_path: Path) -> None:
    """The presets ``capt_vl_qa`` with weight 0 and ``lxmert``, in small and with the same batch and optimizer."""
    small = {key: value for key, value in vision_language_mapping(tmp_path).items() if key not in ("contrast", "task")}
    small["model"] = {**small["model"], "dropout": 0.1, "attention_dropout": 0.1}
    small["optimizer"] = {**small["optimizer"], "type": "adamw"}
    small["engine"] = {"zero_stage": 1, "precision": "fp32"}
    small["schedule"] = {"max_steps": 4, "warmup_steps": 1}
    losses = []
    for preset, off in (("capt_vl_qa", {"weight": 0.0, "queue": 0}), ("lxmert", {})):
        run = {**small["run"], "dir": str(tmp_path / preset)}
        layers = [load_mapping(preset), {**small, "run": run, "contrast": off}]
        assert [code for code, _ in run_ranks(train_seen, 2, _over(*layers))] == [0, 0]
        rows = rows_of(tmp_path / preset)
        times = ("second", "own_time")
        losses.append([{k: v for k, v in row.items() if not any(word in k for word in times)} for row in rows])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5
    assert "loss/capt" not in losses[0][0]


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        merged[key] = {**below.get(key, {}), **value} if isinstance(value, dict) else value
    return merged
