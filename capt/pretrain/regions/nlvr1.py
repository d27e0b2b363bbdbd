"""Scenes of NLVR v1 as pictures: each object and each grey box is a region, exactly as the data describe it.

A scene is a picture of 400 x 100 pixels with three grey boxes of 100 x 100, which begin at 0, 150 and 300. Boxes hold
objects: squares, circles and triangles, black, blue or yellow, with a place in their box and a size (Suhr et al.,
2017, "A Corpus of Natural Language for Visual Reasoning"). The regions are the three boxes, then the objects. `COLUMNS`
says what the features of a region are. Classes of objects are `SHAPES`, classes of attributes `COLOURS`, with
confidence 1.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float32
from pydantic import Field

from capt.pretrain.base.errors import DataError, counted, did_you_mean, shown
from capt.pretrain.base.files import read_lines
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.base.records import Record, parse_record
from capt.pretrain.regions.picture import Labels, Picture

logger = logging.getLogger(__name__)

WIDTH, HEIGHT = 400, 100
SIDE, STEP, BOXES = 100, 150, 3
SHAPES = ("square", "circle", "triangle", "box")
COLOURS = ("black", "blue", "yellow", "grey")
COLUMNS = (
    *SHAPES,
    *COLOURS,
    *("at most 10 pixels", "at most 20", "larger", "size"),  # size, places and distances as parts of 100 pixels
    *("first box", "second box", "third box"),
    *("centre x", "centre y"),  # in its box
    *("to the left", "to the top", "to the right", "to the bottom"),  # distances from the edges of its box
    *("touches left", "touches top", "touches right", "touches bottom"),
)
FEATURES_OF = {"backend": "nlvr1", "version": 1, "columns": list(COLUMNS)}

_MOST_BLANK = 100_000
"""Blank lines of a file: a packed megabyte can hold a thousand million of them."""
_COLOUR_NAMES = {"#000000": "black", "#0099ff": "blue", "#ffff00": "yellow"}
_TOUCHING = 0.5
"""Pixels from an edge at most. In the data an object is at an edge or anywhere, most of them at one."""


class SceneObject(Record):
    """An object of a scene: its kind, and the place of its upper left corner in its box, in pixels."""

    type: Annotated[str, Field(max_length=100)]
    color: Annotated[str, Field(max_length=100)]
    size: Annotated[float, Field(gt=0, le=SIDE)]
    x_loc: Annotated[float, Field(gt=-SIDE, lt=SIDE)]
    y_loc: Annotated[float, Field(gt=-SIDE, lt=SIDE)]


class Scene(Record):
    """What a line of an NLVR v1 file says about its picture."""

    identifier: Annotated[str, Field(min_length=1, max_length=200)]
    structured_rep: Annotated[
        list[Annotated[list[SceneObject], Field(max_length=1000)]], Field(min_length=BOXES, max_length=BOXES)
    ]


def scene_name(row: Mapping[str, Any]) -> str:
    """The name of the picture of an NLVR v1 row: its identifier and a digest of its scene.

    The same identifier in two files, as train and test may have it, so names two pictures.
    """
    scene = json.dumps(row["structured_rep"], sort_keys=True, separators=(",", ":"))
    return f"{row['identifier']}-{sha256(scene.encode()).hexdigest()[:8]}"


def read_scenes(paths: Sequence[Path], progress: ProgressCallback | None = None) -> Iterator[tuple[Path, Picture]]:
    """The pictures of NLVR v1 files (JSON lines, ``.gz`` too) and their files, in their order, each scene once.

    Rows that give the same identifier to the same scene, in one file or in several, are sentences about one picture.

    Raises:
        DataError: a line is not what NLVR v1 has, with file and line.
    """
    total = sum(path.stat().st_size for path in paths if path.is_file())
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    seen: set[str] = set()
    for path in paths:
        repeated = blank = 0
        for number, line in enumerate(read_lines([path], advance), 1):
            if not line.strip():
                blank += 1
                if blank > _MOST_BLANK:
                    raise DataError(f"{path}, line {number}: over {_MOST_BLANK:,} blank lines; NLVR v1 has none")
                continue
            picture = _picture(line, f"{path}, line {number}")
            # Several sentences are about one picture, which each of them describes anew.
            if picture.id in seen:
                repeated += 1
            else:
                seen.add(picture.id)
                yield path, picture
        if repeated:
            logger.info("%s: %s about a picture that has one already", path, counted(repeated, "sentence"))


def _picture(line: str, where: str) -> Picture:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not JSON; NLVR v1 has one JSON object a line") from None
    scene = parse_record(Scene, row, where, "; NLVR v1 has identifier and structured_rep", error=DataError)
    # First the three boxes, then the objects, each with the number of its box.
    kinds = [_kind(item, where) for box in scene.structured_rep for item in box]
    boxes = [number for number, box in enumerate(scene.structured_rep) for _ in box]
    items = [(item.x_loc, item.y_loc, item.size) for box in scene.structured_rep for item in box]
    shapes = np.array([SHAPES.index("box")] * BOXES + [shape for shape, _ in kinds])
    colours = np.array([COLOURS.index("grey")] * BOXES + [colour for _, colour in kinds])
    numbers = np.array([*range(BOXES), *boxes])
    places = np.array([(0.0, 0.0, float(SIDE))] * BOXES + items, dtype=np.float32)
    certain = np.ones(len(shapes), dtype=np.float32)
    # In the box: left, top, and these with the size added.
    edges = np.concatenate([places[:, :2], places[:, :2] + places[:, 2:]], axis=1)
    visible = edges.clip(0, SIDE)  # an object that leaves its box is drawn as far as the box goes
    if (visible[:, 2:] <= visible[:, :2]).any():
        raise DataError(f"{where}: an object is outside of its box of {SIDE} x {SIDE} pixels")
    return Picture(
        scene_name(row),
        WIDTH,
        HEIGHT,
        _features(shapes, colours, numbers, places),
        # From the box to the picture: each box begins 150 pixels to the right of the one before.
        visible + np.outer(numbers, [STEP, 0, STEP, 0]).astype(np.float32),
        Labels(shapes, certain),
        Labels(colours, certain),
    )


def _kind(item: SceneObject, where: str) -> tuple[int, int]:
    """Shape and colour as classes."""
    shape, colour = item.type.lower(), item.color.lower()
    colour = _COLOUR_NAMES.get(colour, colour)
    if shape not in SHAPES[:-1]:
        raise DataError(f"{where}: type {shown(item.type)}: {did_you_mean(shape, SHAPES[:-1])}")
    if colour not in COLOURS[:-1]:
        known = [*COLOURS[:-1], *_COLOUR_NAMES]
        raise DataError(f"{where}: color {shown(item.color)}: {did_you_mean(colour, known)}")
    return SHAPES.index(shape), COLOURS.index(colour)


def _features(
    shapes: np.ndarray, colours: np.ndarray, numbers: np.ndarray, places: Float32[np.ndarray, "regions 3"]
) -> Float32[np.ndarray, "regions size"]:
    x, y, size = places.T
    distances = np.stack([x, y, SIDE - x - size, SIDE - y - size], axis=1)
    columns = [
        np.eye(len(SHAPES))[shapes],
        np.eye(len(COLOURS))[colours],
        np.stack([size <= 10, (size > 10) & (size <= 20), size > 20, size / SIDE], axis=1),
        np.eye(BOXES)[numbers],
        np.stack([x + size / 2, y + size / 2], axis=1) / SIDE,
        distances / SIDE,
        distances <= _TOUCHING,
    ]
    return np.concatenate(columns, axis=1).astype(np.float32)
