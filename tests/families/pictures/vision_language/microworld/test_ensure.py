"""The microworld of a job: made once, kept in the cache, and left out where files are named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pydantic import ValidationError

from capt.finetune.visual.config import TASKS, VisualData
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.models.tokenizer import TokenizerSection
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.config import VisionLanguageData, describe_inputs
from capt.pretrain.vision_language.data.read import read_examples
from capt.pretrain.vision_language.microworld.generate import World, ensure_microworld
from capt.pretrain.vision_language.pairs import located


def _mapping(cache: Path, **changes: object) -> dict[str, object]:
    world = {"size": 20, "feature_size": 8, "seed": 2}
    return {"source": "microworld", "cache": str(cache), "microworld": {**world, **changes}}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_a_world_is_made_once(cache: Path) -> None:
    world = World(pictures=20, seed=2, feature_size=8)
    made = ensure_microworld(world, cache)
    before = {path: path.stat().st_mtime_ns for path in made.folder.parent.rglob("*")}
    assert ensure_microworld(world, cache) == made
    assert {path: path.stat().st_mtime_ns for path in made.folder.parent.rglob("*")} == before
    assert ensure_microworld(World(pictures=20, seed=3, feature_size=8), cache) != made


def test_pretraining_reads_captions_and_questions(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = located(VisionLanguageData.model_validate(_mapping(cache)))
    assert "synthetic" in caplog.text
    assert data.regions is not None
    assert data.answers is not None
    store = RegionStore.open(data.regions)
    assert store.manifest.feature_size == 8
    examples = read_examples(data.train)
    assert (store.rows([example.pictures[0] for example in examples]) >= 0).all()
    assert {example.kind for example in examples} >= {"mscoco", "vqa"}


@pytest.mark.parametrize("use", ["vqa", "gqa", "nlvr2"])
def test_each_task_gets_its_files(use: str, cache: Path) -> None:
    data = located(VisualData.model_validate({**_mapping(cache), "task": use}), use)
    assert data.regions is not None
    assert (data.answers is None) == (use == "nlvr2")
    store = RegionStore.open(data.regions)
    for files in (data.train, data.validation):
        examples = read_examples(files)
        assert (store.rows([name for example in examples for name in example.pictures]) >= 0).all()


def test_a_run_of_the_first_release_is_read_where_its_world_is_still_made(cache: Path) -> None:
    old = VisionLanguageData.model_validate(_mapping(cache, kind="pictures"))
    assert old == VisionLanguageData.model_validate(_mapping(cache))
    with pytest.raises(ValidationError, match=r"kind is pictures in every job now, and here 'boxes'"):
        VisionLanguageData.model_validate(_mapping(cache, kind="boxes"))


def test_a_task_that_the_microworld_has_no_files_for_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "own", TASKS["vqa"]._replace(key="own"))
    with pytest.raises(ValidationError, match=r"no files of own.*data\.regions and data\.train"):
        VisualData.model_validate({**_mapping(cache), "task": "own"})


def test_files_beside_the_microworld_are_refused(cache: Path) -> None:
    data = VisionLanguageData.model_validate({**_mapping(cache), "train": ["my.json"]})
    with pytest.raises(ConfigError, match="makes its own files"):
        located(data)
    with pytest.raises(ConfigError, match=r"makes its own files.*or set data\.source=files"):  # dry runs see it as well
        describe_inputs(data, None, TokenizerSection())


def test_files_stay_as_they_are() -> None:
    data = VisionLanguageData.model_validate({"regions": "store", "train": ["my.json"]})
    assert located(data) is data
