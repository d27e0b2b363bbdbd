"""The passages of a shard set: what two spans are drawn from, and what is one instance for the contrast."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from capt.pretrain.base.verification import digest_of
from capt.pretrain.data.sampler import GroupedSampler
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
        by_shard: number the passages in ``block``s, each of the mean number of a shard.
    """

    def __init__(
        self, shards: ShardSet, *, longest: int | None, shortest: int, keep_short: bool, apart: int | None = None,
        by_shard: bool = False,
    ) -> None:  # fmt: skip
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
        self.block = max(1, -(-len(self) // len(shards.manifest.shards)) if by_shard else len(self))
        """Passages of a block; all are one unless they are numbered by shard."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def special(self) -> TokenizerRecord:
        """The ids that frame a text."""
        return self.shards.manifest.tokenizer

    def shards_of(self, block: int) -> range:
        """The shards in which the passages of a block lie: those of documents that begin or end elsewhere as well."""
        first, last = block * self.block, min((block + 1) * self.block, len(self)) - 1
        size = self.shards.manifest.shard_tokens
        return range(self._place(first)[0] // size, (self._place(last)[1] - 1) // size + 1)

    def shards_of_group(self, at_once: int) -> int:
        """Shards that a group of ``at_once`` blocks needs at most."""
        widest = max(len(self.shards_of(block)) for block in range(-(-len(self) // self.block)))
        return min(at_once * widest, len(self.shards.manifest.shards))

    def follow(self, order: GroupedSampler, sample: int) -> None:
        """Let the cache of a set in a store fetch what a sample needs, and what comes after it."""
        if self.shards.cache is not None:
            self.shards.cache.follow(order, sample, self.shards_of)

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
        begin, end, instance = self._place(index)
        return PassageTokens(self.shards.read(begin, end), instance)

    def _place(self, index: int) -> tuple[int, int, int]:
        """Return the tokens of the stream between which a passage lies, and the number of its instance."""
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
        return begin + at, begin + until, instance
