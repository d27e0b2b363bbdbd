"""The sources of a mixture: their order from a section of a job, what a training sees of each, and their windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.randomness import EPOCHS
from capt.pretrain.base.verification import digest_of
from capt.pretrain.config.ramp import BatchSizeSchedule
from capt.pretrain.data.config import Weighted, schedule_at
from capt.pretrain.data.mixture import MixtureSampler, Numbers, size_factors
from capt.pretrain.data.passages import PassageDataset, PassageTokens
from capt.pretrain.data.sampler import GroupedSampler
from capt.pretrain.data.shards import PackedDataset, TokenizerRecord


def mixture_of(
    sources: Sequence[Weighted], sizes: Sequence[int], temperature: float | None, batches: BatchSizeSchedule,
    steps: int, seed: int, blocks: Sequence[int] = (), at_once: int | None = None,
) -> MixtureSampler:  # fmt: skip
    """The order of a training.

    Args:
        sources: of the mixture.
        sizes: rows of each.
        temperature: exponent of the sizes that the weights are multiplied by; None = 0.
        batches: samples of each step.
        steps: of the training.
        seed: of the job.
        blocks: rows of a shard of each source, with ``at_once``.
        at_once: ``data.shards_at_once``.

    Raises:
        ConfigError: the epochs of a source are less than one row, or those of all do not suffice.
    """
    factors = size_factors(sizes, temperature)
    schedules = [
        [(share, weight * factor) for share, weight in source.schedule]
        for source, factor in zip(sources, factors, strict=True)
    ]
    limits = []
    for source, size in zip(sources, sizes, strict=True):
        # A limit of 0 is none. The little that is added keeps 0.29 * 100 rows at 29.
        limits.append(0 if source.epochs is None else math.floor(source.epochs * size + 1e-9))
        if source.epochs is not None and not limits[-1]:
            raise ConfigError(f"data.mixture: {source.epochs:g} epochs of source {source.name} are no sample; raise it")
    samples = batches.samples_before(steps)
    order = MixtureSampler(
        names=tuple(source.name for source in sources),
        sizes=tuple(sizes),
        course=joint_schedule(schedules, batches, steps),
        limits=tuple(limits),
        seed=seed,
        blocks=tuple(blocks) if at_once else (),
        at_once=at_once or 0,
    )
    order.require(samples)
    if often := [each.name for each in source_shares(order, samples) if each.epochs >= EPOCHS]:
        raise ConfigError(f"data.mixture: source {often[0]} is read over {EPOCHS:,} times; lower its weight")
    return order


@dataclass(frozen=True)
class SourceShare:
    """A source in a training run: its rows, its share at the beginning and at the end, samples and epochs."""

    name: str
    rows: int
    share: float
    last_share: float
    samples: int
    epochs: float

    def __str__(self) -> str:
        share = f"{self.share:.2%}"
        if f"{self.last_share:.2%}" != share:
            share += f" of the samples at the beginning, {self.last_share:.2%} at the end"
        return f"{self.name} {share}, {self.samples:,} in all: {self.epochs:.2f} epochs of {self.rows:,}"


def source_shares(order: MixtureSampler, samples: int) -> list[SourceShare]:
    """Describe what a training of ``samples`` sees of each source."""
    used, first, last = order.counts_before(samples), order.shares(0), order.shares(samples - 1)
    return [
        SourceShare(name, size, first[source], last[source], used[source], used[source] / size)
        for source, (name, size) in enumerate(zip(order.names, order.sizes, strict=True))
    ]


class MixtureDataset:
    """The windows or passages of several sources, numbered one source after the other, and their ``order``."""

    def __init__(
        self, parts: Mapping[str, PackedDataset] | Mapping[str, PassageDataset], order: MixtureSampler
    ) -> None:
        self.parts: dict[str, Any] = dict(parts)
        self.order = order
        self._each = list(self.parts.values())
        self._firsts = np.array(order.firsts)

    def __len__(self) -> int:
        return sum(self.order.sizes)

    def _place(self, index: int) -> tuple[Any, int]:
        source = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._each[source], index - int(self._firsts[source])

    def window(self, index: int) -> Int32[np.ndarray, " L"]:
        """The token ids of the window with this index."""
        part, place = self._place(index)
        return part.window(place)  # type: ignore[no-any-return]

    @property
    def special(self) -> TokenizerRecord:
        """The ids that frame a text."""
        return self._each[0].shards.manifest.tokenizer  # type: ignore[no-any-return]

    def passage(self, index: int) -> PassageTokens:
        """The passage with this index; instances are numbered one source after the other, too."""
        part, place = self._place(index)
        found = part.passage(place)
        return PassageTokens(found.tokens, found.instance + index - place)

    def documents(self, index: int) -> Int64[np.ndarray, " L"]:
        """The number of the document that each token of the window belongs to (`PackedDataset.documents`)."""
        part, place = self._place(index)
        return part.documents(place)  # type: ignore[no-any-return]

    def tokens_seen(self) -> float:
        """`PackedDataset.tokens_seen` in the mean over the sources, by their shares at the beginning."""
        return sum(
            share * float(part.tokens_seen())
            for share, part in zip(self.order.shares(0), self._each, strict=True)
            if share
        )

    def follow(self, samples: Numbers) -> None:
        """Let the caches of sources in a store fetch what these samples need, and what comes after it."""
        sources, numbers = self.order.assign(samples)
        for source, part in enumerate(self._each):
            order = self.order.order(source)
            if isinstance(order, GroupedSampler) and (sources == source).any():
                part.follow(order, int(numbers[sources == source].min()))

    def release(self) -> None:
        """See `PackedDataset.release`."""
        for part in self._each:
            part.release()

    @property
    def key(self) -> str:
        """A digest of the names and the texts of the sources."""
        return digest_of([[name, part.key] for name, part in self.parts.items()])


def held_out_samples(samples: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Share the ``samples`` of a validation among sources of some sizes: equal parts; what one lacks, others have."""
    parts, left = {}, samples
    # The smallest first: what they lack is shared by those that follow.
    for number, name in enumerate(sorted(sizes, key=sizes.__getitem__)):
        parts[name] = min(left // (len(sizes) - number), sizes[name])
        left -= parts[name]
    return {name: parts[name] for name in sizes if parts[name]}


def joint_schedule(
    schedules: Sequence[Sequence[tuple[float, float]]], batches: BatchSizeSchedule, steps: int
) -> tuple[tuple[float, ...], ...]:
    """The schedules of several weights over shares of the ``steps`` of a training, as points of all of them together.

    A place is a number of samples. Where the batch grows between two points there is one more: shares that follow
    straight lines over steps follow such lines over samples up to there.
    """
    points: list[tuple[float, tuple[float, ...]]] = []
    # The schedules read from the end, which give the value before a jump.
    backwards = [[(-place, value) for place, value in reversed(schedule)] for schedule in schedules]
    for share in sorted({place for schedule in schedules for place, _ in schedule}):
        before = tuple(schedule_at(schedule, -share) for schedule in backwards)
        after = tuple(schedule_at(schedule, share) for schedule in schedules)
        points += [(share, weights) for weights in ([before] if before == after else [before, after])]
    # Where the batch grows, equal steps are no longer equal numbers of samples.
    growth = [stage.step / steps for stage in batches.stages]
    between = [
        (place, _between(first, last, (place - begin) / (end - begin)))
        for (begin, first), (end, last) in pairwise(points)
        for place in growth
        if begin < place < end
    ]
    return tuple(
        (batches.samples_at(share * steps), *weights) for share, weights in sorted(points + between, key=itemgetter(0))
    )


def _between(first: tuple[float, ...], last: tuple[float, ...], part: float) -> tuple[float, ...]:
    """The weights whose shares are on the straight line between those of two points."""
    a, b = sum(first), sum(last)
    total = a + part * (b - a)
    return tuple(total * (x / a + part * (y / b - x / a)) for x, y in zip(first, last, strict=True))
