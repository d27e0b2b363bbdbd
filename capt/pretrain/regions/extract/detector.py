"""Regions as the cells of a grid, or as the objects that a detector of the DETR kind finds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.regions.extract.folder import VisionModel

# Regions as the cells of a grid: of a convolutional network's last map, or of a vision transformer's patches.


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
    # A convolutional network gives a map, a transformer a row of tokens.
    if hidden.ndim == 4:
        return hidden
    # Registers come before the patches, as a classifier's token does.
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
    # floor and ceil, as adaptive pooling takes its rows; -(x * -n // k) rounds up.
    first, last = index * places // count, -((index + 1) * -places // count)
    return low + first / places * (high - low), low + last / places * (high - low)


class Detections(NamedTuple):
    """The objects of one picture, the most confident first.

    Attributes:
        features: the decoder's last hidden state.
        boxes: left, top, right and bottom edge, divided by the picture's width and height.
        classes: the class of each, as the detector's ``id2label`` numbers them.
        scores: the confidence in that class.
    """

    features: Float32[np.ndarray, "regions size"]
    boxes: Float32[np.ndarray, "regions 4"]
    classes: Int64[np.ndarray, " regions"]
    scores: Float32[np.ndarray, " regions"]


def detect(
    model: VisionModel, pixels: Float[Tensor, "b 3 height width"], *, threshold: float, most: int
) -> list[Detections]:
    """Run the detector on pictures of one size, so that none is padded.

    The probability of a class is a softmax over all classes and "nothing", which is the last, or a sigmoid in the
    families whose classes are independent. A query's class is its most probable one except "nothing", and its
    confidence that probability. Kept are queries of at least ``threshold``, ``most`` at most, and always the best one.
    """
    # Nothing is padded: all pictures of the batch have one size.
    mask = torch.ones(pixels.shape[0], *pixels.shape[2:], dtype=torch.int64, device=pixels.device)
    out = model.network(pixel_values=pixels, pixel_mask=mask)
    logits = out.logits.float()
    probabilities = logits.sigmoid() if model.family.sigmoid else logits.softmax(-1)[..., :-1]
    scores, classes = probabilities.max(-1)
    hidden = out.last_hidden_state
    if hidden.shape[:2] != scores.shape:
        raise ConfigError(f"{model.folder}: {tuple(hidden.shape)} hidden states for {tuple(scores.shape)} queries")
    return [
        _kept(*one, threshold=threshold, most=most)
        for one in zip(hidden.float().cpu(), out.pred_boxes.float().cpu(), classes.cpu(), scores.cpu(), strict=True)
    ]


def _kept(
    hidden: Float[Tensor, "q size"],
    boxes: Float[Tensor, "q 4"],
    classes: Tensor,
    scores: Float[Tensor, " q"],
    *,
    threshold: float,
    most: int,
) -> Detections:
    best = torch.sort(scores, descending=True, stable=True).indices[:most]
    # At least one, so that no picture is without a region.
    kept = best[: max(1, int((scores[best] >= threshold).sum()))]
    # Detectors of the DETR kind give centre and size.
    centre, size = boxes[kept, :2], boxes[kept, 2:]
    edges = torch.cat([centre - size / 2, centre + size / 2], dim=1).clamp(0.0, 1.0)
    return Detections(hidden[kept].numpy(), edges.numpy(), classes[kept].long().numpy(), scores[kept].numpy())
