"""The passages of a shard set: what two spans are drawn from, and what is one instance for the contrast."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from capt.pretrain.base.verification import digest_of
from capt.pretrain.data.shards import ShardSet, TokenizerRecord

EVERY = 1 << 20
"""Documents whose lengths are looked at together."""


class PassageTokens(NamedTuple):
    """Tokens of a passage without specials, and the number of its instance."""

    tokens: Int32[np.ndarray, " n"]
    instance: int


class PassageDataset:
    """The passages of ``shards``: whole documents, or runs of nearly equal length into which they are cut.

    Args:
        shards: the text.
        longest: tokens of a run at most; None: a passage is a document.
        shortest: a passage of fewer tokens is short.
        keep_short: short passages are passages too; else they are left out.
        apart: tokens of a document: runs that begin in the same stretch of this length are one instance, and no
            negatives of each other; None: every run is an instance.
    """

    def __init__(
        self, shards: ShardSet, *, longest: int | None, shortest: int, keep_short: bool, apart: int | None = None
    ) -> None:
        self.shards, self._apart = shards, apart
        self._recipe = [longest, shortest, keep_short, apart]
        counts = np.empty(shards.documents, dtype=np.int64)
        self.short = 0
        """Passages that are too short for two spans."""
        for first in range(0, shards.documents, EVERY):
            # Less the separator at the end of each document.
            tokens = np.diff(shards.starts[first : first + EVERY + 1]) - 1
            runs = np.ones_like(tokens) if longest is None else np.maximum(1, -(-tokens // longest))
            too_short = tokens // runs < shortest
            self.short += int(runs[too_short].sum())
            counts[first : first + EVERY] = runs if keep_short else np.where(too_short, 0, runs)
        self._ends: Int64[np.ndarray, " documents"] = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def special(self) -> TokenizerRecord:
        """The ids that frame a text."""
        return self.shards.manifest.tokenizer

    @property
    def block(self) -> int:
        """All passages: they are not numbered by shard."""
        return len(self)

    @cached_property
    def key(self) -> str:
        """A digest of the text and of what a passage is."""
        return f"{self.shards.manifest.key}/{digest_of(self._recipe)[:16]}"

    def release(self) -> None:
        """Let go of what was read of a store, which may then give way to what others need."""
        if self.shards.cache is not None:
            self.shards.cache.release()

    def passage(self, index: int) -> PassageTokens:
        """The passage with this index."""
        document = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[document - 1]) if document else 0
        run, runs = index - first, int(self._ends[document]) - first
        begin, end = self.shards.starts[document : document + 2].tolist()
        tokens = end - 1 - begin
        at, until = tokens * run // runs, tokens * (run + 1) // runs
        instance = index
        if self._apart is not None:
            stretch = at // self._apart * self._apart
            instance = first + -(-stretch * runs // tokens)  # the first run that begins in the stretch
        return PassageTokens(self.shards.read(begin + at, begin + until), instance)
