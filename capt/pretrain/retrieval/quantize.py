r"""Vectors in int8 and in bits, by the rules of sentence-transformers' ``quantize_embeddings``.

int8 has 256 steps in each dimension from the smallest number of some calibration vectors, :math:`a`, to the largest,
:math:`b`: :math:`q = \lfloor (x - a) / s \rfloor - 128` with :math:`s = (b - a) / 255`, and what lies outside becomes
the first or the last step. A bit says whether a number is above 0; the first dimension is the highest bit of a byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int8, UInt8

from capt.pretrain.base.distributed import gather_objects
from capt.pretrain.base.errors import DataError

FEW = 100
"""Calibration vectors, below which extremes say little of other vectors."""


@dataclass(frozen=True)
class Ranges:
    """The smallest and the largest number of each dimension over ``count`` calibration vectors."""

    low: Float32[np.ndarray, " d"]
    high: Float32[np.ndarray, " d"]
    count: int

    @classmethod
    def of(cls, blocks: Iterable[Float[np.ndarray, "_ d"]], dimension: int) -> Ranges:
        """The ranges of the rows of all blocks; of no row they hold nothing (``inf`` to ``-inf``)."""
        low, high = np.full(dimension, np.inf, np.float32), np.full(dimension, -np.inf, np.float32)
        count = 0
        for rows in blocks:
            if len(rows):
                low, high = np.minimum(low, rows.min(0)), np.maximum(high, rows.max(0))
            count += len(rows)
        return cls(low, high, count)

    @classmethod
    def joined(cls, parts: Iterable[Ranges]) -> Ranges:
        """The ranges of the calibration vectors of all parts together."""
        all_parts = list(parts)
        low, high = (np.stack([getattr(each, name) for each in all_parts]) for name in ("low", "high"))
        return cls(low.min(0), high.max(0), sum(each.count for each in all_parts))

    def gathered(self) -> Ranges:
        """The ranges of the calibration vectors of all ranks together. Collective."""
        return Ranges.joined([Ranges(*each) for each in gather_objects((self.low, self.high, self.count))])

    @property
    def steps(self) -> Float32[np.ndarray, " d"]:
        """The distance of two neighbouring codes in each dimension; 1 where all calibration vectors are equal."""
        steps: np.ndarray = (self.high - self.low) / np.float32(255)
        return np.where(steps == 0, np.float32(1), steps)

    def codes(self, rows: Float[np.ndarray, "n d"]) -> Int8[np.ndarray, "n d"]:
        """Rows in int8."""
        codes: np.ndarray = (np.clip(np.floor((rows - self.low) / self.steps), 0, 255) - 128).astype(np.int8)
        return codes

    def restored(self, codes: Int8[np.ndarray, "n d"]) -> Float32[np.ndarray, "n d"]:
        """The numbers in the middle of the steps, of which `codes` makes the same codes again."""
        restored: np.ndarray = (codes.astype(np.float32) + np.float32(128.5)) * self.steps + self.low
        return restored

    def outside(self, rows: Float[np.ndarray, "n d"]) -> int:
        """Count the numbers that lie outside."""
        return int(((rows < self.low) | (rows > self.high)).sum())

    def record(self) -> dict[str, Any]:
        """The ranges as JSON, exactly."""
        return {"vectors": self.count, "low": self.low.tolist(), "high": self.high.tolist()}

    @classmethod
    def read(cls, record: Any, dimension: int, source: Path | str) -> Ranges:
        """The ranges of a `record`. Raises ``DataError`` where it is none of ``dimension`` columns."""
        try:
            assert isinstance(record, Mapping)
            low, high = (np.asarray(record[name], dtype=np.float32) for name in ("low", "high"))
            assert low.shape == high.shape == (dimension,)
            assert bool((np.isfinite(low) & np.isfinite(high) & (low <= high)).all())
            return cls(low, high, int(record["vectors"]))
        except (AssertionError, KeyError, TypeError, ValueError):
            raise DataError(
                f"{source}: not the ranges of {dimension} dimensions in int8; remove the folder, its texts are encoded "
                "again"
            ) from None


def bits_of(rows: Float[np.ndarray, "n d"]) -> UInt8[np.ndarray, "n b"]:
    """A bit for each number, eight in a byte, with zeros at the end."""
    return np.packbits(rows > 0, axis=1)


def signs_of(bits: UInt8[np.ndarray, "n b"], dimension: int) -> Float32[np.ndarray, "n d"]:
    """1 for each bit that is set, and -1 for the others."""
    return np.unpackbits(bits, axis=1, count=dimension).astype(np.float32) * 2 - 1
