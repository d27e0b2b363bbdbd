"""The registry of sources: one of another distribution becomes shards as the built-in ones do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from capt.pretrain import registry
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.data.config import SOURCES, DataConfig
from capt.pretrain.data.prepare import open_corpus, prepare
from capt.pretrain.data.sources import source_of
from capt.pretrain.language.inputs import describe_inputs
from tests.unit.data.test_prepare import ByteTokenizer

TOY = """
from capt.pretrain.data.corpus import Corpus


class Countdown(Corpus):
    def __init__(self, start):
        self.size = self.start = start

    def pieces(self):
        for number in range(self.start, 0, -1):
            self.position += 1
            yield f"{number} bottles of water on the wall\\n", True

    def contents(self):
        return [{"name": "countdown", "format": "countdown", "sha256": str(self.start)}]


class Source:
    def describe(self, data):
        return [f"corpus: {data.source_options['start']} bottles"]

    def open(self, data, split, verifier, progress):
        return Countdown(data.source_options["start"])
"""


@pytest.fixture(autouse=True)
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution with one good source and one that cannot be imported."""
    folder = tmp_path / "packages"
    (folder / "theirs-1.dist-info").mkdir(parents=True)
    (folder / "toy_source.py").write_text(TOY)
    (folder / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    entries = "[capt.sources]\nbottles = toy_source:Source\nabsent = toy_source:Nothing\n"
    (folder / "theirs-1.dist-info" / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    registry.entry_point_values.cache_clear()
    yield
    registry.entry_point_values.cache_clear()
    sys.modules.pop("toy_source", None)


def _data(tmp_path: Path, start: int = 300, **more: object) -> DataConfig:
    options = {"source": "bottles", "source_options": {"start": start}, "cache": tmp_path, "workers": 1, **more}
    return DataConfig.model_validate(options)


def test_a_source_of_another_distribution_becomes_shards(tmp_path: Path) -> None:
    data = _data(tmp_path, validation_fraction=0.2)
    assert describe_inputs(data, None, None, trained_tokenizer="t")[0] == "corpus: 300 bottles"
    train, validation = (prepare(data, ByteTokenizer(), split) for split in ("train", "validation"))
    assert train is not None
    assert validation is not None
    assert train.documents + validation.documents == 300
    assert 30 < validation.documents < 90
    again = prepare(data, ByteTokenizer(), "train")
    other = prepare(_data(tmp_path, 301, validation_fraction=0.2), ByteTokenizer(), "train")
    assert again is not None
    assert other is not None
    assert (again.folder == train.folder, other.folder == train.folder) == (True, False)


def test_what_is_no_source_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"data\.source: unknown source 'botles'; did you mean 'bottles'"):
        _data(tmp_path, source="botles")
    with pytest.raises(
        ConfigError, match=r"data\.source absent: the entry point 'toy_source:Nothing' of capt\.sources"
    ):
        open_corpus(_data(tmp_path, source="absent"), "train")
    with pytest.raises(ValidationError, match=r"data\.source is bottles: set data\.source=files"):
        _data(tmp_path, files=["a.txt"])
    with pytest.raises(ValidationError, match=r"data\.source_options is given"):
        DataConfig(files=["a.txt"], source_options={"start": 1})


def test_every_built_in_source_is_whole() -> None:
    needed = {"files": {"files": ["a.txt"]}, "hub": {"name": "x/y"}}
    for name in SOURCES:
        source = source_of(DataConfig.model_validate({"source": name, **needed.get(name, {})}))
        assert all(callable(getattr(source, method)) for method in ("describe", "open"))
