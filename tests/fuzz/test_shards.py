"""Shard folders from somebody else: damaged, planted, or made to fit a lie."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.verification import Verifier
from capt.pretrain.data.shard_writer import write_shards
from capt.pretrain.data.shards import PackedDataset, ShardSet, summarize
from tests.fuzz.harness import check, inputs, library, mutated, snapshot
from tests.fuzz.planting import changed_json, plant
from tests.unit.data.doubles import ByteTokenizer, ListCorpus


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "train"
    texts = [f"Document {i}. " * (i % 7 + 1) for i in range(40)]
    write_shards(
        ListCorpus(texts), ByteTokenizer(), folder, key="k", options={"held_out": 0.1}, workers=1, shard_tokens=700,
        verifier=Verifier(folder.parent),
    )  # fmt: skip
    return folder


def _damage(rng: random.Random, folder: Path) -> None:
    path = folder / "manifest.json"
    name = rng.choice(sorted(file.name for file in folder.iterdir()))
    kind = rng.randrange(5)
    if kind == 0:
        path.write_bytes(mutated(rng, path.read_bytes()))
    elif kind == 1:
        path.write_text(json.dumps(changed_json(rng, json.loads(path.read_text()))))
    elif kind == 2:
        (folder / name).write_bytes(mutated(rng, (folder / name).read_bytes()))
    elif kind == 3:
        plant(rng, folder / name)
    else:  # content and manifest agree
        (folder / name).write_bytes(mutated(rng, (folder / name).read_bytes()))
        try:
            manifest: dict[str, Any] = json.loads(path.read_text())
        except ValueError:
            return
        for record in manifest.get("files", []):
            content = (folder / str(record.get("name"))).read_bytes() if record.get("name") == name else None
            if content is not None:
                record.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        if rng.random() < 0.3:
            manifest = changed_json(rng, manifest)
        path.write_text(json.dumps(manifest))


def _use(folder: Path, cache: Path) -> None:
    shards = ShardSet.open(folder, Verifier(cache, again=True))
    shards.check_tokenizer(ByteTokenizer())
    windows = PackedDataset(shards, 32)
    for index in {0, len(windows) // 2, len(windows) - 1}:
        windows.window(index)
        windows.documents(index)
    summarize(shards, 32, lambda ids: " ".join(map(str, ids)))


def _read_all(folder: Path) -> None:
    ShardSet.open(folder).read(0, 1 << 20)


def test_shard_folders(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    codes = set()
    for number, rng in inputs("shards"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        _damage(rng, folder)
        before = snapshot(folder)
        outcome = library(partial(_use, folder, tmp_path / "cache"))
        check(outcome, f"shards:{number}")
        check(library(partial(_read_all, folder)), f"shards:{number}, as a worker opens it")
        assert snapshot(folder) == before
        codes.add(outcome.code)
    assert 2 in codes
