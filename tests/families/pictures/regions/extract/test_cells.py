"""Part of a picture that a region covers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.regions.extract.detector import cell_boxes, pooled
from capt.pretrain.regions.extract.families import FAMILIES
from capt.pretrain.regions.extract.prepare import Preparation


@pytest.mark.parametrize(("rows", "columns", "cells"), [(6, 6, 6), (7, 7, 6), (14, 10, 3), (5, 9, None), (4, 4, 1)])
def test_a_cell_is_the_mean_of_what_its_box_covers(rows: int, columns: int, cells: int | None) -> None:
    """Literally: the mean of those places of the map that lie inside of the box."""
    torch.manual_seed(0)
    features = torch.randn(1, 2, rows, columns, dtype=torch.float64)
    means = pooled(features, cells)[0].flatten(1).T
    boxes = cell_boxes(rows, columns, cells, (0.0, 0.0, float(columns), float(rows)))
    assert len(boxes) == len(means)
    for (left, top, right, bottom), mean in zip(boxes.round().astype(int).tolist(), means, strict=True):
        torch.testing.assert_close(features[0, :, top:bottom, left:right].mean((1, 2)), mean)


def test_boxes_lie_in_the_seen_part() -> None:
    boxes = cell_boxes(2, 2, None, (10.0, 20.0, 30.0, 60.0))
    expected = [[10, 20, 20, 40], [20, 20, 30, 40], [10, 40, 20, 60], [20, 40, 30, 60]]
    assert boxes.tolist() == expected


def test_a_grid_finer_than_the_map_is_refused() -> None:
    with pytest.raises(ConfigError, match="--grid 6 is finer than the model's 4 x 8 cells; give 4"):
        pooled(torch.zeros(1, 2, 4, 8), 6)


@pytest.mark.parametrize("size", [(120, 80), (80, 120), (64, 64), (400, 100)])
@pytest.mark.parametrize(
    ("backend", "kind"), [("vit", "clip"), ("vit", "siglip"), ("grid", "resnet"), ("grid", "convnext")]
)
@pytest.mark.parametrize("fit", ["whole", "crop"])
def test_what_the_model_sees(models: Path, backend: str, kind: str, fit: str, size: tuple[int, int]) -> None:
    """A picture whose red is its column and whose green is its row says itself which part of it was cut out."""
    width, height = size
    ramp = np.zeros((height, width, 3), dtype=np.uint8)
    ramp[..., 0], ramp[..., 1] = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
    preparation = Preparation(models / kind, FAMILIES[backend][kind], fit)
    pixels, (left, top, right, bottom) = preparation(Image.fromarray(ramp))
    if fit == "whole":
        assert (left, top, right, bottom) == (0, 0, width, height)
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.25, 0.3])
    values = pixels * std[:, None, None] + mean[:, None, None]
    seen = [values[0, :, 0].mean() * width, values[1, 0].mean() * height]
    seen += [values[0, :, -1].mean() * width, values[1, -1].mean() * height]
    step = max(right - left, bottom - top) / min(pixels.shape[1:])  # of one pixel of the input
    np.testing.assert_allclose(seen, [left, top, right, bottom], atol=1.5 * step)


def test_a_picture_so_narrow_that_it_would_be_resized_to_gigabytes_is_refused(models: Path) -> None:
    narrow = Image.new("RGB", (2, 40_000))
    crop, whole = (Preparation(models / "clip", FAMILIES["vit"]["clip"], fit) for fit in ("crop", "whole"))
    with pytest.raises(ValueError, match="2 x 40000 pixels would be resized to a length of 800000, over 65536"):
        crop(narrow)
    assert whole(narrow).pixels.shape == (3, 32, 32)
