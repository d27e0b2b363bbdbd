"""Region stores and feature files from somebody else."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.verification import Verifier
from capt.pretrain.regions.class_names import ClassNames
from capt.pretrain.regions.importing import import_regions
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.regions.summary import describe, summarize
from capt.pretrain.regions.tsv import FIELDS
from capt.pretrain.regions.writer import write_store
from tests.families.pictures.regions.pictures import encode, random_pictures
from tests.fuzz.harness import HOSTILE, check, command, inputs, library, mutated, snapshot
from tests.fuzz.planting import changed_json, plant


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regions") / "store"
    write_store(folder, random_pictures(12), feature_dtype="fp16", features_of={"backend": "x"})
    return folder


def _damage(rng: random.Random, folder: Path) -> None:
    path = folder / "manifest.json"
    name = rng.choice(sorted(file.name for file in folder.iterdir()))
    kind = rng.randrange(6)
    if kind == 0:
        path.write_bytes(mutated(rng, path.read_bytes()))
    elif kind == 1:
        path.write_text(json.dumps(changed_json(rng, json.loads(path.read_text()))))
    elif kind == 2:
        (folder / name).write_bytes(mutated(rng, (folder / name).read_bytes()))
    elif kind == 3:
        plant(rng, folder / name)
    else:  # content and manifest agree; half of the time the length does as well
        content = (folder / name).read_bytes()
        changed = mutated(rng, content)
        if kind == 5 and name.endswith(".npy"):
            changed = (content[:128] + bytes(rng.choice((0, 1, 127, 128, 255)) for _ in content))[: len(content)]
        (folder / name).write_bytes(changed)
        try:
            manifest: dict[str, Any] = json.loads(path.read_text())
            manifest["files"][name].update(bytes=len(changed), sha256=hashlib.sha256(changed).hexdigest())
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        path.write_text(json.dumps(manifest))


def _use(folder: Path, verifier: Verifier | None) -> None:
    store = RegionStore.open(folder, verifier)
    everything = np.arange(len(store))
    store.find([*store.names(0, 100), "458752", "COCO_train2014_000000458752", "\ud800", ""])
    read = store.regions(everything[:100])
    assert np.isfinite(read.boxes).all()
    store.features_at(np.array([0, store.manifest.regions - 1]))
    summarize(store)
    describe(store, store.names(0, 1)[0], ClassNames.of(store.manifest))


def test_stores(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    codes = set()
    for number, rng in inputs("region-stores"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        _damage(rng, folder)
        before = snapshot(folder)
        for verifier in (Verifier(tmp_path / "cache", again=True), None):
            outcome = library(partial(_use, folder, verifier))
            check(outcome, f"region-stores:{number}")
            codes.add(outcome.code)
        assert snapshot(folder) == before
    assert 2 in codes


def _tsv(rng: random.Random) -> bytes:
    rows = [encode(picture) for picture in random_pictures(4)]
    at = rng.randrange(len(rows))
    fields = rows[at].rstrip(b"\n").split(b"\t")
    kind = rng.randrange(4)
    if kind == 0:
        return mutated(rng, b"".join(rows))
    if kind == 1:
        fields[rng.randrange(len(FIELDS))] = str(rng.choice(HOSTILE)).encode(errors="replace")
    elif kind == 2:
        place = rng.randrange(len(FIELDS))
        fields[place] = mutated(rng, fields[place])
    else:  # whole base64 of other values
        place = rng.choice([FIELDS.index(name) for name in ("objects_id", "attrs_conf", "boxes", "features")])
        fields[place] = bytes(rng.choice(b"AQgw/8f+") for _ in fields[place])
    rows[at] = b"\t".join(fields) + b"\n"
    return b"".join(rows)


def test_feature_files(tmp_path: Path) -> None:
    codes = set()
    path, out = tmp_path / "f", tmp_path / "store"
    for number, rng in inputs("regions-tsv"):
        path.write_bytes(_tsv(rng))
        outcome = library(partial(import_regions, out, [path], workers=1))
        check(outcome, f"regions-tsv:{number}")
        if outcome.code == 0:
            _use(out, Verifier(tmp_path / "cache", again=True))
            shutil.rmtree(out)
        assert {entry.name for entry in tmp_path.iterdir()} <= {"f", "cache"}, f"regions-tsv:{number}"
        codes.add(outcome.code)
    assert 2 in codes


def test_planted_files_and_folders_of_an_import(tmp_path: Path) -> None:
    """Something else where a file is to be read, and where the import keeps what it has done."""
    good = b"".join(map(encode, random_pictures(3)))
    for number, rng in inputs("regions-planted", 20):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "f").write_bytes(good)
        if rng.random() < 0.5:
            plant(rng, folder / "f")
        else:
            work = folder / ".s.import"
            if rng.random() < 0.5:
                work.mkdir()
                plant(rng, work / rng.choice(("plan.json", "journal", "features.npy", "names.npy", "manifest.json")))
            else:
                plant(rng, work)
        outcome = command("regions", "import", str(folder / "f"), "--out", str(folder / "s"), "--workers", "1")
        check(outcome, f"regions-planted:{number}")
        if outcome.code == 0:
            _use(folder / "s", Verifier(tmp_path / "cache", again=True))
