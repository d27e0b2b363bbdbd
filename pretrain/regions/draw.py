"""A picture of a region store with its boxes drawn."""

from __future__ import annotations

import io
import warnings

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from pretrain.base.errors import DataError
from pretrain.regions.summary import PictureSummary

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
_LONGEST_SIDE, _DPI = 12.0, 100
"""Inches, and pixels an inch."""


def draw(picture: PictureSummary, image: Image.Image | None = None) -> bytes:
    """A PNG of the boxes of a picture with their labels, over ``image`` or on white.

    Raises:
        DataError: ``image`` has other proportions than the picture in the store.
    """
    inches = [_LONGEST_SIDE * length / max(picture.width, picture.height) for length in (picture.width, picture.height)]
    figure = Figure(figsize=(max(inches[0], 0.5), max(inches[1], 0.5)), dpi=_DPI)
    FigureCanvasAgg(figure)
    axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axis.set_xlim(0, picture.width)
    axis.set_ylim(picture.height, 0)
    axis.set_axis_off()
    if image is not None:
        _require_same_proportions(image.size, picture)
        axis.imshow(image, extent=(0, picture.width, picture.height, 0), aspect="auto")
    for number, region in enumerate(picture.regions):
        left, top, right, bottom = region.box
        colour = _COLOURS[number % len(_COLOURS)]
        axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=1.5))
        axis.text(
            left, top, region.label or str(number + 1), color="white", fontsize=8,
            va="bottom" if top > picture.height / 10 else "top",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0, "alpha": 0.8},
        )  # fmt: skip
    axis.text(
        0.5, 0.005, f"{picture.name}: {picture.width} x {picture.height} pixels, {len(picture.regions)} regions; "
        f"features: {picture.features}", transform=axis.transAxes, color="black", fontsize=8, ha="center", va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 2.0, "alpha": 0.8},
    )  # fmt: skip
    buffer = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font lacks is drawn as a box
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _require_same_proportions(size: tuple[int, int], picture: PictureSummary) -> None:
    width, height = size
    if abs(width * picture.height - height * picture.width) > max(width, height, picture.width, picture.height):
        raise DataError(
            f"the picture to draw over has {width} x {height} pixels, and {picture.name} has "
            f"{picture.width} x {picture.height}: it is another picture"
        )
