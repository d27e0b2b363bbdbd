"""Encoded texts as batches: each batch is padded to its own longest row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from finetune.batches import Batch
from finetune.encoding import EncodedTexts
from finetune.order import RowNumbers
from pretrain.base.overlap import rows_as_bytes


class TextInputs(NamedTuple):
    """``n`` rows of ``L`` tokens, padded on the right.

    ``types`` (0 for the first text of a pair, 1 for the second) is None for an encoder that does not read token types.
    ``padded`` is False where all rows have the same length.
    """

    tokens: Int[Tensor, "n L"]
    types: Int[Tensor, "n L"] | None
    padded: bool


class TextRows:
    """EncodedTexts texts or pairs of texts with their labels, as a `finetune.batches.RowSet`.

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
            second = (columns >= encoded.seconds[numbers, None]) & (columns < lengths[:, None])
            types = torch.from_numpy(second.astype(np.int64))
        labels = None if self.labels is None else torch.from_numpy(self.labels[numbers])
        return Batch(TextInputs(torch.from_numpy(tokens), types, bool((lengths != width).any())), labels)
