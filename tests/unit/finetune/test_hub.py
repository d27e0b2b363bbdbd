"""GLUE through ``datasets``: the hub is out of reach here, so saved data sets replace it."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest

from capt.finetune.glue.data import read_hub
from capt.finetune.glue.files import read_split
from capt.finetune.glue.tasks import GLUE
from capt.pretrain.base.errors import ConfigError, DataError
from tests.unit.finetune.test_files import write


def save(folder: Path, task: str, names: list[str] | None = None, **splits: dict[str, list[object]]) -> str:
    labels = datasets.ClassLabel(names=names or list(GLUE[task].names))
    made = {}
    for split, columns in splits.items():
        rows = datasets.Dataset.from_dict(columns)
        if "label" in columns and not GLUE[task].regression:
            rows = rows.cast_column("label", labels)
        made[split] = rows
    datasets.DatasetDict(made).save_to_disk(folder / task)
    return str(folder)


def nli(labels: list[object], **more: list[object]) -> dict[str, list[object]]:
    return {"premise": ["p"] * len(labels), "hypothesis": ["h"] * len(labels), "label": labels, **more}


def test_the_same_rows_as_from_files(tmp_path: Path) -> None:
    write(tmp_path, "rte", "dev", "0\tone\ttwo\tnot_entailment", "1\tthree\tfour\tentailment")
    rows = {"sentence1": ["one", "three"], "sentence2": ["two", "four"], "label": [1, 0], "idx": [0, 1]}
    saved = read_hub(GLUE["rte"], "dev", save(tmp_path / "hub", "rte", validation=rows))
    filed = read_split(tmp_path, GLUE["rte"], "dev")
    assert (saved.first, saved.second, saved.index) == (filed.first, filed.second, filed.index)
    assert saved.labels is not None
    assert filed.labels is not None
    np.testing.assert_array_equal(saved.labels, filed.labels)
    assert saved.labels.dtype == filed.labels.dtype


def test_labels_are_mapped_by_name(tmp_path: Path) -> None:
    shuffled = ["contradiction", "neutral", "entailment"]
    name = save(tmp_path, "mnli", shuffled, validation_mismatched=nli([0, 1, 2]))
    found = read_hub(GLUE["mnli"], "dev_mismatched", name)
    assert found.labels is not None
    assert list(found.labels) == [2, 1, 0]


def test_tests_have_no_labels_and_the_index_of_the_set(tmp_path: Path) -> None:
    name = save(tmp_path, "ax", test=nli([-1, -1], idx=[5, 6]))
    found = read_hub(GLUE["ax"], "test", name)
    assert (found.labels, found.index, found.second) == (None, [5, 6], ["h", "h"])


def test_single_sentences_and_scores(tmp_path: Path) -> None:
    name = save(tmp_path, "cola", train={"sentence": ["a", "b"], "label": [1, 0]})
    assert read_hub(GLUE["cola"], "train", name).second is None
    columns = {"sentence1": ["a"], "sentence2": ["b"]}
    name = save(tmp_path, "stsb", train={**columns, "label": [2.5]}, validation={**columns, "label": [5.5]})
    found = read_hub(GLUE["stsb"], "train", name)
    assert found.labels is not None
    assert (found.labels.dtype, list(found.labels)) == (np.float32, [2.5])
    with pytest.raises(DataError, match=r"row 0: score 5\.5 is outside 0 to 5"):
        read_hub(GLUE["stsb"], "dev", name)


EMPTY = datasets.Dataset.from_dict({"sentence": [], "label": []})


def test_what_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(tmp_path, "mnli", ["yes", "maybe", "no"], train=nli([0]), validation_matched=nli([-1]))
    with pytest.raises(DataError, match="the labels have yes, maybe, no; MNLI has entailment, neutral, contradiction"):
        read_hub(GLUE["mnli"], "train", name)
    with pytest.raises(DataError, match="has no split 'validation_mismatched'; it has train, validation_matched"):
        read_hub(GLUE["mnli"], "dev_mismatched", name)
    name = save(tmp_path / "other", "mnli", validation_matched=nli([1, -1]))
    with pytest.raises(DataError, match=r"row 1: label -1 is none of entailment, neutral, contradiction"):
        read_hub(GLUE["mnli"], "dev", name)
    name = save(tmp_path, "rte", train={"sentence1": ["a"], "label": [0]}, test={"sentence1": [1], "sentence2": [2]})
    with pytest.raises(DataError, match=r"no column 'sentence2'; it has sentence1, label"):
        read_hub(GLUE["rte"], "train", name)
    with pytest.raises(DataError, match="row 0: 'sentence1' must be text, it is int"):
        read_hub(GLUE["rte"], "test", name)
    with pytest.raises(ConfigError, match="AX has no split 'dev'"):
        read_hub(GLUE["ax"], "dev")
    save(tmp_path, "sst2", train={"sentence": ["a"], "label": [0]})
    monkeypatch.setattr(datasets, "load_from_disk", lambda path: {"train": EMPTY})
    with pytest.raises(DataError, match="the split is empty"):
        read_hub(GLUE["sst2"], "train", str(tmp_path))


def test_numbers_without_names_are_refused(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"sentence": ["a"], "label": [1]})
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "sst2")
    with pytest.raises(DataError, match="the labels have no names; SST-2 has negative, positive"):
        read_hub(GLUE["sst2"], "train", str(tmp_path))


def test_the_hub_is_asked_for_the_official_set(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str, str]] = []

    def load_dataset(name: str, subset: str, split: str) -> datasets.Dataset:
        calls.append((name, subset, split))
        return datasets.Dataset.from_dict({"sentence1": ["a"], "sentence2": ["b"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_hub(GLUE["rte"], "test").first == ["a"]
    assert calls == [("nyu-mll/glue", "rte", "test")]


def test_no_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: object, **options: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"cannot load nyu-mll/glue \(split train\): .*data\.source: files") as caught:
        read_hub(GLUE["rte"], "train")
    assert "\n" not in str(caught.value)
