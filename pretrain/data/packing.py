"""RoBERTa's FULL-SENTENCES packing (Liu et al. 2019, section 4.2) over a shard set.

A window is ``<s>``, the next ``L - 2`` tokens of the stream, ``</s>``. Text runs on over document borders, where the
stream holds an extra ``</s>``; the next window continues where the last one stopped. RoBERTa fills windows with whole
sentences, which need not be known here: windows are cut at the exact length, so no token is padding except in the last
window, and the place of any window is a product, without an index.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, Int64

from pretrain.base.errors import ConfigError
from pretrain.data.shards import ShardSet


class PackedDataset:
    """The windows of ``shards``, each of ``sequence_length`` = L tokens, specials included.

    Raises ``ConfigError`` for windows too short to hold text.
    """

    def __init__(self, shards: ShardSet, sequence_length: int) -> None:
        if sequence_length < 3:
            raise ConfigError(f"data.sequence_length = {sequence_length} leaves no room for text; use at least 8")
        self.shards, self.sequence_length = shards, sequence_length
        self._text = sequence_length - 2
        self._special = shards.manifest.tokenizer

    def __len__(self) -> int:
        return -(-self.shards.tokens // self._text)

    def window(self, index: int) -> Int32[np.ndarray, " L"]:
        """The token ids of the window with this index."""
        text = self.shards.read(index * self._text, (index + 1) * self._text)
        out = np.full(self.sequence_length, self._special.pad, dtype=np.int32)
        out[0] = self._special.bos
        out[1 : len(text) + 1] = text
        out[len(text) + 1] = self._special.eos
        return out

    def documents(self, index: int) -> Int64[np.ndarray, " L"]:
        """The number of the document that each token of the window belongs to: 0, 1, ...; padding has -1.

        ``<s>`` counts to the first document, a separator to the document that it ends, the last ``</s>`` to the last
        document. Attention within documents is attention between equal numbers, so ``<s>`` then sees the first only.
        """
        start = index * self._text
        stop = min(start + self._text, self.shards.tokens)
        starts = self.shards.starts
        first = int(np.searchsorted(starts, start, side="right"))
        borders = starts[first : first + self._text]
        begins = np.zeros(stop - start, dtype=np.int64)
        begins[borders[borders < stop] - start] = 1
        out = np.full(self.sequence_length, -1, dtype=np.int64)
        out[0] = 0
        out[1 : len(begins) + 1] = np.cumsum(begins)
        out[len(begins) + 1] = out[len(begins)]
        return out

    @property
    def real_tokens(self) -> float:
        """The share of tokens that are not padding."""
        return (self.shards.tokens + 2 * len(self)) / (len(self) * self.sequence_length)
