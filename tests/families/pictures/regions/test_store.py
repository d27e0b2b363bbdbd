"""Reading a store: pictures by any of their names, and nothing of a store that is not what its manifest says."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.stores import put_bytes
from capt.pretrain.base.verification import Verifier
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.regions.writer import write_store
from tests.families.pictures.regions.pictures import random_pictures
from tests.unit.data.s3 import put_tree, s3_bucket


def _store(folder: Path, names: list[str] | None = None, count: int = 12, **options: Any) -> RegionStore:
    pictures = list(random_pictures(count if names is None else len(names), **options))
    if names is not None:
        pictures = [picture._replace(id=name) for picture, name in zip(pictures, names, strict=True)]
    write_store(folder / "store", pictures, feature_dtype="fp32", features_of={"backend": "test"})
    return RegionStore.open(folder / "store")


def test_pictures_are_filled_up_to_what_is_asked_for(tmp_path: Path) -> None:
    store = _store(tmp_path, regions=(2, 4))
    rows = np.array([3, 3, 0])
    read = store.regions(rows, most=7)
    assert read.features.shape == (3, 7, 6)
    assert read.present.sum(axis=1).tolist() == store.counts(rows).tolist()
    assert np.array_equal(read.features[0], read.features[1])
    assert not read.features[~read.present].any()
    assert read.object_ids is not None
    assert not read.object_ids[~read.present].any()
    assert store.regions(np.empty(0, dtype=np.int64)).features.shape == (0, 1, 6)


def test_features_by_their_number(tmp_path: Path) -> None:
    store = _store(tmp_path)
    everything = store.regions(np.arange(len(store)))
    flat = everything.features[everything.present]
    places = np.array([5, 0, 5, len(flat) - 1])
    assert np.array_equal(store.features_at(places), flat[places])


def test_a_store_travels_as_its_folder(tmp_path: Path) -> None:
    store = _store(tmp_path, count=200, size=64)
    sent = pickle.dumps(store)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent).regions(np.arange(9)).features, store.regions(np.arange(9)).features)


def test_absent_pictures_are_counted_and_named(tmp_path: Path) -> None:
    store = _store(tmp_path)
    absent = ["x1", "p1", "x2", "x1", "x3", "x4"]
    assert store.find(absent).tolist() == [-1, 1, -1, -1, -1, -1]
    with pytest.raises(DataError, match=r"data.train: 4 pictures not in the region .*: 'x1', 'x2', 'x3', \.\.\.;"):
        store.rows(absent, "data.train")
    strange = ["", "p1\0", "p" * 100_000, "\ud800", "p1 ", "P1"]
    assert store.find(strange).tolist() == [-1] * len(strange)
    assert store.find([]).tolist() == []


def test_pictures_of_coco_have_two_names(tmp_path: Path) -> None:
    names = ["COCO_val2014_000000000042", "COCO_train2014_000000458752"]
    store = _store(tmp_path, names)
    asked = ["458752", "000000458752", "COCO_train2014_000000458752", "42", "COCO_train2014_000000000042", "43"]
    assert store.find(asked).tolist() == [1, 1, 1, 0, -1, -1]  # a name with its subset means that subset


def test_numbers_stand_for_names_of_coco(tmp_path: Path) -> None:
    store = _store(tmp_path, ["458752", "000000000042"])
    asked = ["COCO_train2014_000000458752", "COCO_val2014_000000000042", "42", "000000458752", "COCO_x_42"]
    assert store.find(asked).tolist() == [0, 1, 1, 0, -1]


def test_numbers_of_visual_genome_are_not_those_of_coco(tmp_path: Path) -> None:
    store = _store(tmp_path, ["2375429", "COCO_train2014_000000458752"])
    assert store.find(["458752", "COCO_train2014_000002375429", "2375429"]).tolist() == [-1, -1, 0]


def test_a_number_of_two_pictures_is_not_guessed(tmp_path: Path) -> None:
    store = _store(tmp_path, ["COCO_train2014_000000000042", "COCO_val2014_000000000042"])
    assert store.find(["COCO_val2014_000000000042"]).tolist() == [1]
    with pytest.raises(DataError, match="42 may be COCO_train2014_000000000042 or COCO_val2014_000000000042"):
        store.find(["42"])


def test_hashes_are_compared_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = _store(tmp_path).folder
    for path in folder.iterdir():  # long ago, so that a change would show
        os.utime(path, ns=(10**18, 10**18))
    with (folder / "features.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    RegionStore.open(folder)
    with pytest.raises(DataError, match=r"features.npy is damaged: expected SHA-256"):
        RegionStore.open(folder, Verifier(tmp_path / "cache"))
    RegionStore.open(folder, Verifier(tmp_path / "cache"), verify=False)


def _overwrite(name: str, values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        array = np.load(folder / name)
        array[:] = values(array)
        (folder / name).write_bytes(content[:128] + array.tobytes())

    return change


def _manifest(**change: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    return write


def _cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 1)


def _other_type(folder: Path) -> None:
    path = folder / "features.npy"
    path.write_bytes(path.read_bytes().replace(b"<f4", b"|O8"))


def _linked(folder: Path) -> None:
    (folder / "manifest.json").rename(folder.parent / "elsewhere.json")
    (folder / "manifest.json").symlink_to(folder.parent / "elsewhere.json")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "no region store"),
    "linked": (_linked, "manifest.json: a link"),
    "no file": (lambda folder: (folder / "boxes.npy").unlink(), "boxes.npy is missing"),
    "short": (_cut("features.npy"), r"^\S*features.npy is damaged: .* bytes of <f4 .* are expected"),
    "objects": (_other_type, "features.npy is damaged"),
    "version": (_manifest(format=2), "manifest.json: damaged or of another version: format"),
    "counts": (_manifest(regions=1 << 39), "'attribute_ids.npy' should have 2199023255680 bytes"),
    "no pictures": (_manifest(pictures=0), "pictures: Input should be greater than 0"),
    "most": (_manifest(most_regions=1 << 40), "offsets.npy: damaged"),
    "no classes": (_manifest(object_classes=0), "'object_ids.npy' should have no bytes"),
    "offsets": (_overwrite("offsets.npy", lambda a: a * 2), "offsets.npy: damaged"),
    "turned offsets": (_overwrite("offsets.npy", lambda a: np.where(a == a[3], 0, a)), "offsets.npy: damaged"),
    "sizes": (_overwrite("sizes.npy", lambda a: a * 0), "sizes.npy: damaged"),
    "names": (_overwrite("names.npy", lambda a: a[::-1]), "names.npy: damaged"),
    "name rows": (_overwrite("name_rows.npy", lambda a: a + 1), "name_rows.npy: damaged"),
    "negative": (_overwrite("name_rows.npy", lambda a: a - 1), "name_rows.npy: damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_store_that_is_not_what_its_manifest_says_is_not_opened(tmp_path: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    folder = _store(tmp_path).folder
    damage(folder)
    with pytest.raises(DataError, match=message):
        RegionStore.open(folder)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("boxes.npy", lambda a: a + 5000, "picture 'p1' has boxes that are not in the picture"),
        ("boxes.npy", lambda a: a * np.nan, "picture 'p1' has boxes"),
        ("object_ids.npy", lambda a: a + 9, "picture 'p1' has object classes over 8"),
        ("attribute_ids.npy", lambda a: a - 9, "picture 'p1' has attribute classes over 3"),
    ],
)
def test_what_no_model_can_take_is_refused_when_read(tmp_path: Path, name: str, values: Any, message: str) -> None:
    folder = _store(tmp_path, regions=(2, 2)).folder
    _overwrite(name, values)(folder)
    with pytest.raises(DataError, match=message):
        RegionStore.open(folder).regions(np.array([1, 0]))


def test_names_in_the_other_form_are_looked_up_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path, [f"COCO_train2014_{number:012}" for number in range(50)])
    calls: list[int] = []
    find = RegionStore._find
    monkeypatch.setattr(RegionStore, "_find", lambda self, names: (calls.append(len(names)), find(self, names))[1])
    rows = store.find(["7", "x", "49", "7", "50"] * 100)
    assert rows.tolist() == [7, -1, 49, 7, -1] * 100
    assert len(calls) == 3, "once as they are, once with fewer folders and endings, once in the other form"
    assert calls[1] == 4 * 21, "each name once, without an ending and with each"
    assert calls[2] < 50, "each name once"


def test_a_store_in_a_bucket_is_copied_once_and_a_damaged_one_is_not_used(tmp_path: Path) -> None:
    here = _store(tmp_path, regions=(2, 4))
    with s3_bucket() as bucket:
        put_tree(here.folder, f"{bucket}/store")
        there = RegionStore.open(f"{bucket}/store/", Verifier(tmp_path / "cache"), cache=tmp_path / "cache")
        put_bytes(b"\0" * (here.folder / "boxes.npy").stat().st_size, f"{bucket}/store/boxes.npy")
        with pytest.raises(DataError, match=r"s3://bucket/store/boxes\.npy: expected .* SHA-256 .* copy the region"):
            RegionStore.open(f"{bucket}/store", cache=tmp_path / "other")
        assert not any((tmp_path / "other/regions").iterdir())
        assert RegionStore.open(f"{bucket}/store", cache=tmp_path / "cache").folder == there.folder
        with pytest.raises(DataError, match="s3://bucket/none/manifest"):
            RegionStore.open(f"{bucket}/none", cache=tmp_path / "cache")
    rows = np.arange(len(here))
    for mine, copied in zip(here.regions(rows), pickle.loads(pickle.dumps(there)).regions(rows), strict=True):
        assert mine is not None
        assert copied is not None
        assert np.array_equal(mine, copied)
