"""A language job on several sources: their shares, validation, shards, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.data.mixture_dataset import MixtureDataset
from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.engine.loop import Run
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from capt.pretrain.language.task import LanguageTask
from capt.pretrain.reliability.rollbacks import Rollback, note_rollback
from capt.pretrain.reliability.spikes import Spikes
from tests.language import language_mapping, write_corpus
from tests.support import Capt

TEXTS = {"river": 40, "stone": 30}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora, and a tokenizer that was trained on both."""
    folder = tmp_path_factory.mktemp("mixture")
    for seed, (name, documents) in enumerate(TEXTS.items()):
        write_corpus(folder / f"{name}.txt", documents, seed)
    (folder / "tok").symlink_to(_task(folder).prepared.tokenizer_folder)
    return folder


def _mapping(folder: Path, run: str = "run", **data: Any) -> dict[str, Any]:
    parts = [{"name": name, "files": [str(folder / f"{name}.txt")]} for name in TEXTS]
    mapping = language_mapping(folder, run={"dir": str(folder / run)}, validate={"samples": 12})
    if (folder / "tok").exists():
        mapping["tokenizer"] = {"path": str(folder / "tok")}
    mapping["data"] = {**mapping["data"], "files": [], "mixture": parts, **data}
    return mapping


def _task(folder: Path, **data: Any) -> LanguageTask:
    mapping = _mapping(folder, **data)
    return LanguageTask(job_from_mapping(mapping, "test"), folder / "run")


def _with(folder: Path, **second: Any) -> list[dict[str, Any]]:
    first, other = _mapping(folder)["data"]["mixture"]
    return [first, {**other, **second}]


def test_samples_are_windows_of_their_sources(folder: Path) -> None:
    task = _task(folder, mixture=_with(folder, weight=3))
    train = task.prepared.train
    assert isinstance(train, MixtureDataset)
    assert task.samples == sum(map(len, train.parts.values()))
    batch = task.assembler("train")(np.arange(40))
    stone = batch.ids.numpy() >= len(train.parts["river"])
    assert stone.sum() == 30
    for row, number in zip(batch.tokens.numpy(), batch.ids.tolist(), strict=True):
        first = 0 if number < len(train.parts["river"]) else len(train.parts["river"])
        part = train.parts["stone" if first else "river"]
        assert (row == part.window(number - first)).all()
    assert (train.documents(task.samples - 1) == train.parts["stone"].documents(len(train.parts["stone"]) - 1)).all()
    assert task.flops_per_step() > 0


def test_temperature_and_shards_of_the_same_text(folder: Path, capt: Capt) -> None:
    """``capt data prepare`` writes a set for each source; a job on these has the same samples."""
    mapping = _mapping(folder, temperature=0.3)
    mapping["batch"]["ramp"] = [[256, 4]]  # two steps of 4 samples, then four of 8
    job = folder / "job.yaml"
    job.write_text(str(mapping))
    assert capt("data", "prepare", job, "--out", folder / "shards")[0] == 0
    code, shown, _ = capt("data", "inspect", "--job", job)
    assert code == 0
    assert "40 samples of 32 tokens in 6 steps" in shown
    code, views, _ = capt("data", "inspect", "--job", job, "data.view=crop", "data.spans.least=4", "mlm.weight=0")
    assert code == 0
    shown_views = [
        line.partition(" | ")[2] for line in views.partition("data.view crop")[2].splitlines() if " | " in line
    ]
    assert len(shown_views) == 20, "two of each of ten samples"
    texts = ["".join((folder / f"{name}.txt").read_text().split()) for name in TEXTS]
    assert all(any("".join(view[3:-4].split()) in text for text in texts) for view in shown_views), "spans of the text"
    task = _task(folder, temperature=0.3)
    train = task.prepared.train
    assert isinstance(train, MixtureDataset)
    weights = [len(part) ** 0.3 for part in train.parts.values()]
    share = weights[0] / sum(weights)
    assert train.order.shares(0)[0] == pytest.approx(share)
    assert f"river {share:.2%}, {train.order.counts_before(40)[0]} in all" in shown
    parts = [{"name": name, "shards": str(folder / "shards" / name)} for name in TEXTS]
    other = _task(folder, temperature=0.3, mixture=parts)
    a, b = (each.assembler("train")(np.arange(48)) for each in (task, other))
    assert (a.tokens == b.tokens).all()
    assert (a.corrupted == b.corrupted).all()
    assert task.digests() == other.digests()


def test_validation_tells_the_sources_apart(folder: Path) -> None:
    """The figures of a source are those of a job on this source alone, with the same weights and windows."""
    task = _task(folder)
    module = task.build_modules()["model"]
    engines = {"model": LocalEngine("model", module.eval(), task.job, ModuleOptimizer(task.job.optimizer))}
    found = task.validate(engines, Progress())
    names = {name for name in found if not callable(found[name])}
    assert names <= task.job.metric_names()
    assert {"loss/mlm/river", "accuracy/mlm/stone"} <= names
    sizes = {name: len(windows) for name, windows in task.prepared.validation.items()}
    assert found["validation_samples"] == 12
    for name, samples in {"river": 12 - min(6, sizes["stone"]), "stone": min(6, sizes["stone"])}.items():
        mapping = _mapping(folder, mixture=[], files=[str(folder / f"{name}.txt")])
        mapping["validate"]["samples"] = samples
        alone = LanguageTask(job_from_mapping(mapping, "test"), folder / "run")
        expected = alone.validate(engines, Progress())
        for metric in ("loss/mlm", "accuracy/mlm"):
            assert float(found[f"{metric}/{name}"]) == pytest.approx(float(expected[metric]), rel=1e-6)


def test_a_source_without_held_out_text_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = write_corpus(folder / "one.txt", documents=1)
    mapping = _mapping(folder, mixture=_with(folder, files=[str(one)]))
    task = LanguageTask(job_from_mapping(mapping, "test"), folder / "run")
    assert task.validation_fault() == ""
    assert "source stone of data.mixture has no held-out text" in caplog.text
    mapping["checkpoint"] = {"every": 3, "best": "loss/mlm/stone"}
    mapping["validate"]["every"] = 3
    task = LanguageTask(job_from_mapping(mapping, "test"), folder / "run")
    assert "source stone of data.mixture has no held-out text" in task.validation_fault()


def test_a_resumed_run_keeps_its_shares(folder: Path, tmp_path: Path) -> None:
    state = _task(folder).save_state(tmp_path)
    _task(folder).load_state(tmp_path, state)
    other = _with(folder, weight=2)
    with pytest.raises(CheckpointError, match=r"other shares of data\.mixture.*data\.allow_change=true"):
        _task(folder, mixture=other).load_state(tmp_path, state)
    _task(folder, mixture=other, allow_change=True).load_state(tmp_path, state)
    mapping = _mapping(folder, mixture=[], files=[str(folder / "river.txt")])
    with pytest.raises(CheckpointError, match="trained on other text"):
        LanguageTask(job_from_mapping(mapping, "test"), folder / "run").load_state(tmp_path, state)


def test_what_cannot_be_trained_on_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("A river.\n")
    for second, error, message in (
        ({"files": ["nowhere.txt"]}, DataError, r"data\.mixture, source stone: .*nowhere\.txt"),
        ({"files": [str(tmp_path / "empty.txt")]}, DataError, r"data\.mixture, source stone: .*empty\.txt"),
        ({"files": [str(tmp_path / "short.txt")]}, DataError, r"source stone: \d+ tokens fill no window of data\.seq"),
        ({"files": [], "shards": str(tmp_path)}, DataError, r"source stone: .* is not a shard set"),
    ):
        with pytest.raises(error, match=message) as raised:
            _task(folder, mixture=_with(folder, **second))
        assert "\n" not in str(raised.value)
    few = [{**part, "epochs": 0.1} for part in _with(folder)]
    with pytest.raises(ConfigError, match=r"data\.mixture: the sources have spent their epochs after \d+ samples"):
        _task(folder, mixture=few)
    described = job_from_mapping(_mapping(folder), "test").check_inputs()
    assert [line.split(":")[0] for line in described[:2]] == ["river", "stone"]
    with pytest.raises(DataError, match="source stone: "):
        job_from_mapping(_mapping(folder, mixture=_with(folder, files=["nowhere.txt"])), "test").check_inputs()


def test_text_that_is_named_later_replaces_a_mixture(folder: Path) -> None:
    from capt.pretrain.language.config import LanguageJob

    below = {"data": {"mixture": [{"name": "a"}], "temperature": 0.3, "workers": 1}}
    assert LanguageJob.replaced_by(below, {"data": {"files": "x"}}) == {"data": {"workers": 1}}
    assert LanguageJob.replaced_by({"data": {"files": "x"}}, {"data": {"mixture": [{}]}}) == {"data": {}}
    assert LanguageJob.replaced_by(below, {"data": {"temperature": 1}}) == below


def test_sources_read_past_their_epochs_by_a_rollback_are_named(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [len(part) for part in _task(folder).prepared.train.parts.values()]  # type: ignore[union-attr]
    parts = [{**part, "epochs": 24 / size} for part, size in zip(_with(folder), sizes, strict=True)]
    task = _task(folder, mixture=parts)
    progress = Progress(step=3, samples=24)
    run = Mock(spec=Run, dir=tmp_path, job=task.job, task=task, progress=progress)
    Spikes().on_resume(run, newest=True)
    assert "more often than epochs allows" not in caplog.text
    note_rollback(tmp_path, Rollback(step=5, reason="loss", end=40))
    Spikes().on_resume(run, newest=True)
    assert progress.samples == 40
    assert "training needs 64, and no source has epochs left for that: river, stone will be read" in caplog.text
