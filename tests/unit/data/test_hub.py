"""The hub itself is out of reach here: saved datasets replace it, and a recorded ``load_dataset``."""

from __future__ import annotations

import logging
from pathlib import Path

import datasets
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.data.hub import HubCorpus
from tests.unit.data.doubles import documents

ROWS = datasets.Dataset.from_dict({"id": list(range(600)), "text": [f"row {i}" for i in range(599)] + [" "]})
LINES = datasets.Dataset.from_dict(
    {"text": ["", " = A = \n", "", " one . \n", " = = B = = \n", " = C = \n", " two . \n"]}
)


def saved(folder: Path) -> str:
    datasets.DatasetDict({"train": ROWS, "test": LINES}).save_to_disk(folder)
    return str(folder)


def test_rows_are_documents(tmp_path: Path) -> None:
    corpus = HubCorpus(saved(tmp_path / "d"), None, "train", "text", None)
    assert list(documents(corpus)) == [f"row {i}" for i in range(599)]
    assert (corpus.position, corpus.size) == (600, 600)


def test_rows_may_be_lines_of_documents(tmp_path: Path) -> None:
    corpus = HubCorpus(saved(tmp_path / "d"), None, "test", "text", "^ = [^=]")
    assert list(documents(corpus)) == [" = A =\n one .\n = = B = =", " = C =\n two ."]


def test_a_single_saved_split(tmp_path: Path) -> None:
    LINES.save_to_disk(tmp_path / "d")
    assert len(list(documents(HubCorpus(str(tmp_path / "d"), None, "train", "text", None)))) == 5
    with pytest.raises(DataError, match="has no split 'test'; it has train"):
        HubCorpus(str(tmp_path / "d"), None, "test", "text", None)


def test_rows_without_text_are_left_out_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", None, "b", "", None]})
    rows.save_to_disk(tmp_path / "d")
    corpus = HubCorpus(str(tmp_path / "d"), None, "train", "text", None)
    assert list(documents(corpus)) == ["a", "b"]
    assert corpus.contents()[0]["rows_without_text"] == 2
    assert "2 of 5 rows have no 'text' and are left out, the first is" in caplog.text
    with pytest.raises(DataError, match=r"row 2: 'text' has no text; data\.missing=skip leaves such rows out"):
        list(HubCorpus(str(tmp_path / "d"), None, "train", "text", None, missing="refuse"))


def test_contents_change_with_the_data(tmp_path: Path) -> None:
    name = saved(tmp_path / "d")
    train, test = (HubCorpus(name, None, split, "text", None).contents() for split in ("train", "test"))
    again = HubCorpus(name, None, "train", "text", None).contents()
    assert train == again
    assert train[0]["sha256"] != test[0]["sha256"]
    assert (train[0]["format"], train[0]["rows"]) == ("hub", 600)


@pytest.mark.parametrize(
    ("split", "column", "message"),
    [
        ("validation", "text", r"has no split 'validation'; it has train, test"),
        ("train", "txt", r"has no column 'txt' \(data\.text_column\); did you mean 'text'"),
        ("train", "body", r"has no column 'body' .*; it has id, text"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, split: str, column: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        HubCorpus(saved(tmp_path / "d"), None, split, column, None)


def test_rows_must_be_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 1: 'id' must be text, it is int"):
        list(HubCorpus(saved(tmp_path / "d"), None, "train", "id", None))


def test_hub_ids_go_to_load_dataset(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, subset: str | None, split: str) -> datasets.Dataset:
        calls.append((name, subset, split))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["wikitext-103-raw-v1", "wikitext-2-raw-v1"])
    with caplog.at_level(logging.WARNING):
        HubCorpus("Salesforce/wikitext", None, "train", "text", None)
    assert "using wikitext-103-raw-v1 (data.subset chooses)" in caplog.text
    HubCorpus("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text", None)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["default"])
    HubCorpus("some/corpus", None, "train", "text", None)
    assert calls == [
        ("Salesforce/wikitext", "wikitext-103-raw-v1", "train"),
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
        ("some/corpus", None, "train"),
    ]


@pytest.mark.parametrize(
    "error",
    [
        *(ConnectionError("no route\nto host"), ValueError('Unknown split "x".'), FileNotFoundError()),
        *(datasets.exceptions.DatasetGenerationError("a row"), KeyError("_data_files")),
    ],
)
def test_what_the_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"data\.name: cannot load some/corpus") as caught:
        HubCorpus("some/corpus", "default", "train", "text", None)
    assert "\n" not in str(caught.value)


def test_no_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="cannot load nobody/nothing"):
        HubCorpus("nobody/nothing", None, "train", "text", None)
