"""Batches of any input: what a data set must offer, and this rank's batches of a training step or an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from capt.finetune.encoding import EncodedTexts
from capt.finetune.order import ExampleOrder, RowNumbers, micro_batches_of_rank
from capt.pretrain.base.overlap import rows_as_bytes

InputsT = TypeVar("InputsT", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Batch(Generic[InputsT]):
    """``n`` examples.

    Attributes:
        inputs: the arguments of the module's forward pass, in order; best a named tuple. A value may be a tensor, a
            structure of tensors (two pictures), or a plain value.
        labels: of any shape, ``n`` first (class numbers ``[n]``, scores ``[n]``, soft targets ``[n, answers]``), or
            None for examples without labels.
    """

    inputs: InputsT
    labels: Any = None

    def to(self, device: torch.device) -> Batch[InputsT]:
        """The batch with all its tensors on a device."""
        return Batch(to_device(self.inputs, device), to_device(self.labels, device))


def to_device(structure: Any, device: torch.device) -> Any:
    """The same tuples, lists and mappings with every tensor on ``device``; other values stay as they are."""
    if isinstance(structure, Tensor):
        return structure.to(device, non_blocking=True)
    if isinstance(structure, Mapping):
        return {key: to_device(value, device) for key, value in structure.items()}
    if isinstance(structure, tuple | list):
        values = [to_device(value, device) for value in structure]
        return type(structure)(*values) if hasattr(structure, "_fields") else type(structure)(values)
    return structure


@runtime_checkable
class SizedRows(Protocol):
    """Rows (examples) that are counted and have sizes."""

    @property
    def lengths(self) -> Int64[np.ndarray, " n"]:
        """The size of each row in tokens (or regions): batches of like sizes are made by it, and tokens counted."""
        ...

    def __len__(self) -> int: ...


@runtime_checkable
class RowSet(SizedRows, Protocol):
    """A data set whose rows are read by their numbers, 0 to ``len(rows) - 1``."""

    def batch(self, numbers: RowNumbers) -> Batch[Any]:
        """The rows with these numbers, in this order."""
        ...


@dataclass(frozen=True)
class StepBatches:
    """This rank's micro-batches of an optimizer step, and the tokens (padding not counted) of all ranks together."""

    micro_batches: list[Batch[Any]]
    tokens: int


def training_steps(
    rows: RowSet, order: ExampleOrder, starts: range, micro: int, world: int, rank: int, *, bucketing: bool
) -> Iterator[StepBatches]:
    """This rank's share of the steps that begin at the sample numbers ``starts``."""
    lengths = rows.lengths
    for start in starts:
        numbers = order.rows(start)
        places = micro_batches_of_rank(lengths[numbers], micro, world, rank, bucketing=bucketing)
        yield StepBatches([rows.batch(numbers[part]) for part in places], int(lengths[numbers].sum()))


def evaluation_batches(
    rows: RowSet, size: int, world: int = 1, rank: int = 0
) -> Iterator[tuple[RowNumbers, Batch[Any]]]:
    """This rank's part of one pass over all rows: row numbers and their batch, longest rows first.

    No row comes twice, but every rank gets the same number of batches (engines with partitioned parameters need that):
    a rank that has no more rows gets the last batch again, with no row numbers.
    """
    order = np.argsort(-rows.lengths, kind="stable")
    chunks = [order[begin : begin + size] for begin in range(0, len(order), size)]
    for first in range(0, len(chunks), world):
        mine = first + rank
        chunk = chunks[min(mine, len(chunks) - 1)]
        yield (chunk if mine < len(chunks) else chunk[:0]), rows.batch(chunk)


# Encoded texts as batches: each batch is padded to its own longest row.


class TextInputs(NamedTuple):
    """``n`` rows of ``L`` tokens, padded on the right.

    ``types`` (0 for the first text of a pair, 1 for the second) is None for an encoder that does not read token types.
    ``padded`` is False where all rows have the same length.
    """

    tokens: Int[Tensor, "n L"]
    types: Int[Tensor, "n L"] | None
    padded: bool


class LengthGroup(NamedTuple):
    """Rows of similar length: their numbers, the tokens of the longest, and whether another one is shorter."""

    rows: Int[Tensor, " _"]
    longest: int
    padded: bool


class TextRows:
    """Encoded texts or pairs of texts with their labels, as a `capt.finetune.batches.RowSet`.

    Args:
        encoded: the token ids of every row.
        labels: one number a row (class or score), or None.
        pad_id: the id to pad with.
        types: whether the encoder reads token types.
    """

    def __init__(self, encoded: EncodedTexts, labels: np.ndarray | None, pad_id: int, *, types: bool) -> None:
        self.labels = labels
        self._encoded, self._lengths = encoded, encoded.lengths
        self._pad_id, self._types = pad_id, types

    @property
    def texts(self) -> Iterator[bytes]:
        """The tokens of each row, to be compared with those of other rows."""
        return rows_as_bytes(self._encoded.ids, self._encoded.starts)

    @property
    def lengths(self) -> Int64[np.ndarray, " n"]:
        """Tokens of each row, special tokens included."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._encoded)

    def batch(self, numbers: RowNumbers) -> Batch[TextInputs]:
        """The rows with these numbers, padded on the right to the longest of them."""
        encoded, lengths = self._encoded, self._lengths[numbers]
        width = int(lengths.max())
        tokens = np.full((len(numbers), width), self._pad_id, dtype=np.int64)
        for place, row, length in zip(tokens, numbers, lengths, strict=True):
            start = encoded.starts[row]
            place[:length] = encoded.ids[start : start + length]
        types = None
        if self._types:
            columns = np.arange(width)
            # Padding has type 0, like the first text.
            second = (columns >= encoded.seconds[numbers, None]) & (columns < lengths[:, None])
            types = torch.from_numpy(second.astype(np.int64))
        labels = None if self.labels is None else torch.from_numpy(self.labels[numbers])
        return Batch(TextInputs(torch.from_numpy(tokens), types, bool((lengths != width).any())), labels)
