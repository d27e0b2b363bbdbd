"""A tokenizer folder from elsewhere cannot grow a text without bound, show other files, or end in a fault of Rust."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from capt.pretrain.base.errors import DataError
from capt.tokenizer.classes import rust_errors
from capt.tokenizer.encode import load_tokenizer

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TWICE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    return tmp_path


def _change(folder: Path, **parts: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [TWICE] * 40}}, "makes a text over 64 times as long"),
        ({"decoder": {"type": "Sequence", "decoders": [TWICE] * 40}}, "decoder: makes a text over 64 times as long"),
        ({"normalizer": {**TWICE, "content": "x" * 65}}, "makes a text over 64 times as long"),
        ({"normalizer": {**TWICE, "pattern": {"String": ""}}}, "a pattern must be a text of 1 to 10000 characters"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 10_001}}, "Prepend needs a text of at most 10000"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}}, "more than 64 steps"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 9}}, "more than 3 steps of"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}}, None),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA/w=="}}, "precompiled_charsmap"),
        ({"normalizer": ["x"]}, "a step must be an object, it is list"),
    ],
)
def test_what_grows_without_bound_is_refused(folder: Path, parts: dict[str, Any], message: str | None) -> None:
    _change(folder, **parts)
    with pytest.raises(DataError, match=message):
        load_tokenizer(folder)


def test_ids_with_gaps_are_refused(folder: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["vocab"]["☃"] = 4_000_000_000
    _change(folder, model=spec["model"])
    with pytest.raises(DataError, match="the largest id is 4000000000, the vocabulary has 262 tokens"):
        load_tokenizer(folder)


@pytest.mark.parametrize("value", ["x", [], {}, 0, True])
def test_settings_are_of_their_type(folder: Path, value: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": value}))
    with pytest.raises(DataError, match=r"tokenizer_config\.json: damaged or of another version: model_max_length"):
        load_tokenizer(folder)


def test_a_sparse_file_of_gibibytes_is_refused(folder: Path) -> None:
    os.truncate(folder / "tokenizer.json", 8 << 30)
    with pytest.raises(DataError, match=r"tokenizer\.json: over 67,108,864 bytes"):
        load_tokenizer(folder)


def test_a_fifo_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a regular file"):
        load_tokenizer(folder)


def test_links_are_followed_within_the_hubs_cache_only(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (folder / "tokenizer.json").rename(blobs / "4567")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/4567")
    assert load_tokenizer(snapshot).vocab_size == 261
    (folder / "tokenizer.json").symlink_to(blobs / "4567")
    with pytest.raises(DataError, match=r"tokenizer\.json: a link; only those of the hub's cache are followed"):
        load_tokenizer(folder)
    (snapshot / "tokenizer_config.json").symlink_to("/etc/hostname")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: a link"):
        load_tokenizer(snapshot)


def test_a_panic_of_the_library_is_an_error_of_ours() -> None:
    panic = type("PanicException", (BaseException,), {})  # what pyo3 raises is no Exception either
    with pytest.raises(DataError, match=r"folder: damaged \(index out of range\)"), rust_errors("folder", "damaged"):
        raise panic("index out of\nrange")
    with pytest.raises(KeyboardInterrupt), rust_errors("folder", "damaged"):
        raise KeyboardInterrupt
