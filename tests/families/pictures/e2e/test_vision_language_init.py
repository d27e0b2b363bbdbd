"""A vision-language job starts from what ``model.init`` names: a run of ours, or an exported Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.vision_language import load
from capt.pretrain.vision_language.export import command as export
from capt.pretrain.vision_language.load import load_model
from capt.pretrain.vision_language.task import VisionLanguageTask
from tests.support import run_ranks, train_job
from tests.vision_language import vision_language_mapping, write_small_store


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The job of a run of two steps with a vocabulary of its own, and answers."""
    folder = tmp_path_factory.mktemp("init")
    mapping = vision_language_mapping(folder, schedule={"max_steps": 2, "warmup_steps": 0})
    assert run_ranks(train_job, 1, mapping) == [0]
    return mapping


def _task(trained: dict[str, Any], **changes: Any) -> VisionLanguageTask:
    run = Path(trained["run"]["dir"])
    mapping = {**trained, "model": {"init": str(run), "dropout": 0.0}, "run": {**trained["run"], "dir": f"{run}-2"}}
    for key, value in changes.items():
        mapping[key] = {**mapping[key], **value}
    return VisionLanguageTask(job_from_mapping(mapping, "test"), Path(mapping["run"]["dir"]))


def test_a_run_of_ours_gives_weights_sizes_tokenizer_and_answers(trained: dict[str, Any]) -> None:
    loaded = load_model(Path(trained["run"]["dir"]))
    task = _task(trained)
    module = task.build_modules()["model"]
    own, before = module.lxmert.state_dict(), loaded.model.state_dict()
    assert own.keys() == before.keys()
    assert all(torch.equal(own[name], before[name]) for name in own)
    assert task.job.model.hidden == 32
    assert task.prepared.tokenizer.fingerprint == loaded.tokenizer.fingerprint


def test_another_table_of_answers_takes_the_rows_that_both_have(
    trained: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(Path(trained["run"]["dir"]))
    before = loaded.model.state_dict()
    caplog.set_level("INFO")
    task = _task(trained, data={"minimum_answers": 8})
    own = task.build_modules()["model"].lxmert.state_dict()
    different = {name for name in own if own[name].shape != before[name].shape or (own[name] != before[name]).any()}
    assert different == {"answer_head.outer.weight", "answer_head.outer.bias"}
    assert task.prepared.answers is not None
    assert loaded.answers is not None
    answers = task.prepared.answers.answers
    assert f"answer head: {len(answers)} of {len(answers)} answers from" in caplog.text
    for row, answer in enumerate(answers):
        assert torch.equal(
            own["answer_head.outer.weight"][row], before["answer_head.outer.weight"][loaded.answers.index(answer)]
        )


def test_an_answer_head_without_names_is_never_lost_in_silence(
    trained: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The released weights are a whole LXMERT, and nothing says what its classes of answers are."""
    loaded = load_model(Path(trained["run"]["dir"]))
    assert loaded.answers is not None
    hf = export(Path(trained["run"]["dir"]), tmp_path / "hf", to="hf")
    config = json.loads((hf / "config.json").read_text())
    for key in ("id2label", "label2id"):
        config.pop(key)
    (hf / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"what the \d+ classes .* model\.init_answers=all_ans\.json .*=new"):
        _task(trained, model={"init": str(hf)})
    caplog.set_level("INFO")
    fresh = _task(trained, model={"init": str(hf), "init_answers": "new"}).build_modules()["model"].lxmert.state_dict()
    assert "heads that start from random weights: answer_head.outer" in caplog.text
    table = tmp_path / "answers.json"
    table.write_text(json.dumps([{"ans": answer} for answer in loaded.answers]))
    task = _task(trained, model={"init": str(hf), "init_answers": str(table)})
    taken = task.build_modules()["model"].lxmert.state_dict()
    before = loaded.model.state_dict()
    assert torch.equal(taken["answer_head.outer.weight"], before["answer_head.outer.weight"])
    assert not torch.equal(fresh["answer_head.outer.weight"], before["answer_head.outer.weight"])
    assert f"answer head: {len(loaded.answers)} of {len(loaded.answers)} answers from" in caplog.text
    table.write_text(json.dumps([{"ans": "yes"}]))
    with pytest.raises(CheckpointError, match="it is not its table"):
        _task(trained, model={"init": str(hf), "init_answers": str(table)})
    _task(trained, model={"init": str(hf)}, objectives={"answers": 0.0})  # which reads no answers


def test_features_of_another_kind_are_refused(trained: dict[str, Any], tmp_path: Path) -> None:
    other = write_small_store(tmp_path / "store", seed=5)
    with pytest.raises((CheckpointError, ConfigError), match="features"):
        _task(trained, data={"regions": str(other)})


def test_a_folder_that_is_nothing_is_refused(trained: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a checkpoint|no LXMERT|nor a run"):
        _task(trained, model={"init": str(tmp_path)})


def test_a_model_of_the_hub_is_a_start(
    trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = export(Path(trained["run"]["dir"]), tmp_path / "hf", to="hf")
    monkeypatch.setattr(load, "local_folder", lambda path, files=(): hf if path == Path("user/name") else path)
    start = load.read_start(Path("user/name"))
    assert (start.source, start.tokenizer_folder) == (Path("user/name"), hf)
