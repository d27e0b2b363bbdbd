"""A vision-language job starts from what ``model.init`` names: a run of ours, or an exported Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.run import run_job
from capt.pretrain.vision_language.restore import load_model
from capt.pretrain.vision_language.task import VisionLanguageTask
from tests.support import run_ranks
from tests.vision_language import vision_language_mapping, write_small_store


def _run(mapping: dict[str, Any]) -> int:
    from capt.pretrain.base.quiet import quiet_libraries

    quiet_libraries(debug=False)
    return run_job(job_from_mapping(mapping, "test"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The job of a run of two steps with a vocabulary of its own, and answers."""
    folder = tmp_path_factory.mktemp("init")
    mapping = vision_language_mapping(folder, schedule={"max_steps": 2, "warmup_steps": 0})
    assert run_ranks(_run, 1, mapping) == [0]
    return mapping


def _task(trained: dict[str, Any], **changes: Any) -> VisionLanguageTask:
    run = Path(trained["run"]["dir"])
    mapping = {**trained, "model": {"init": str(run), "dropout": 0.0}, "run": {**trained["run"], "dir": f"{run}-2"}}
    for key, value in changes.items():
        mapping[key] = {**mapping[key], **value}
    return VisionLanguageTask(job_from_mapping(mapping, "test"), Path(mapping["run"]["dir"]))


def test_a_run_of_ours_gives_weights_sizes_tokenizer_and_answers(trained: dict[str, Any]) -> None:
    restored = load_model(Path(trained["run"]["dir"]))
    task = _task(trained)
    module = task.build_modules()["model"]
    own, before = module.lxmert.state_dict(), restored.model.state_dict()
    assert own.keys() == before.keys()
    assert all(torch.equal(own[name], before[name]) for name in own)
    assert task.job.model.hidden == 32
    assert task.prepared.tokenizer.fingerprint == restored.tokenizer.fingerprint


def test_another_table_of_answers_starts_with_a_new_head(trained: dict[str, Any]) -> None:
    restored = load_model(Path(trained["run"]["dir"])).model.state_dict()
    own = _task(trained, data={"minimum_answers": 8}).build_modules()["model"].lxmert.state_dict()
    different = {name for name in own if own[name].shape != restored[name].shape or (own[name] != restored[name]).any()}
    assert different == {"answer_head.outer.weight", "answer_head.outer.bias"}


def test_features_of_another_kind_are_refused(trained: dict[str, Any], tmp_path: Path) -> None:
    other = write_small_store(tmp_path / "store", seed=5)
    with pytest.raises((CheckpointError, ConfigError), match="features"):
        _task(trained, data={"regions": str(other)})


def test_a_folder_that_is_nothing_is_refused(trained: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a checkpoint|no LXMERT|nor a run"):
        _task(trained, model={"init": str(tmp_path)})
