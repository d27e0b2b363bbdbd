"""Corpora from somebody else: every format, damaged, mislabelled, packed or planted."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from capt.pretrain.data.config import DataConfig
from capt.pretrain.data.prepare import prepare
from tests.fuzz.harness import HOSTILE, check, inputs, library, mutated, snapshot
from tests.fuzz.planting import changed_json, plant
from tests.unit.data.doubles import ByteTokenizer

TEXTS = [f"A document with the number {i}, naïve 日本 😀." for i in range(20)]
SUFFIXES = (".txt", ".tokens", ".raw", ".jsonl", ".json", ".txt.gz", ".jsonl.gz", ".parquet")


def _content(suffix: str) -> bytes:
    if suffix == ".parquet":
        out = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "n": list(range(20))}), out)
        return out.getvalue()
    lines = [json.dumps({"text": text, "n": i}) for i, text in enumerate(TEXTS)] if ".json" in suffix else TEXTS
    content = "\n".join(lines).encode()
    return gzip.compress(content, mtime=0) if suffix.endswith(".gz") else content


def _row(rng: random.Random) -> str:
    row = changed_json(rng, {"text": rng.choice(TEXTS), "n": 1})
    return rng.choice(
        [json.dumps(row), '{"text": "\\ud800"}', '{"text": ' + "9" * 5000 + "}", "[" * 5000, '{"text": NaN}']
    )


def _damage(rng: random.Random, path: Path, suffix: str) -> None:
    kind = rng.randrange(6)
    content = _content(suffix)
    if kind == 0:
        plant(rng, path)
    elif kind == 1:
        path.write_bytes(_content(rng.choice(SUFFIXES)))  # what the name does not say
    elif kind == 2:
        path.write_bytes(rng.randbytes(rng.choice((0, 1, 100, 10_000))))
    elif kind == 3 and ".json" in suffix:
        text = "\n".join(_row(rng) for _ in range(5)).encode("utf-8", "surrogatepass")
        path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    elif kind == 3 and suffix == ".parquet":
        column = rng.choice([[b"\xff\xfe"] * 3, [1, 2], [None, "a"], [["a"]], ["\0"], [], [str(rng.choice(HOSTILE))]])
        pyarrow.parquet.write_table(pyarrow.table({rng.choice(("text", "", "\n")): column}), path)
    elif kind == 4 and suffix.endswith(".gz"):
        path.write_bytes(gzip.compress(rng.choice((b"\0", b"a", b"a\n", b"\xc3", b"{")) * (1 << 17)))
    else:
        path.write_bytes(mutated(rng, content))


def _use(path: Path, cache: Path) -> None:
    data = DataConfig(files=[str(path)], cache=cache, workers=1, validation_fraction=0.2)
    for split in ("train", "validation"):
        prepare(data, ByteTokenizer(), split)


def test_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capt.pretrain.base.files.LONGEST_LINE", 1 << 16)  # as it is, writing the input takes seconds
    folder, cache = tmp_path / "text", tmp_path / "cache"
    codes = set()
    for number, rng in inputs("corpora"):
        for used in (folder, cache):
            shutil.rmtree(used, ignore_errors=True)
        folder.mkdir()
        suffix = rng.choice(SUFFIXES)
        path = folder / f"a{suffix}"
        _damage(rng, path, suffix)
        if path.is_file() and path.stat().st_size > 1 << 30:
            path.unlink()  # text may be large: terabytes of NUL are found at the first, but must be hashed
            path.touch()
        before = snapshot(folder)
        outcome = library(partial(_use, path, cache))
        check(outcome, f"corpora:{number}")
        assert snapshot(folder) == before
        if outcome.code == 2:
            assert not [file for file in cache.rglob("*") if file.is_file() and not file.name.startswith("verified-")]
        codes.add(outcome.code)
    assert codes == {0, 2}
