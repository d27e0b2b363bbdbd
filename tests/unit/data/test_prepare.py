from __future__ import annotations

import gzip
import json
import logging
import os
from pathlib import Path

import datasets
import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.verification import Ranks, Verifier
from capt.pretrain.data import docstrings
from capt.pretrain.data.config import DataConfig
from capt.pretrain.data.prepare import cache_key, open_corpus, prepare, prepare_folder, tokenizer_corpus
from capt.pretrain.data.shards import PackedDataset, ShardSet
from tests.unit.data.doubles import ByteTokenizer

TEXT = "\n\n".join(f"Document {i} has a line.\nAnd it has another line." for i in range(400))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return path


def config(corpus: Path, **keys: object) -> DataConfig:
    return DataConfig(**({"files": str(corpus), "cache": corpus.parent / "cache", "workers": 1} | keys))


def text_of(shards: ShardSet | None) -> str:
    assert shards is not None
    return ByteTokenizer().decode(shards.read(0, shards.tokens))


def test_cache_is_built_once_and_found_by_content(corpus: Path, tmp_path: Path) -> None:
    first = prepare(config(corpus), ByteTokenizer(), "train")
    times = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    moved = tmp_path / "elsewhere" / "other.txt"
    moved.parent.mkdir()
    corpus.rename(moved)
    again = prepare(config(moved, cache=corpus.parent / "cache"), ByteTokenizer(), "train")
    assert again.folder == first.folder
    assert {path: path.stat().st_mtime_ns for path in again.folder.iterdir()} == times


@pytest.mark.parametrize(
    "change",
    [{"validation_fraction": 0.2}, {"document_start": "Document"}, {"text_column": "body"}, {"missing": "refuse"}],
    ids=str,
)
def test_cache_key_follows_the_settings(corpus: Path, change: dict[str, object]) -> None:
    first = prepare(config(corpus), ByteTokenizer(), "train")
    assert prepare(config(corpus, **change), ByteTokenizer(), "train").folder != first.folder


def test_shards_tell_the_rows_that_they_leave_out(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": None if i % 9 == 0 else f"row {i}"}) + "\n" for i in range(90)))
    train = prepare(config(rows), ByteTokenizer(), "train")
    assert train is not None
    assert train.rows_without_text == ShardSet.open(train.folder).rows_without_text == 10
    with pytest.raises(DataError, match=r"line 1: 'text' has no text; data\.missing=skip leaves such rows out"):
        prepare(config(rows, missing="refuse"), ByteTokenizer(), "train")


def test_cache_key_follows_text_tokenizer_and_split(corpus: Path) -> None:
    folders = [prepare(config(corpus), ByteTokenizer(), split).folder for split in ("train", "validation")]
    folders.append(prepare(config(corpus), ByteTokenizer(fingerprint="c" * 64), "train").folder)
    corpus.write_text(TEXT.replace("400", "401") + ".")
    folders.append(prepare(config(corpus), ByteTokenizer(), "train").folder)
    assert len(set(folders)) == 4
    assert prepare(config(corpus, sequence_length=64, workers=2), ByteTokenizer(), "train").folder == folders[-1]


def test_held_out_documents_are_not_trained_on(corpus: Path) -> None:
    data = config(corpus, validation_fraction=0.1)
    train, validation = (prepare(data, ByteTokenizer(), split) for split in ("train", "validation"))
    assert train.documents + validation.documents == 400
    assert 20 < validation.documents < 60
    numbers = [{line.split()[1] for line in text_of(s).split("Document") if line} for s in (train, validation)]
    assert len(numbers[0] & numbers[1]) <= 1
    lines = set(tokenizer_corpus(data))
    assert len(lines) == train.documents + 1
    assert all(line in text_of(train) for line in lines)


def test_validation_files_leave_the_training_text_whole(corpus: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "valid.txt.gz"
    held_out.write_bytes(gzip.compress(b"Held out."))
    data = config(corpus, validation_files=str(held_out))
    assert prepare(data, ByteTokenizer(), "train").documents == 400
    assert text_of(prepare(data, ByteTokenizer(), "validation")) == "Held out."
    with pytest.raises(DataError, match=r"data\.validation_files: .*corpus.txt is training text too"):
        prepare(config(corpus, validation_files=f"{tmp_path}/c*.txt"), ByteTokenizer(), "validation")


def test_no_validation(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_corpus(config(corpus, validation_fraction=0), "validation") is None
    assert prepare(config(corpus, validation_fraction=0), ByteTokenizer(), "train").documents == 400
    corpus.write_text("One short text.")
    with caplog.at_level(logging.WARNING):
        assert prepare(config(corpus), ByteTokenizer(), "validation") is None
    assert "validation is off: the text is too short to hold out 0.01 of it" in caplog.text
    assert "a blank line ends one" in caplog.text  # else 500 lines are one document
    caplog.clear()
    second = Verifier(tmp_path / "memory", Ranks(rank=1))
    assert open_corpus(config(corpus), "validation", verifier=second) is None
    assert caplog.text == "", "each rank says it"
    assert text_of(prepare(config(corpus), ByteTokenizer(), "train")) == "One short text."


def test_damaged_cache_is_named(corpus: Path) -> None:
    folder = prepare(config(corpus), ByteTokenizer(), "train").folder
    with (folder / "shard-00000.bin").open("r+b") as shard:
        shard.write(b"\xff\xff")
    with pytest.raises(DataError, match=r"shard-00000\.bin is damaged: expected SHA-256"):
        prepare(config(corpus), ByteTokenizer(), "train")
    prepare(config(corpus, verify=False), ByteTokenizer(), "train")


def test_prepared_folder_needs_no_text(corpus: Path, tmp_path: Path) -> None:
    written = prepare_folder(config(corpus), ByteTokenizer(), tmp_path / "out")
    assert {split: shards.folder for split, shards in written.items()} == {
        split: tmp_path / "out" / split for split in ("train", "validation")
    }
    assert prepare_folder(config(corpus), ByteTokenizer(), tmp_path / "out").keys() == written.keys()
    corpus.unlink()
    data = DataConfig(shards=tmp_path / "out")
    for split, shards in written.items():
        assert text_of(prepare(data, ByteTokenizer(), split)) == text_of(shards)
    with pytest.raises(DataError, match="was tokenized with the tokenizer bbb"):
        prepare(data, ByteTokenizer(fingerprint="c" * 64), "train")
    with pytest.raises(DataError, match=r"data\.files is empty: data\.shards alone holds no text"):
        list(tokenizer_corpus(data))
    for file in (tmp_path / "out" / "validation").iterdir():
        file.unlink()
    (tmp_path / "out" / "validation").rmdir()
    assert prepare(data, ByteTokenizer(), "validation") is None


def test_prepared_folder_is_never_overwritten(corpus: Path, tmp_path: Path) -> None:
    prepare_folder(config(corpus), ByteTokenizer(), tmp_path / "out")
    corpus.write_text("Other text.")
    with pytest.raises(DataError, match="train holds other shards than this job makes"):
        prepare_folder(config(corpus), ByteTokenizer(), tmp_path / "out")
    with pytest.raises(DataError, match="is a file; name a new folder for the shards"):
        prepare_folder(config(corpus), ByteTokenizer(), corpus)


def test_hub_splits(tmp_path: Path) -> None:
    rows = {"train": ["a", "b", "c"], "validation": ["d"]}
    tables = {split: datasets.Dataset.from_dict({"text": texts}) for split, texts in rows.items()}
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "hub")
    data = DataConfig(name=str(tmp_path / "hub"), validation_split="validation", cache=tmp_path / "cache", workers=1)
    assert text_of(prepare(data, ByteTokenizer(), "train")) == "abc"
    assert text_of(prepare(data, ByteTokenizer(), "validation")) == "d"
    key = cache_key(open_corpus(data, "train"), ByteTokenizer(), {})
    assert key == cache_key(open_corpus(data, "train"), ByteTokenizer(), {})


def test_docstrings_are_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    for name in "ab":
        sentence = f"This is the text of the module {name} and it is long enough."
        (folder / f"{name}.py").write_text(f'"""{sentence}"""\n')
    monkeypatch.setattr(docstrings, "python_folders", lambda: [folder])
    data = DataConfig(source="docstrings", cache=tmp_path / "cache", workers=1, validation_fraction=0)
    shards = prepare(data, ByteTokenizer(), "train")
    assert shards.documents == 2
    assert list(tokenizer_corpus(data)) == [
        f"This is the text of the module {name} and it is long enough." for name in "ab"
    ]


@pytest.mark.realdata
@pytest.mark.skipif("CAPT_DATA" not in os.environ, reason="CAPT_DATA is not set")
class TestRealText:
    ROOT = Path(os.environ.get("CAPT_DATA", ""))

    def test_books_pack_without_padding(self, tmp_path: Path) -> None:
        data = DataConfig(
            files=f"{self.ROOT}/corpus/books.valid.txt.gz",
            validation_files=f"{self.ROOT}/lm/wikitext-2/wiki.valid.tokens",
            cache=tmp_path,
            workers=1,
        )
        train, validation = (prepare(data, ByteTokenizer(), split) for split in ("train", "validation"))
        assert (train.documents, validation.documents) == (4, 60)
        for shards in (train, validation):
            windows = PackedDataset(shards, 512)
            assert windows.real_tokens > 0.999
            assert (windows.window(len(windows) // 2) != 1).all()
        text = gzip.decompress((self.ROOT / "corpus" / "books.valid.txt.gz").read_bytes()).decode()
        stream = train.read(0, train.tokens)
        assert ByteTokenizer().decode(stream) == "".join(part.strip("\n") for part in text.split("\n\n"))

    def test_tokens_are_the_tokenizers_whatever_the_number_of_workers(self, tmp_path: Path) -> None:
        from capt.tokenizer.encode import load_tokenizer

        tokenizer = load_tokenizer(self.ROOT / "vocab" / "roberta")
        (tmp_path / "a.txt").write_text(
            "A text with <mask> and </s> in it.\n\n" + "Some other text, and more. \n" * 20_000
        )
        one, two = (
            prepare(config(tmp_path / "a.txt", workers=n, cache=tmp_path / str(n)), tokenizer, "train") for n in (1, 2)
        )
        np.testing.assert_array_equal(one.read(0, one.tokens), two.read(0, two.tokens))
        np.testing.assert_array_equal(
            one.read(0, int(one.starts[1]) - 1), tokenizer.encode_batch(["A text with <mask> and </s> in it."])[0]
        )
