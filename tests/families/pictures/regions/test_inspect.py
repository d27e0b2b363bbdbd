"""``capt regions``: import and inspect from the command line."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from capt.launcher.cli import app
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.regions.class_names import ClassNames
from capt.pretrain.regions.picture import Labels, Picture
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.regions.summary import describe
from capt.pretrain.regions.writer import write_store
from tests.families.pictures.regions.pictures import encode, random_pictures


def _capt(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["regions", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "f.tsv").write_bytes(b"".join(map(encode, random_pictures(40, regions=(2, 5)))))
    assert "40 pictures" in _capt("import", str(tmp_path / "f.tsv"), "--out", str(tmp_path / "s"), "--workers", "1")
    return tmp_path / "s"


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """A picture of 400 x 100 with three boxes beside each other, which begin at 0, 150 and 300."""
    boxes = np.array([[left, 0, left + 100, 100] for left in (0, 150, 300)], dtype=np.float32)
    certain = Labels(np.arange(3), np.ones(3, dtype=np.float32))
    picture = Picture("scene", 400, 100, np.ones((3, 8), dtype=np.float32), boxes, certain, certain)
    features_of = {"backend": "test", "object_names": ["square", "circle", "box"]}
    write_store(tmp_path / "scenes", [picture], features_of=features_of)
    return tmp_path / "scenes"


def test_what_is_shown_is_what_is_there(store: Path) -> None:
    shown = json.loads(_capt("inspect", str(store), "--json", "--verify", "--picture", "p3"))
    pictures = list(random_pictures(40, regions=(2, 5)))
    assert shown["pictures"] == 40
    assert shown["regions"] == sum(len(p.features) for p in pictures)
    for count, number in shown["histogram"].items():
        assert number == sum(len(p.features) == int(count) for p in pictures)
    assert shown["largest"] == [max(p.width for p in pictures), max(p.height for p in pictures)]
    assert shown["features_of"] == {"backend": "lxmert"}
    assert shown["verified"] is True
    picture = pictures[3]
    assert [region["box"] for region in shown["picture"]["regions"]] == [
        pytest.approx(box.tolist(), abs=1e-3) for box in picture.boxes
    ]
    assert picture.objects is not None
    assert [region["object"][0] for region in shown["picture"]["regions"]] == [str(i) for i in picture.objects.ids]
    text = _capt("inspect", str(store), "--picture", "p3")
    assert "40 pictures" in text
    assert "not read (--verify)" in text
    assert f"p3: {picture.width} x {picture.height}" in text
    assert re.search(r"left +top +right +bottom +\|features\| +attribute, object \(confidence\)", text)


def test_classes_have_names(store: Path, scenes: Path, tmp_path: Path) -> None:
    (tmp_path / "objects.txt").write_text("".join(f"thing {i}\n" for i in range(9)))
    text = _capt("inspect", str(store), "--picture", "p0", "--objects", str(tmp_path / "objects.txt"))
    assert "thing " in text
    assert "1 (1.00), circle (1.00)" in _capt("inspect", str(scenes), "--picture", "scene")
    (tmp_path / "objects.txt").write_text("one\n")
    with pytest.raises(DataError, match=r"objects.txt: 1 name for 9 classes"):
        _capt("inspect", str(store), "--picture", "p0", "--objects", str(tmp_path / "objects.txt"))


def test_boxes_are_drawn_where_they_are(scenes: Path, tmp_path: Path) -> None:
    Image.new("RGB", (800, 200), (255, 0, 0)).save(tmp_path / "i.png")
    name = "scene"
    drawn = {}
    for over in ([], ["--image", str(tmp_path / "i.png")]):
        _capt("inspect", str(scenes), "--picture", name, "--draw", str(tmp_path / "o.png"), *over)
        image = Image.open(io.BytesIO((tmp_path / "o.png").read_bytes())).convert("RGB")
        assert image.size == (1200, 300)
        drawn[bool(over)] = [image.getpixel(place) for place in ((375, 150), (300, 150), (450, 150))]
    assert drawn[False][0] == (255, 255, 255)  # between the boxes
    assert drawn[True][0] == (255, 0, 0)
    for pixels in drawn.values():
        assert all(pixel not in ((255, 255, 255), (255, 0, 0)) for pixel in pixels[1:])  # an edge of a grey box


def test_another_picture_is_not_drawn_over(scenes: Path, tmp_path: Path) -> None:
    Image.new("RGB", (640, 480)).save(tmp_path / "i.png")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    draw = ["inspect", str(scenes), "--draw", str(tmp_path / "o.png"), "--image"]
    for name, message in (("i.png", "640 x 480 .* another picture"), ("bad.png", "bad.png: "), ("no", "No such")):
        with pytest.raises((DataError, FileNotFoundError), match=message):
            _capt(*draw, str(tmp_path / name))
    with pytest.raises(ConfigError, match="--draw"):
        _capt("inspect", str(scenes), "--image", str(tmp_path / "i.png"))
    with pytest.raises(DataError, match="--picture: 1 picture not in the region store"):
        _capt("inspect", str(scenes), "--picture", "none")
    assert not (tmp_path / "o.png").exists()


def test_damage_is_found_by_verify(store: Path) -> None:
    size = (store / "features.npy").stat().st_size
    with (store / "features.npy").open("r+b") as file:
        file.seek(size - 2)
        file.write(b"\x11\x11")
    os.utime(store / "features.npy", ns=(10**18, 10**18))
    _capt("inspect", str(store))
    with pytest.raises(DataError, match=r"features.npy is damaged"):
        _capt("inspect", str(store), "--verify")


def test_options_are_named(tmp_path: Path) -> None:
    for option, value in (("--file-dtype", "int8"), ("--dtype", "bf16")):
        with pytest.raises(ConfigError, match=f"{option} '{value}'"):
            _capt("import", "x", "--out", str(tmp_path / "s"), option, value)


def test_an_import_keeps_the_names_of_classes_and_shows_figures(tmp_path: Path) -> None:
    """Names are drawn and shown without naming the files again; the summary is that of the pictures."""
    pictures = list(random_pictures(40, regions=(2, 5)))
    (tmp_path / "f.tsv").write_bytes(b"".join(map(encode, pictures)))
    for name, count in (("objects", 9), ("attributes", 4)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {i},alias\n" for i in range(count)))
    names = [f"--{name}={tmp_path / name}.txt" for name in ("objects", "attributes")]
    text = _capt("import", str(tmp_path / "f.tsv"), "--out", str(tmp_path / "s"), "--workers", "1", *names)
    features = np.concatenate([picture.features for picture in pictures]).astype(np.float16).astype(float)
    assert f"mean {features.mean():.4g}, deviation {features.std():.4g}" in text
    assert "read as img_id, img_h" in text
    lengths = np.concatenate([picture.boxes[:, 2:] - picture.boxes[:, :2] for picture in pictures])
    assert f"to {lengths[:, 0].max():.4g} x {lengths[:, 1].max():.4g} pixels" in text
    picture = pictures[3]
    assert picture.objects is not None
    assert picture.attributes is not None
    shown = _capt("inspect", str(tmp_path / "s"), "--picture", "p3")
    assert f"attributes {picture.attributes.ids[0]} (" in shown
    assert f"objects {picture.objects.ids[0]} (" in shown
    store = RegionStore.open(tmp_path / "s")
    described = describe(store, "p3", ClassNames.of(store.manifest))
    assert described.regions[0].label == f"attributes {picture.attributes.ids[0]} objects {picture.objects.ids[0]}"
    (tmp_path / "objects.txt").write_text("one\n")
    with pytest.raises(DataError, match=r"objects\.txt: 1 name for 9 classes"):
        _capt("import", str(tmp_path / "f.tsv"), "--out", str(tmp_path / "t"), "--workers", "1", *names)
