"""What a user chooses about an extraction, and what of it decides the features. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.base.errors import ConfigError

_KNOWN = {
    "backend": ("grid", "vit", "detr"),
    "fit": ("whole", "crop"),
    "precision": ("fp32", "bf16"),
    "dtype": ("fp16", "fp32"),
    "names": ("stem", "path"),
}
"""The values of an option that has a few."""

MOST_PIXELS = 89_478_485
"""Pixels that a picture may have unless the user says otherwise: where Pillow suspects a decompression bomb."""

PILLOW_LIMIT = 2 * MOST_PIXELS
"""Pixels above which Pillow refuses a picture itself."""


@dataclass(frozen=True)
class Options:
    """Choices of an extraction. Raises ``ConfigError`` for values that are not possible.

    Attributes:
        backend: ``grid``, ``vit`` or ``detr``.
        model: a Hugging Face folder, or a hub id.
        grid: regions are the cells of a grid of this many rows and columns; None = one region for each patch (``vit``).
        fit: ``whole`` resizes the whole picture to the model's input; ``crop`` follows the folder's own preprocessing,
            which loses what lies outside a square in the middle. Detectors always see the whole picture.
        threshold: a detector's regions have at least this confidence; its most confident one is always kept.
        most: regions that are kept of a detector's at most, the most confident.
        device: ``cpu``, ``cuda``, or ``auto`` = CUDA where there is a GPU.
        precision: in which the model computes.
        batch: pictures in one forward pass.
        dtype: in which features are stored.
        names: ``stem`` = a picture is called by its file's name without the ending; ``path`` = with the folders below
            the given one.
        skip_damaged: leave out pictures that cannot be read, and say which, instead of stopping.
        most_pixels: a picture with more is refused before it is decoded.
    """

    backend: str
    model: Path
    grid: int | None = None
    fit: str = "whole"
    threshold: float = 0.2
    most: int = 36
    device: str = "auto"
    precision: str = "fp32"
    batch: int = 8
    dtype: str = "fp16"
    names: str = "stem"
    skip_damaged: bool = False
    most_pixels: int = MOST_PIXELS

    def __post_init__(self) -> None:
        for key, values in _KNOWN.items():
            if getattr(self, key) not in values:
                raise ConfigError(f"--{key} is {' or '.join(values)}, got {getattr(self, key)!r}")
        if self.backend == "detr" and (self.grid is not None or self.fit != "whole"):
            raise ConfigError("--grid and --fit belong to the backends grid and vit; a detector finds its own boxes")
        if not 0 <= self.threshold < 1:
            raise ConfigError(f"--threshold is a confidence from 0 to below 1, got {self.threshold}")
        for key, most in {"batch": 4096, "most": 10_000, "most_pixels": PILLOW_LIMIT, "grid": 1000}.items():
            value = getattr(self, key)
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"--{key.replace('_', '-')} is a number from 1 to {most:,}, got {value}")

    @property
    def cells(self) -> int | None:
        """Rows and columns of the grid: 6 for ``grid`` unless given; None = the patches themselves."""
        return 6 if self.grid is None and self.backend == "grid" else self.grid

    @property
    def of_features(self) -> dict[str, Any]:
        """The choices that change what a region's features are, or which regions there are."""
        if self.backend == "detr":
            return {"threshold": self.threshold, "most": self.most, "precision": self.precision}
        return {"grid": self.cells, "fit": self.fit, "precision": self.precision}
