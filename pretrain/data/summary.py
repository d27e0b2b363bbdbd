"""The numbers of a shard set that ``capt data inspect`` shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from pretrain.data.packing import PackedDataset
from pretrain.data.shards import ShardSet

_DOCUMENTS_PER_BLOCK = 1 << 20


@dataclass(frozen=True)
class ShardSummary:
    """Totals, document lengths in tokens, and how the text packs into windows of ``sequence_length``.

    ``histogram`` maps the lower bound ``2**k`` to the number of documents of ``2**k .. 2**(k+1) - 1`` tokens, their
    ``</s>`` included; ``real_tokens`` is the share of window tokens that are not padding; ``samples`` are decoded
    windows, evenly spaced.
    """

    documents: int
    tokens: int
    shortest: int
    longest: int
    mean: float
    histogram: dict[int, int]
    windows: int
    real_tokens: float
    samples: list[str]


def summarize(
    shards: ShardSet, sequence_length: int, decode: Callable[[Int32[np.ndarray, " L"]], str], samples: int = 3
) -> ShardSummary:
    """Describe ``shards``; ``decode`` turns the token ids of a window into text."""
    counts = np.zeros(64, dtype=np.int64)
    shortest, longest = shards.tokens, 0
    for first in range(0, shards.documents, _DOCUMENTS_PER_BLOCK):
        lengths = np.diff(shards.starts[first : first + _DOCUMENTS_PER_BLOCK + 1])
        counts += np.bincount(np.frexp(lengths.astype(np.float64))[1] - 1, minlength=64)
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    windows = PackedDataset(shards, sequence_length)
    shown = np.unique(np.linspace(0, len(windows) - 1, samples).astype(np.int64))
    return ShardSummary(
        documents=shards.documents,
        tokens=shards.tokens,
        shortest=shortest,
        longest=longest,
        mean=shards.tokens / shards.documents,
        histogram={1 << k: int(count) for k, count in enumerate(counts) if count},
        windows=len(windows),
        real_tokens=windows.real_tokens,
        samples=[decode(windows.window(int(index))) for index in shown],
    )
