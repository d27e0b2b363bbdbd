"""Regions as the objects that a detector of the DETR kind finds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from pretrain.base.errors import ConfigError
from pretrain.regions.extract.folder import VisionModel


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
    kept = best[: max(1, int((scores[best] >= threshold).sum()))]
    centre, size = boxes[kept, :2], boxes[kept, 2:]
    edges = torch.cat([centre - size / 2, centre + size / 2], dim=1).clamp(0.0, 1.0)
    return Detections(hidden[kept].numpy(), edges.numpy(), classes[kept].long().numpy(), scores[kept].numpy())
