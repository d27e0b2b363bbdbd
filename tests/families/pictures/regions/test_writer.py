"""A store gives back what was written, and what is no picture is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.regions.picture import Labels, Picture
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.regions.writer import write_store
from tests.families.pictures.regions.pictures import random_pictures


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("labels", [True, False])
def test_what_is_written_is_read(tmp_path: Path, dtype: Any, labels: bool) -> None:
    pictures = list(random_pictures(30, labels=labels))
    manifest = write_store(tmp_path / "s", iter(pictures), feature_dtype=dtype, features_of={"backend": "test"})
    store = RegionStore.open(tmp_path / "s")
    assert len(store) == 30
    assert store.manifest == manifest
    assert manifest.regions == sum(len(p.features) for p in pictures)
    assert manifest.most_regions == max(len(p.features) for p in pictures)
    order = np.random.default_rng(1).permutation(30)
    rows = store.rows([pictures[i].id for i in order])
    assert rows.tolist() == order.tolist()  # the order of the pictures is that of the source
    read = store.regions(rows)
    for place, number in enumerate(order):
        picture = pictures[number]
        n = len(picture.features)
        expected = picture.features.astype(np.float16 if dtype == "fp16" else np.float32)
        assert np.array_equal(read.features[place, :n], expected)
        assert not read.features[place, n:].any()
        scale = np.array([picture.width, picture.height] * 2, dtype=np.float32)
        assert np.array_equal(read.boxes[place, :n], picture.boxes / scale)
        assert not read.boxes[place, n:].any()
        assert read.present[place].tolist() == [True] * n + [False] * (read.present.shape[1] - n)
        if labels:
            assert picture.objects is not None
            assert picture.attributes is not None
            assert read.object_ids is not None
            assert np.array_equal(read.object_ids[place, :n], picture.objects.ids)
            assert read.attribute_scores is not None
            assert np.array_equal(read.attribute_scores[place, :n], picture.attributes.scores)
        else:
            assert read.object_ids is None
            assert read.attribute_scores is None


def test_the_arrays_are_plain_numpy_files(tmp_path: Path) -> None:
    pictures = list(random_pictures(5))
    write_store(tmp_path / "s", pictures, feature_dtype="fp32", features_of={})
    features = np.load(tmp_path / "s" / "features.npy", mmap_mode="r")
    assert np.array_equal(features, np.concatenate([p.features for p in pictures]))
    assert np.load(tmp_path / "s" / "names.npy").tolist() == [f"p{i}".encode() for i in range(5)]


def _good() -> Picture:
    return next(random_pictures(1, regions=(3, 3)))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"width": 0}, "picture 'p0': a width of 0 pixels"),
    "no name": ({"id": ""}, "'' is not a name"),
    "control": ({"id": "a\x1b[2J"}, "is not a name"),
    "no region": ({"features": np.zeros((0, 6), np.float32)}, "at least one"),
    "nan": ({"features": np.full((3, 6), np.nan, np.float32)}, "not finite"),
    "too large for fp16": ({"features": np.full((3, 6), 7e4, np.float32)}, "70000 does not fit fp16"),
    "boxes": ({"boxes": np.zeros((2, 4), np.float32)}, "boxes of shape"),
    "outside": ({"boxes": np.array([[0, 0, 1, 1], [0, 0, 5000, 1], [0, 0, 1, 1]], np.float32)}, "box 2 "),
    "turned": ({"boxes": np.array([[0, 0, 1, 1], [5, 0, 4, 1], [0, 0, 1, 1]], np.float32)}, "box 2 "),
    "nan box": ({"boxes": np.full((3, 4), np.nan, np.float32)}, "box 1 "),
    "classes": ({"objects": Labels(np.array([0, -1, 0]), np.ones(3, np.float32))}, "object class -1"),
    "scores": ({"attributes": Labels(np.zeros(3, np.int64), np.full(3, 1.5, np.float32))}, "score of 1.5"),
    "too few": ({"attributes": Labels(np.zeros(2, np.int64), np.ones(2, np.float32))}, "2 attribute classes"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_picture_is_refused(tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    with pytest.raises(DataError, match=message):
        write_store(tmp_path / "s", [_good()._replace(**change)], feature_dtype="fp16", features_of={})
    assert list(tmp_path.iterdir()) == []


def test_a_box_may_leave_the_picture_by_rounding(tmp_path: Path) -> None:
    boxes = np.array([[-0.0009, 0, 100.0009, 50]] * 3, np.float32)
    picture = _good()._replace(width=100, height=50, boxes=boxes)
    write_store(tmp_path / "s", [picture], feature_dtype="fp16", features_of={})
    RegionStore.open(tmp_path / "s").regions(np.array([0]))


def test_pictures_of_a_store_are_alike(tmp_path: Path) -> None:
    first, second = random_pictures(2)
    wider = next(random_pictures(1, size=7))._replace(id="wide")
    for pictures, message in (
        ([first, second, first, second], "2 pictures more than once: 'p0', 'p1'"),
        ([first, wider], "'wide': 7 features a region, and 6 in 'p0'"),
        ([first, second._replace(objects=None)], "'p0' has objects and 'p1' has none"),
        ([second._replace(objects=None), first], "'p0' has objects and 'p1' has none"),
        ([], "no pictures"),
    ):
        with pytest.raises(DataError, match=message):
            write_store(tmp_path / "s", pictures, feature_dtype="fp16", features_of={})
        assert list(tmp_path.iterdir()) == []


def test_a_store_is_never_overwritten(tmp_path: Path) -> None:
    write_store(tmp_path / "s", random_pictures(1), feature_dtype="fp16", features_of={})
    with pytest.raises(DataError, match="already exists"):
        write_store(tmp_path / "s", random_pictures(1), feature_dtype="fp16", features_of={})
