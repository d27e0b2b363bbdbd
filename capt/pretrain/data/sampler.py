"""The order of samples: fixed, whatever the number of ranks, workers or restarts.

Samples are numbered 0, 1, 2, ... over the whole job. Sample ``g`` is in epoch ``g // windows``, and each epoch goes
through its windows in a pseudo-random order of its own. The order is a Feistel permutation computed entry by entry, so
it needs no table: a trillion windows cost no memory, and resuming is nothing but remembering the next ``g``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

from capt.pretrain.base.randomness import GOLDEN, UInt64Array, mix64, stream_key

_ROUNDS = 6


@dataclass(frozen=True)
class Sampler:
    """Maps sample numbers to ``(epoch, window)``; every epoch holds every window exactly once.

    ``windows``: length of the dataset; ``shuffle=False`` reads it in order (validation).
    """

    windows: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise AssertionError("a sampler needs at least one window")

    def locate(self, samples: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The epochs and window indices of the samples numbered ``samples``."""
        epochs, places = np.divmod(samples, self.windows)
        if not self.shuffle:
            return epochs, places
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permute(places[here], self.windows, stream_key(f"order/{epoch}", self.seed))
        return epochs, windows


def permute(places: Int64[np.ndarray, " n"], size: int, key: int) -> Int64[np.ndarray, " n"]:
    """The images of ``places`` under a pseudo-random permutation of ``0 .. size-1`` chosen by ``key``.

    A Feistel network (Luby and Rackoff 1988) permutes the next larger power of two; what falls outside is put through
    it again until it falls inside (cycle walking, Black and Rogaway 2002), less than twice on average.
    """
    # Two bits at least: each half of the network needs one.
    bits = max(2, (size - 1).bit_length())
    values = places.astype(np.uint64)
    walking = np.ones(len(values), dtype=bool)
    while walking.any():
        values[walking] = _feistel(values[walking], bits, key)
        walking = values >= size
    return values.astype(np.int64)


def _feistel(values: UInt64Array, bits: int, key: int) -> UInt64Array:
    half = np.uint64(bits // 2)
    left_mask, right_mask = np.uint64((1 << bits - bits // 2) - 1), np.uint64((1 << bits // 2) - 1)
    # With an odd number of bits the left half has one more; a round changes one half by the other, so it can be undone.
    left, right = values >> half, values & right_mask
    for even, odd in _round_keys(key):
        left = left ^ (mix64(right + even) & left_mask)
        right = right ^ (mix64(left + odd) & right_mask)
    joined: UInt64Array = left << half | right
    return joined


@lru_cache(maxsize=64)
def _round_keys(key: int) -> UInt64Array:
    return mix64(np.uint64(key) + GOLDEN * np.arange(1, _ROUNDS + 1, dtype=np.uint64)).reshape(-1, 2)


@dataclass(frozen=True)
class GroupedSampler:
    """Maps sample numbers to ``(epoch, window)`` so that few blocks of the data are in use at a time.

    The windows are in blocks, one a shard: ``block`` windows each, fewer in the last. Every epoch takes the blocks in a
    pseudo-random order of its own, ``at_once`` of them make a group, and the windows of a group are shuffled. Every
    epoch holds every window exactly once, and which sample is which depends on the seed alone.
    """

    windows: int
    block: int
    at_once: int
    seed: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.windows // self.block)

    def locate(self, samples: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The epochs and window indices of the samples numbered ``samples``."""
        epochs, places = np.divmod(samples, self.windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            order = _grouped_order(self, epoch)
            # All places of a group are permuted with one key.
            groups = np.searchsorted(order.group_ends, places, side="right")
            for group in np.unique(groups[epochs == epoch]).tolist():
                here = (epochs == epoch) & (groups == group)
                windows[here] = order.windows(group, places[here])
        return epochs, windows

    def groups_from(self, sample: int) -> Iterator[tuple[tuple[int, int], Int64[np.ndarray, " blocks"]]]:
        """The groups from the one of a sample on, without end: each with its epoch and number, and its blocks."""
        epoch, place = divmod(sample, self.windows)
        group = int(np.searchsorted(_grouped_order(self, epoch).group_ends, place, side="right"))
        while True:
            order = _grouped_order(self, epoch)
            for number in range(group, len(order.group_ends)):
                yield (epoch, number), order.blocks[number * self.at_once : (number + 1) * self.at_once]
            epoch, group = epoch + 1, 0


class _GroupedOrder:
    """An epoch of a `GroupedSampler`."""

    def __init__(self, sampler: GroupedSampler, epoch: int) -> None:
        self._sampler, self._epoch = sampler, epoch
        count = sampler.blocks
        key = stream_key(f"blocks/{epoch}", sampler.seed)
        self.blocks = permute(np.arange(count, dtype=np.int64), count, key)
        # The last block of the data may be shorter, wherever it is in the order.
        sizes = np.where(self.blocks == count - 1, sampler.windows - (count - 1) * sampler.block, sampler.block)
        self._ends = np.cumsum(sizes)
        last_of_group = np.minimum(np.arange(sampler.at_once, count + sampler.at_once, sampler.at_once), count) - 1
        self.group_ends = self._ends[last_of_group]

    def windows(self, group: int, places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        begin = int(self.group_ends[group - 1]) if group else 0
        key = stream_key(f"order/{self._epoch}/{group}", self._sampler.seed)
        shuffled = begin + permute(places - begin, int(self.group_ends[group]) - begin, key)
        # From a place in the group to its block, and to the window within that block.
        turns = np.searchsorted(self._ends, shuffled, side="right")
        before = np.where(turns > 0, self._ends[turns - 1], 0)
        return self.blocks[turns] * self._sampler.block + shuffled - before  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _grouped_order(sampler: GroupedSampler, epoch: int) -> _GroupedOrder:
    return _GroupedOrder(sampler, epoch)


def micro_batches(
    start: int, global_batch: int, parts: int, world: int, rank: int
) -> list[Int64[np.ndarray, " micro"]]:
    """The sample numbers that ``rank`` handles in the step whose first sample is ``start``, one array per micro-batch.

    Rank ``r`` takes the samples with ``g % world == r``, in ``parts`` micro-batches whose sizes differ by one at most.
    So the samples of a step depend on ``start`` and ``global_batch`` alone, and the next step starts at
    ``start + global_batch``, whatever the world size was before.
    """
    # The first sample from `start` on that is this rank's.
    first = start + (rank - start) % world
    return np.array_split(np.arange(first, start + global_batch, world, dtype=np.int64), parts)


def micro_batch_weights(global_batch: int, parts: int, world: int) -> list[float]:
    """The weight of each micro-batch of all ranks in the mean over the samples of a step, times ``parts``.

    Every weight is 1 where the micro-batches are equal.
    """
    least, more = divmod(global_batch, world)  # `more` ranks have one sample more than the others
    sizes = [
        sum(
            ranks * (share // parts + (part < share % parts))
            for ranks, share in ((world - more, least), (more, least + 1))
        )
        for part in range(parts)
    ]
    return [size * parts / global_batch for size in sizes]


def validation_samples(
    samples: int, micro_batch: int, world: int, rank: int
) -> Iterator[tuple[Int64[np.ndarray, " n"], int]]:
    """The sample numbers of each of this rank's validation batches, and how many of them are valid.

    Every rank gets the same number of batches (engines with partitioned parameters need that), whatever ``samples`` is:
    a rank that runs out of samples repeats sample 0, and those samples, the last of a batch, are not valid.
    """
    samples_here = np.arange(rank, samples, world, dtype=np.int64)
    per_rank = -(-samples // world)
    for first in range(0, per_rank, micro_batch):
        size = min(micro_batch, per_rank - first)
        # A rank may have no sample left for the last batch.
        numbers = samples_here[first : first + size]
        yield np.concatenate([numbers, np.zeros(size - len(numbers), dtype=np.int64)]), len(numbers)


@dataclass(frozen=True)
class BlockMixtureSampler:
    """Maps sample numbers to ``(epoch, row)`` where each block of samples comes from one of several sources.

    Block ``b``, the samples ``b * block`` to ``(b + 1) * block - 1``, is the ``k``-th block of its source ``s``: its
    samples are the numbers from ``k * block`` on in the order that `Sampler` gives that source. So every source has
    epochs of its own. The source of a block is the one that is furthest behind its share of the blocks so far (largest
    remainder), which depends on the weights, the seed and ``b`` alone. Rows of the sources are numbered one source
    after the other.

    Mixed blocks have samples of all sources: of each the number that it is behind its share of all samples so far, to
    one sample, in a pseudo-random order of the block's own. They are the next ones in the order of their source.

    Weights are constant and sources endless; `capt.pretrain.data.mixture.MixtureSampler` has weights that change and
    numbers of epochs, sample by sample, without blocks.

    ``sizes``: rows of each source. ``weights``: the share of each, above 0; their sum does not matter. ``mixed``:
    whether a block has samples of several sources.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    block: int
    seed: int
    mixed: bool = False

    def locate(self, samples: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The epochs (each of its source) and rows of the samples numbered ``samples``."""
        sources, numbers = self._turns(*np.divmod(samples, self.block))
        epochs, rows = np.empty_like(samples), np.empty_like(samples)
        first = 0
        for source, size in enumerate(self.sizes):
            here = sources == source
            sampler = Sampler(size, stream_key(f"source/{source}", self.seed))
            epochs[here], rows[here] = sampler.locate(numbers[here])
            rows[here] += first
            first += size
        return epochs, rows

    def _turns(
        self, blocks: Int64[np.ndarray, " n"], within: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The source of each sample, and which sample of that source it is."""
        if not self.mixed:
            sources, turns = _schedule(self.weights, self.seed).locate(blocks)
            return sources, turns * self.block + within
        sources, numbers = np.empty_like(blocks), np.empty_like(blocks)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            before, shares = _shares(self.weights, self.seed, self.block).locate(block)
            # Shuffle within the block, so that the sources of a mixed step do not come in rows.
            places = permute(within[here], self.block, stream_key(f"mixed/{block}", self.seed))
            ends = np.cumsum(shares)
            sources[here] = np.searchsorted(ends, places, side="right")
            # Place among the samples of its source: those of earlier blocks, then those before it in this one.
            numbers[here] = (before + shares - ends)[sources[here]] + places
        return sources, numbers

    def shares(self, block: int) -> list[int]:
        """Samples of each source in a block."""
        before, after = self.used(block), self.used(block + 1)
        return [b - a for a, b in zip(before, after, strict=True)]

    def used(self, blocks: int) -> list[int]:
        """Samples of each source in the first ``blocks`` blocks."""
        if self.mixed:
            return _shares(self.weights, self.seed, self.block).locate(blocks)[0].tolist()  # type: ignore[no-any-return]
        return [turns * self.block for turns in _schedule(self.weights, self.seed).turns_before(blocks)]


class _Schedule:
    """The source of each block, and how many blocks of that source came before; computed once, as far as asked for."""

    def __init__(self, weights: tuple[float, ...], seed: int) -> None:
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        # the seed decides who begins: phases below 1 move every source's turns without changing its share
        self._phases = [stream_key(f"turn/{source}", seed) / 2**64 for source in range(len(weights))]
        self._counts = [0] * len(weights)
        self._sources: list[int] = []
        self._turns: list[int] = []

    def _extend(self, blocks: int) -> None:
        for number in range(len(self._sources) + 1, blocks + 1):
            behind = [
                share * number + phase - count
                for share, phase, count in zip(self._shares, self._phases, self._counts, strict=True)
            ]
            source = behind.index(max(behind))
            self._sources.append(source)
            self._turns.append(self._counts[source])
            self._counts[source] += 1

    def locate(self, blocks: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        self._extend(int(blocks.max(initial=-1)) + 1)
        different, places = np.unique(blocks, return_inverse=True)
        chosen = different.tolist()
        sources = np.array([self._sources[block] for block in chosen], dtype=np.int64)
        turns = np.array([self._turns[block] for block in chosen], dtype=np.int64)
        return sources[places], turns[places]

    def turns_before(self, blocks: int) -> list[int]:
        self._extend(blocks)
        return np.bincount(self._sources[:blocks], minlength=len(self._shares)).tolist()  # type: ignore[no-any-return]


@lru_cache(maxsize=16)
def _schedule(weights: tuple[float, ...], seed: int) -> _Schedule:
    return _Schedule(weights, seed)


class _Shares:
    """The samples of each source in each mixed block, and how many came before; computed once, as far as asked for."""

    def __init__(self, weights: tuple[float, ...], seed: int, block: int) -> None:
        self._shares = np.array(weights) / sum(weights)
        phases = np.array([stream_key(f"turn/{source}", seed) / 2**64 for source in range(len(weights))])
        # Phases sum to 0: a block then has its number of samples in all.
        self._phases = phases - phases.mean()
        self._block = block
        self._counts = [np.zeros(len(weights), dtype=np.int64)]

    def locate(self, block: int) -> tuple[Int64[np.ndarray, " s"], Int64[np.ndarray, " s"]]:
        """Samples of each source before the block, and in it."""
        while len(self._counts) < block + 2:
            # Samples due to each source by the end of the block, less those that it has had.
            behind = self._shares * (len(self._counts) * self._block) + self._phases - self._counts[-1]
            share = np.floor(behind.clip(0)).astype(np.int64)
            while (missing := self._block - int(share.sum())) != 0:
                # Rounding leaves some samples over or too many: by largest remainder, one by one.
                left = behind - share
                share[left.argmax() if missing > 0 else np.where(share > 0, left, np.inf).argmin()] += np.sign(missing)
            self._counts.append(self._counts[-1] + share)
        return self._counts[block], self._counts[block + 1] - self._counts[block]


@lru_cache(maxsize=16)
def _shares(weights: tuple[float, ...], seed: int, block: int) -> _Shares:
    return _Shares(weights, seed, block)
