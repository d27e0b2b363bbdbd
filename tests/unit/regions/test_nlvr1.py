"""Scenes of NLVR v1 become regions that say all that the scene says."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.regions.nlvr1 import COLOURS, COLUMNS, SHAPES, read_scenes, scene_name

ROW: dict[str, Any] = {
    "sentence": "There is a circle.",
    "label": "true",
    "identifier": "7-0",
    "structured_rep": [
        [{"type": "circle", "color": "#0099ff", "size": 20, "x_loc": 80, "y_loc": 5}],
        [],
        [
            {"type": "square", "color": "Black", "size": 10, "x_loc": 0, "y_loc": 90},
            {"type": "triangle", "color": "Yellow", "size": 30, "x_loc": 33, "y_loc": 11},
        ],
    ],
}


def _written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_objects_and_boxes_are_regions(tmp_path: Path) -> None:
    ((_, picture),) = read_scenes([_written(tmp_path / "f.json", ROW)])
    assert (picture.width, picture.height) == (400, 100)
    assert picture.features.shape == (6, len(COLUMNS))
    assert picture.boxes.tolist() == [
        *([0, 0, 100, 100], [150, 0, 250, 100], [300, 0, 400, 100]),  # the second is empty, and seen
        *([80, 5, 100, 25], [300, 90, 310, 100], [333, 11, 363, 41]),
    ]
    assert picture.objects is not None
    assert picture.attributes is not None
    assert [SHAPES[i] for i in picture.objects.ids] == ["box"] * 3 + ["circle", "square", "triangle"]
    assert [COLOURS[i] for i in picture.attributes.ids] == ["grey"] * 3 + ["blue", "black", "yellow"]
    assert (picture.objects.scores == 1).all()
    circle = {name: value for name, value in zip(COLUMNS, picture.features[3].tolist(), strict=True) if value}
    assert circle == pytest.approx({
        "circle": 1, "blue": 1, "at most 20": 1, "size": 0.2, "first box": 1, "centre x": 0.9, "centre y": 0.15,
        "to the left": 0.8, "to the top": 0.05, "to the bottom": 0.75, "touches right": 1,
    })  # fmt: skip


def test_the_scene_can_be_read_back_from_its_features(tmp_path: Path) -> None:
    """Otherwise two scenes that differ would look the same to the model."""
    ((_, picture),) = read_scenes([_written(tmp_path / "f.json", ROW)])
    boxes: list[list[dict[str, Any]]] = [[], [], []]
    for row in picture.features.astype(np.float16).astype(float):
        of = dict(zip(COLUMNS, row.tolist(), strict=True))
        shape = max(SHAPES, key=lambda name: of[name])
        if shape != "box":
            number = max(range(3), key=lambda i: of[("first box", "second box", "third box")[i]])
            colour = max(COLOURS, key=lambda name: of[name])
            place = {"x_loc": round(100 * of["to the left"]), "y_loc": round(100 * of["to the top"])}
            colour = {"blue": "#0099ff"}.get(colour, colour.title())
            boxes[number].append({"type": shape, "color": colour, "size": round(100 * of["size"]), **place})
    assert boxes == ROW["structured_rep"]


def test_a_name_is_that_of_the_scene() -> None:
    name = scene_name(ROW)
    assert name.startswith("7-0-")
    assert len(name) == len("7-0-") + 8
    reordered = {**ROW, "structured_rep": [[dict(reversed(o.items())) for o in box] for box in ROW["structured_rep"]]}
    assert scene_name(reordered) == name
    assert scene_name({**ROW, "structured_rep": ROW["structured_rep"][::-1]}) != name


def test_sentences_about_one_picture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = {**ROW, "structured_rep": ROW["structured_rep"][::-1]}
    first = _written(tmp_path / "a.json", ROW, {**ROW, "sentence": "Another."}, other)
    assert len(list(read_scenes([first]))) == 2
    second = tmp_path / "b.json.gz"
    second.write_bytes(gzip.compress(first.read_bytes()))
    assert len(list(read_scenes([second]))) == 2
    with caplog.at_level(logging.INFO):
        assert [path for path, _ in read_scenes([first, second])] == [first, first]
    assert f"{second}: 3 sentences about a picture that has one already" in caplog.text


def _changed(**change: Any) -> dict[str, Any]:
    box = [{**ROW["structured_rep"][0][0], **change}]
    return {**ROW, "structured_rep": [[], box, []]}


def test_an_object_that_leaves_its_box_is_boxed_by_what_is_seen(tmp_path: Path) -> None:
    ((_, picture),) = read_scenes([_written(tmp_path / "f.json", _changed(x_loc=95, y_loc=-4))])
    assert picture.boxes[3].tolist() == [245, 0, 250, 16]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[", "line 2: not JSON"),
        ({"identifier": "1"}, "line 2: .*structured_rep: Field required; NLVR v1 has"),
        ({**ROW, "structured_rep": [[], []]}, "line 2: .*at least 3"),
        (_changed(type="hexagon"), "line 2: type 'hexagon': known: square, circle, triangle"),
        (_changed(color="#0099fe"), "line 2: color '#0099fe': did you mean '#0099ff'"),
        (_changed(x_loc="3"), "line 2: .*valid number"),
        (_changed(x_loc=1000), "line 2: .*less than 100"),
        (_changed(x_loc=-20), "line 2: an object is outside"),
        (_changed(size=0), "line 2: .*greater than 0"),
    ],
)
def test_a_line_that_is_no_scene_is_named(tmp_path: Path, row: Any, message: str) -> None:
    path = _written(tmp_path / "f.json", ROW)
    with path.open("a") as file:
        file.write(row if isinstance(row, str) else json.dumps(row))
    with pytest.raises(DataError, match=f"f.json, {message}"):
        list(read_scenes([path]))


@pytest.mark.realdata
@pytest.mark.parametrize(("name", "count"), [("dev", 989), ("hidden", 985)])
def test_real_scenes(data_folder: Path, name: str, count: int) -> None:
    path = data_folder / "vl" / "nlvr1" / f"{name}.json"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pictures = [picture for _, picture in read_scenes([path])]
    assert len(pictures) == count
    assert [picture.id for picture in pictures] == [scene_name(row) for row in rows]
    for picture, row in zip(pictures, rows, strict=True):
        assert len(picture.features) == 3 + sum(map(len, row["structured_rep"]))
        assert (picture.features[:, :4].sum(axis=1) == 1).all()


def test_a_packed_file_of_blank_lines_is_not_read_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b"\n" * 200_000))
    with pytest.raises(DataError, match=r"bomb.json.gz, line 100001: over 100,000 blank lines"):
        list(read_scenes([path]))
