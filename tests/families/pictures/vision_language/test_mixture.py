"""A vision-language job on several sources of sentences: shares, validation by source, the ledger, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import CheckpointError, DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.data.corruption import IGNORE
from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from capt.pretrain.reliability.ledger.check import check
from capt.pretrain.vision_language.task import VisionLanguageTask
from tests.support import run_ranks, train_job
from tests.vision_language import vision_language_mapping, write_sentences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    vision_language_mapping(folder)
    for name, first, count in (("coco", 0, 22), ("vg", 22, 8), ("coco_held_out", 30, 7), ("vg_held_out", 37, 3)):
        write_sentences(folder / f"{name}.json", first, count)
    return folder


def _mapping(folder: Path, **second: Any) -> dict[str, Any]:
    parts = [
        {"name": name, "train": str(folder / f"{name}.json"), "validation": str(folder / f"{name}_held_out.json")}
        for name in ("coco", "vg")
    ]
    mapping = vision_language_mapping(folder, validate={"samples": 30})
    mapping["data"] |= {"train": [], "validation": [], "mixture": [parts[0], {**parts[1], **second}]}
    return mapping


def _task(folder: Path, **second: Any) -> VisionLanguageTask:
    return VisionLanguageTask(job_from_mapping(_mapping(folder, **second), "test"), folder / "run")


def test_each_source_has_its_share_and_its_own_validation(folder: Path) -> None:
    task = _task(folder, weight=3)
    assert task.prepared.train.parts == [4 * 22, 4 * 8]
    numbers = task.assembler("train")(np.arange(40)).numbers.numpy()
    assert (numbers >= 4 * 22).sum() == 30
    assert sorted(set(numbers[numbers >= 4 * 22].tolist())) == sorted(numbers[numbers >= 4 * 22].tolist())

    parts = task._held_out()
    assert [(part.source, part.samples) for part in parts] == [("coco", 18), ("vg", 12)]
    batches = {part.source: part.assembler(np.arange(part.samples)) for part in parts}
    assert (batches["coco"].numbers < 28).all()
    assert sorted(batches["vg"].numbers.tolist()) == list(range(28, 40))

    module = task.build_modules()["model"]
    engines = {"model": LocalEngine("model", module.eval(), task.job, ModuleOptimizer(task.job.optimizer))}
    found = {name: value for name, value in task.validate(engines, Progress()).items() if not callable(value)}
    assert set(found) <= task.job.metric_names()
    masked = {source: int((batch.labels != IGNORE).sum()) for source, batch in batches.items()}
    mean = sum(float(found[f"loss/mlm/{source}"]) * count for source, count in masked.items()) / sum(masked.values())
    assert float(found["loss/mlm"]) == pytest.approx(mean, rel=1e-6)
    assert found["loss/mlm/coco"] != found["loss/mlm/vg"]
    assert found["validation_samples"] == 30


def test_the_ledger_counts_each_source(folder: Path) -> None:
    mapping = _mapping(folder, epochs=0.5)
    mapping["schedule"] = {"max_steps": 6, "warmup_steps": 2, "stop_after": 4}
    assert run_ranks(train_job, 1, mapping, False) == [75]
    mapping["schedule"]["stop_after"] = None
    assert run_ranks(train_job, 1, mapping, True) == [0]
    report = check(folder / "run")
    assert report.faults == []
    assert [(each.source, each.used) for each in report.epochs] == [("coco", 48 - 16), ("vg", 16)]


def test_what_cannot_be_mixed_is_refused(folder: Path, tmp_path: Path) -> None:
    state = _task(folder).save_state(tmp_path)
    with pytest.raises(CheckpointError, match=r"other shares of data\.mixture"):
        _task(folder, weight=2).load_state(tmp_path, state)
    with pytest.raises(DataError, match="nowhere"):
        _task(folder, train="nowhere.json")
    for changes, message in (
        ({"mixture": [{"name": "a", "train": []}]}, "source a names no file"),
        ({"train": ["x.json"]}, r"data\.mixture and data\.train or data\.validation are both given"),
        ({"source": "microworld"}, r"data\.source is microworld"),
        ({"mixture": [], "temperature": 0.5}, r"data\.temperature is given without data\.mixture"),
    ):
        mapping = _mapping(folder)
        mapping["data"] |= changes
        with pytest.raises(ValueError, match=message):
            job_from_mapping(mapping, "test")
    from capt.pretrain.vision_language.config import VisionLanguageJob

    below = {"data": {"source": "microworld", "regions": "r"}}
    assert VisionLanguageJob.replaced_by(below, {"data": {"mixture": [{}]}}) == {"data": {"regions": "r"}}
    below = {"data": {"mixture": [{}], "temperature": 1, "regions": "r"}}
    assert VisionLanguageJob.replaced_by(below, {"data": {"train": "x"}}) == {"data": {"regions": "r"}}
