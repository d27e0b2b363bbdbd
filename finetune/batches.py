"""From encoded rows to batches: padded to their own longest row, for training steps and for a pass over a whole set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, Num
from torch import Tensor

from finetune.encoding import Encoded
from finetune.order import Order, Rows, deal


@dataclass(frozen=True)
class Batch:
    """``n`` rows of ``L`` tokens. ``padded`` is False where all have the same length."""

    tokens: Int[Tensor, "n L"]
    types: Int[Tensor, "n L"] | None
    labels: Num[Tensor, " n"] | None
    padded: bool

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        tokens, types, labels = (
            None if x is None else x.to(device, non_blocking=True) for x in (self.tokens, self.types, self.labels)
        )
        assert tokens is not None
        return Batch(tokens, types, labels, self.padded)


@dataclass(frozen=True)
class Step:
    """This rank's micro-batches of an optimizer step, and the tokens (padding not counted) of all ranks together."""

    parts: list[Batch]
    tokens: int


class RowSet:
    """Encoded rows with their labels (or none), as batches."""

    def __init__(self, encoded: Encoded, labels: np.ndarray | None, pad_id: int, *, types: bool) -> None:
        self.lengths, self.labels = encoded.lengths, labels
        self._encoded, self._pad_id, self._types = encoded, pad_id, types

    def __len__(self) -> int:
        return len(self._encoded)

    def batch(self, rows: Rows) -> Batch:
        """These rows, padded on the right to the longest of them."""
        encoded, lengths = self._encoded, self.lengths[rows]
        width = int(lengths.max())
        tokens = np.full((len(rows), width), self._pad_id, dtype=np.int64)
        for place, row, length in zip(tokens, rows, lengths, strict=True):
            start = encoded.starts[row]
            place[:length] = encoded.ids[start : start + length]
        types = None
        if self._types:
            columns = np.arange(width)
            second = (columns >= encoded.seconds[rows, None]) & (columns < lengths[:, None])
            types = torch.from_numpy(second.astype(np.int64))
        labels = None if self.labels is None else torch.from_numpy(self.labels[rows])
        return Batch(torch.from_numpy(tokens), types, labels, bool((lengths != width).any()))


def training_steps(
    rows: RowSet, order: Order, starts: range, micro: int, world: int, rank: int, *, bucketing: bool
) -> Iterator[Step]:
    """This rank's share of the steps that begin at the sample numbers ``starts``."""
    for start in starts:
        chosen = order.rows(start)
        parts = deal(chosen, rows.lengths if bucketing else None, micro, world, rank)
        yield Step([rows.batch(part) for part in parts], int(rows.lengths[chosen].sum()))


def every_row(rows: RowSet, size: int, world: int = 1, rank: int = 0) -> Iterator[tuple[Rows, Batch]]:
    """This rank's part of a pass over all rows: row numbers and their batch, longest rows first.

    No row comes twice, but every rank gets the same number of batches (engines with partitioned parameters need that):
    one that has run out gets the last batch again, with no row numbers.
    """
    order = np.argsort(-rows.lengths, kind="stable")
    chunks = [order[begin : begin + size] for begin in range(0, len(order), size)]
    for first in range(0, len(chunks), world):
        mine = first + rank
        chosen = chunks[min(mine, len(chunks) - 1)]
        yield (chosen if mine < len(chunks) else chosen[:0]), rows.batch(chosen)
