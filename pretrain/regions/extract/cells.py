"""Regions as the cells of a grid: of a convolutional network's last map, or of a vision transformer's patches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor

from pretrain.base.errors import ConfigError
from pretrain.regions.extract.folder import VisionModel

Map = Float[Tensor, "b size rows columns"]


def feature_map(model: VisionModel, pixels: Float[Tensor, "b 3 height width"]) -> Map:
    """The last feature map of a convolutional network, or a vision transformer's patches in their places.

    Tokens that belong to no patch (a classifier's, registers) precede the patches and are left out.
    """
    options: dict[str, Any] = {"interpolate_pos_encoding": True} if model.family.interpolates else {}
    patch = getattr(model.config, "patch_size", None) if not model.family.stride else model.family.stride
    sides = patch if isinstance(patch, list | tuple) else (patch or 1, patch or 1)
    rows, columns = pixels.shape[-2] // int(sides[0]), pixels.shape[-1] // int(sides[1])
    given = pixels
    if model.family.flexible:
        given = _patches(pixels, int(sides[0]))
        options["pixel_attention_mask"] = torch.ones(given.shape[:2], dtype=torch.long, device=given.device)
        options["spatial_shapes"] = torch.tensor([[rows, columns]] * len(given))
    hidden: Tensor = model.network(pixel_values=given, **options).last_hidden_state
    if hidden.ndim == 4:
        return hidden
    before = model.family.tokens_before + int(getattr(model.config, "num_register_tokens", 0) or 0)
    if hidden.shape[1] != before + rows * columns:
        raise ConfigError(
            f"{model.folder}: {hidden.shape[1]} hidden states for {rows} x {columns} patches and {before} other tokens"
        )
    patches: Tensor = hidden[:, before:].transpose(1, 2).unflatten(2, (rows, columns))
    return patches


def _patches(pixels: Float[Tensor, "b 3 height width"], side: int) -> Float[Tensor, "b patches values"]:
    """The pixels of each patch, row by row, the colours of a pixel together."""
    rows = pixels.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # [b, 3, rows, side, columns, side]
    patches: Tensor = rows.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    return patches


def pooled(features: Map, cells: int | None) -> Float[Tensor, "b size _ _"]:
    """The mean of each cell of a grid of ``cells`` rows and columns; the map itself where it is None.

    Raises:
        ConfigError: the map has fewer rows or columns than the grid, so that cells would repeat one another.
    """
    if cells is None:
        return features
    rows, columns = features.shape[-2:]
    if min(rows, columns) < cells:
        raise ConfigError(
            f"--grid {cells} is finer than the model's {rows} x {columns} cells; give {min(rows, columns)}"
        )
    means: Tensor = F.adaptive_avg_pool2d(features, cells)
    return means


def cell_boxes(
    rows: int, columns: int, cells: int | None, seen: tuple[float, float, float, float]
) -> Float32[np.ndarray, "regions 4"]:
    """Left, top, right and bottom edge of each cell, row by row, in pixels of the picture.

    Cell i of k over n rows of the map is the mean of the rows ``floor(i n / k)`` to ``ceil((i + 1) n / k) - 1``, and
    that is what its box covers: neighbours overlap where k does not divide n.

    Args:
        rows: of the map.
        columns: of the map.
        cells: rows and columns of the grid; None = those of the map.
        seen: the part of the picture that the map covers.
    """
    left, top, right, bottom = seen
    x0, x1 = _edges(columns, cells, left, right)
    y0, y1 = _edges(rows, cells, top, bottom)
    boxes = [np.tile(x0, len(y0)), np.repeat(y0, len(x0)), np.tile(x1, len(y0)), np.repeat(y1, len(x0))]
    return np.stack(boxes, axis=1).astype(np.float32)


def _edges(places: int, cells: int | None, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    count = places if cells is None else cells
    index = np.arange(count)
    first, last = index * places // count, -((index + 1) * -places // count)
    return low + first / places * (high - low), low + last / places * (high - low)
