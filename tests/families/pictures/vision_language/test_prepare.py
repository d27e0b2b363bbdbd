"""Preparation of a job's data: what it makes and refuses, and nothing twice."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base import locks
from capt.pretrain.base.errors import ConfigError, DataError, UserError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.vision_language import prepare as prepare_module
from capt.pretrain.vision_language.config import VisionLanguageJob
from capt.pretrain.vision_language.prepare import prepare
from capt.tokenizer.encode import TextTokenizer
from tests.vision_language import CLASSES, COLOURS, FEATURES, vision_language_mapping, write_small_store


def _job(folder: Path, **changes: Any) -> VisionLanguageJob:
    job = job_from_mapping(vision_language_mapping(folder, **changes), "test")
    assert isinstance(job, VisionLanguageJob)
    return job


def test_sizes_come_from_the_data(tmp_path: Path) -> None:
    prepared = prepare(_job(tmp_path))
    model = prepared.job.model
    assert (model.feature_size, model.object_classes, model.attribute_classes) == (FEATURES, len(CLASSES), len(COLOURS))
    assert (model.vocab_size, model.pad_id) == (prepared.tokenizer.vocab_size, prepared.tokenizer.special.pad)
    assert prepared.answers is not None
    assert sorted(prepared.answers.answers) == sorted(COLOURS)
    assert model.answers == len(COLOURS)
    again = prepare(prepared.job)
    assert again.job == prepared.job, "a resumed run has the same model"


def test_sentences_are_read_once_and_then_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(_job(tmp_path))

    def fail(*_: Any) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(prepare_module.ExampleSplit, "parts", property(fail))
    second = prepare(_job(tmp_path))
    assert second.train.folder == first.train.folder
    assert len(second.train) == 4 * 30
    words = second.train.words(0)
    assert not words.flags.owndata, "a view of the file"
    assert second.tokenizer.decode(words.tolist()).split()[0] in ("there", "a", "we", "the")


@pytest.mark.parametrize("key", ["sequence_length", "minimum_answers"])
def test_other_settings_are_other_arrays(tmp_path: Path, key: str) -> None:
    first = prepare(_job(tmp_path))
    value = {"sequence_length": 9, "minimum_answers": 8}[key]
    assert prepare(_job(tmp_path, data={key: value})).train.folder != first.train.folder


def test_losses_without_labels_are_off_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = _job(tmp_path)
    bare = write_small_store(tmp_path / "bare", labels=False)
    job = job.model_copy(update={"data": job.data.model_copy(update={"regions": bare})})
    with caplog.at_level(logging.INFO):
        prepared = prepare(job)
    assert prepared.job.objectives.weights() == {
        "mlm": 1.0, "matching": 1.0, "objects": 0.0, "attributes": 0.0, "features": 1.0, "answers": 1.0,
    }  # fmt: skip
    assert (prepared.job.model.object_classes, prepared.job.model.attribute_classes) == (0, 0)
    assert "has no object labels: the loss of objects is off" in caplog.text
    assert prepare(prepared.job).job == prepared.job


@pytest.mark.parametrize("key", ["objects", "attributes"])
def test_a_loss_that_is_asked_for_needs_labels(tmp_path: Path, key: str) -> None:
    bare = write_small_store(tmp_path / "bare", labels=False)
    job = _job(tmp_path, data={"regions": str(bare)}, objectives={key: 1.0})
    with pytest.raises(ConfigError, match=rf"objectives\.{key} is 1, but the region store has no .* labels"):
        prepare(job)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"regions": None}}, r"data\.regions is missing"),
        ({"data": {"train": []}}, r"data\.train is missing"),
        ({"data": {"train": ["gone.json"]}}, r"data\.train: no file gone\.json"),
        ({"data": {"regions": "gone"}}, r"gone"),
        ({"model": {"feature_size": 2048}}, r"model\.feature_size is 2048, but the feature size of the store is 11"),
        ({"model": {"object_classes": 3}}, r"model\.object_classes 3 is smaller than the 7 classes of the store"),
        ({"model": {"vocab_size": 100}}, r"model\.vocab_size 100 is smaller"),
        ({"model": {"answers": 3}}, r"model\.answers is 3, but the number of answers of the table is 4"),
        ({"data": {"minimum_answers": 1000}}, r"data\.minimum_answers lower"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        prepare(_job(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_pictures_that_the_store_lacks_are_counted_and_named(tmp_path: Path) -> None:
    vision_language_mapping(tmp_path)
    rows = json.loads((tmp_path / "train.json").read_text())
    for number in (3, 5):
        rows[number]["img_id"] = f"elsewhere{number}"
    (tmp_path / "train.json").write_text(json.dumps(rows))
    with pytest.raises(
        DataError, match=r"data\.train: 2 pictures not in the region store .*'elsewhere3', 'elsewhere5'"
    ):
        prepare(_job(tmp_path))


def test_sentences_about_pictures_that_the_store_lacks_can_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = prepare(_job(tmp_path)).train
    rows = json.loads((tmp_path / "train.json").read_text())
    for number in (3, 5):
        rows[number]["img_id"] = f"elsewhere{number}"
    (tmp_path / "train.json").write_text(json.dumps(rows))
    skipping = _job(tmp_path, data={"missing_pictures": "skip"})
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        train = prepare(skipping).train
        assert len(train) == len(whole) - 8
        assert (train.record.missing, train.record.missing_pictures) == (8, ["elsewhere3", "elsewhere5"])
        assert "data.train: 8 sentences LEFT OUT" in caplog.text
    kept = [number for number in range(len(whole)) if number // 4 not in (3, 5)]
    assert train.pictures.tolist() == whole.pictures[kept].tolist()
    with pytest.raises(DataError, match="2 pictures not in the region store"):
        prepare(_job(tmp_path))


def test_pairs_and_pictures_of_both_splits_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        prepare(_job(tmp_path))
    assert "data.validation does not overlap data.train: 0 of 40 pairs and 0 of 10 pictures are in both" in caplog.text
    rows = [json.loads((tmp_path / name).read_text()) for name in ("train.json", "validation.json")]
    rows[0][0] = rows[1][0]  # a whole row, and the picture of another
    rows[0][1] = {"img_id": rows[1][1]["img_id"], "sentf": {"mscoco": ["words of its own"]}, "labelf": {}}
    (tmp_path / "train.json").write_text(json.dumps(rows[0]))
    prepare(_job(tmp_path))
    assert "data.validation overlaps data.train: 4 of 40 pairs and 2 of 10 pictures are in both" in caplog.text


def test_sentences_about_one_picture_alone_have_no_mismatch(tmp_path: Path) -> None:
    vision_language_mapping(tmp_path)
    rows = json.loads((tmp_path / "train.json").read_text())
    (tmp_path / "train.json").write_text(json.dumps([{**row, "img_id": "picture0"} for row in rows]))
    with pytest.raises(DataError, match=r"all sentences are about one picture.*objectives\.mismatched=0"):
        prepare(_job(tmp_path))
    assert prepare(_job(tmp_path, objectives={"mismatched": 0.0})).job.objectives.mismatched == 0


def test_statements_about_two_pictures_are_for_fine_tuning(tmp_path: Path) -> None:
    vision_language_mapping(tmp_path)
    rows = [
        {"identifier": f"dev-{i}-0-0", "img0": "picture0", "img1": "picture1", "label": 1, "sent": "a", "uid": f"u{i}"}
        for i in range(3)
    ]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"is about 2 pictures.*capt finetune nlvr2"):
        prepare(_job(tmp_path))


def test_a_job_without_any_weight_is_refused() -> None:
    off = dict.fromkeys(("mlm", "matching", "objects", "attributes", "features"), 0.0)
    mapping = {"task": {"type": "capt_vl"}, "objectives": off, "contrast": {"weight": 0.0, "queue": 0}}
    with pytest.raises(ConfigError, match="nothing would be learnt"):
        job_from_mapping(mapping, "test")


def test_inputs_are_described_without_reading_them(tmp_path: Path) -> None:
    job = _job(tmp_path)
    lines = job.check_inputs()
    assert lines[0].startswith("regions: ")
    assert "40 pictures" in lines[0]
    assert any(line.startswith("tokenizer: bpe of 380 ids") for line in lines)
    assert not (tmp_path / "cache").exists()
    (tmp_path / "other.json").write_text('{"annotations": []}')
    with pytest.raises(DataError, match=r"other.json: the classes of its 1 answers are not"):
        _job(tmp_path, data={"answers": str(tmp_path / "other.json")}).check_inputs()


def test_sentences_are_encoded_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays are the same; all together, nine million sentences are objects of many gigabytes."""
    folder = prepare(_job(tmp_path)).train.folder
    whole = {path.name: np.load(path) for path in folder.glob("*.npy")}
    shutil.rmtree(folder)
    sizes, encode = [], TextTokenizer.encode_batch

    def counted(self: TextTokenizer, texts: Sequence[str]) -> Any:
        sizes.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(TextTokenizer, "encode_batch", counted)
    monkeypatch.setattr(prepare_module, "_TOGETHER", 7)
    assert prepare(_job(tmp_path)).train.folder == folder
    assert max(sizes) == 7
    for name, values in whole.items():
        assert np.array_equal(values, np.load(folder / name)), name


@pytest.mark.parametrize("name", ["pictures", "tokens", "answer_ids", "token_starts", "answer_starts"])
def test_damaged_arrays_in_the_cache_are_not_trained_on(tmp_path: Path, name: str) -> None:
    folder = prepare(_job(tmp_path)).train.folder
    path = folder / f"{name}.npy"
    values = np.load(path)
    values[len(values) // 2] = 1 << 30
    np.save(path, values)
    with pytest.raises(DataError, match=rf"{name}.npy: damaged: remove \S*{folder.name}, it is made again"):
        prepare(_job(tmp_path))
    np.save(path, values.astype(np.float64))
    with pytest.raises(DataError, match=f"{name}.npy is damaged"):
        prepare(_job(tmp_path))


def test_what_is_in_the_cache_is_read_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer, the table of answers and the pairs: a thousand ranks would take each lock in turn."""
    first = prepare(_job(tmp_path))

    def fail(path: Path, **options: Any) -> None:
        raise AssertionError(f"{path} is locked")

    monkeypatch.setattr(locks, "open_lock", fail)
    again = prepare(_job(tmp_path))
    assert (again.train.folder, again.tokenizer_folder) == (first.train.folder, first.tokenizer_folder)
