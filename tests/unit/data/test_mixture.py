"""Source of each sample of a mixture: shares, epochs and places, against literal sums."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.ramp import BatchSizeSchedule
from capt.pretrain.data.config import Weighted
from capt.pretrain.data.mixture import MixtureSampler
from capt.pretrain.data.mixture_dataset import MixtureDataset, mixture_of, source_shares
from capt.pretrain.data.shards import PackedDataset

Course = list[tuple[float, float]]


def _sources(courses: Sequence[float | Course], epochs: Sequence[float | None] | None = None) -> list[Weighted]:
    limits = epochs or [None] * len(courses)
    return [
        Weighted(name=f"s{number}", weight=course, epochs=limit)
        for number, (course, limit) in enumerate(zip(courses, limits, strict=True))
    ]


def order_of(
    sources: Sequence[Weighted], sizes: Sequence[int], temperature: float | None, samples: int, seed: int, *shards: Any
) -> MixtureSampler:
    """The order of a training with one sample a step."""
    return mixture_of(sources, sizes, temperature, BatchSizeSchedule.of(1), samples, seed, *shards)


def _taken(order: MixtureSampler, samples: int) -> np.ndarray:
    """Samples of each source before each sample and at the end; the number of each within its source is checked."""
    sources, numbers = order.assign(np.arange(samples))
    taken = np.zeros((samples + 1, len(order.names)), dtype=np.int64)
    taken[np.arange(1, samples + 1), sources] = 1
    taken = taken.cumsum(axis=0)
    assert (taken[np.arange(samples), sources] == numbers).all()
    return taken


def _due(courses: Sequence[float | Course], samples: int) -> np.ndarray:
    """The sum over samples of the shares in the middle of each: points lie at whole samples, so it is exact."""
    points = sorted({share for course in courses if isinstance(course, list) for share, _ in course})
    edges = sorted({0.0, *points, 1.0})
    due = [np.zeros(len(courses))]
    for begin, end in pairwise(edges):
        nearly = (end - begin) * 1e-9
        first, last = (np.array([_value(course, at) for course in courses]) for at in (begin + nearly, end - nearly))
        first, last, steps = first / first.sum(), last / last.sum(), round((end - begin) * samples)
        for step in range(steps):
            due.append(due[-1] + first + (last - first) * (step + 0.5) / steps)
    return np.stack(due)


def _value(course: float | Course, at: float) -> float:
    if not isinstance(course, list):
        return course
    places, values = zip(*course, strict=True)
    below = [number for number, place in enumerate(places) if place <= at]
    above = [number for number, place in enumerate(places) if place > at]
    if not below or not above:
        return values[0] if not below else values[-1]
    a, b = below[-1], above[0]
    return values[a] + (values[b] - values[a]) * (at - places[a]) / (places[b] - places[a])


@pytest.mark.parametrize("seed", range(8))
def test_every_source_has_its_share_after_every_sample(seed: int) -> None:
    """Constant and annealed weights with jumps, of 2 to 9 sources: within one sample at each of 20,000 places."""
    draw, samples = random.Random(seed), 20_000
    courses: list[float | Course] = [draw.uniform(0.01, 3.0)]
    for _ in range(draw.randint(1, 8)):
        places = sorted(draw.choice([0, 0.1, 0.25, 0.5, 0.5, 0.9, 1]) for _ in range(draw.randint(1, 3)))
        course = [(float(place), draw.uniform(0, 3)) for place in places]
        courses.append(draw.choice([course, draw.uniform(0.01, 3.0)]))
    order = order_of(_sources(courses), [10] * len(courses), None, samples, seed)
    far = np.abs(_taken(order, samples) - _due(courses, samples)).max(axis=1)
    assert far.max() < 1.25
    assert (far > 1).mean() < 1e-3


def test_two_sources_are_within_half_a_sample_up_to_a_hundred_thousand() -> None:
    weights = [1.0, 3.3]
    taken = _taken(order_of(_sources(weights), [10, 10], None, 100_000, 1), 100_000)
    assert np.abs(taken - np.arange(100_001)[:, None] * np.array(weights) / 4.3).max() <= 0.5 + 1e-5


def test_a_source_is_left_when_its_epochs_are_spent() -> None:
    order = order_of(_sources([1, [(0, 2), (1, 4)], 1], [2, None, 0.5]), [300, 50, 100], None, 4000, 3)
    taken = _taken(order, 4000)
    assert taken[-1].tolist() == [600, 3350, 50]
    last = [int(np.flatnonzero(np.diff(taken[:, source]))[-1]) for source in range(3)]
    assert last[2] == pytest.approx(200, abs=10), "a quarter of the samples, a little less as the second one grows"
    shares = np.diff(taken[last[2] + 1 : last[0] : 100], axis=0)[:, 0]
    assert shares[0] == pytest.approx(100 / 3, abs=2), "the others share what it had"
    assert (np.diff(shares) <= 1).all(), "while the second one grows"
    assert shares[-1] < shares[0]
    assert [source.epochs for source in source_shares(order, 4000)] == [2, 67, 0.5]


def test_epochs_that_do_not_suffice_are_refused() -> None:
    sources = _sources([1, 1], [1, 2])
    assert order_of(sources, [30, 40], None, 110, 0).counts_before(110) == [30, 80]
    with pytest.raises(ConfigError, match="spent their epochs after 110 samples, and the job trains on 111"):
        order_of(sources, [30, 40], None, 111, 0)
    with pytest.raises(ConfigError, match=r"0\.01 epochs of source s0 are no sample"):
        order_of(_sources([1, 1], [0.01, 2]), [30, 40], None, 10, 0)
    late = _sources([1, [(0, 0), (0.5, 0), (1, 1)]], [1, None])
    with pytest.raises(ConfigError, match="after 30 samples"):  # the other one has no weight yet
        order_of(late, [30, 40], None, 100, 0)


@pytest.mark.parametrize("falls", [False, True])
def test_weights_that_meet_in_zero_have_their_shares_up_to_there(falls: bool) -> None:
    """A source falls to 0 while the other spends its epochs, or rises from 0 as the other's are spent."""
    first: Course = [(0, 1), (1, 0)] if falls else [(0, 0), (0.5, 0), (1, 1)]
    order = order_of(_sources([first, 1], [None, 0.1 if falls else 1]), [1000, 1000], None, 2000, 0)
    assert order.counts_before(2000) == ([1900, 100] if falls else [1000, 1000])
    alone = _sources([[(0, 1), (1, 0)]])
    assert order_of(alone, [1000], None, 2000, 0).counts_before(2000) == [2000]


def test_sources_go_on_past_their_epochs_with_the_shares_of_the_end() -> None:
    """A rollback leaves samples out, and so reads more of them than were planned."""
    order = order_of(_sources([[(0, 1), (1, 0)], 1], [None, 0.05]), [1000, 1000], None, 1000, 0)
    assert _taken(order, 1200)[-1].tolist() == [1150, 50]
    assert order.past_epochs(1200) == []
    order = order_of(_sources([[(0, 1), (1, 3)], [(0, 3), (1, 1)]], [0.5, 0.5]), [100, 100], None, 100, 0)
    assert _taken(order, 200)[100].tolist() == [50, 50]
    assert order.past_epochs(100) == []
    assert order.past_epochs(200) == ["s0", "s1"]
    assert order.counts_before(200) == [125, 75]


def test_points_are_shares_of_steps_while_batches_grow() -> None:
    """Ten steps of 10 samples and ten of 40: due is the sum over steps of the share in the middle of each."""
    batches = BatchSizeSchedule.of(40, [(100, 10)])
    course: Course = [(0, 3), (0.25, 3), (0.75, 4), (0.75, 0), (0.9, 0)]
    sources = _sources([course, [(0, 1), (0.25, 1), (0.75, 12)]])
    order = mixture_of(sources, [30, 30], None, batches, 20, 0)
    places = np.array([batches.samples_before(step) for step in range(21)])
    taken = _taken(order, 500)[places]
    share = np.interp((np.arange(20) + 0.5) / 20, [0, 0.25, 0.75], [0.75, 0.75, 0.25])
    share[15:] = 0
    due = np.concatenate([[0], np.cumsum(share * np.diff(places))])
    assert np.abs(taken[:, 0] - due).max() < 1.25
    assert order.counts_before(500)[0] == taken[15, 0] == round(due[15])


@pytest.mark.parametrize("at_once", [None, 2])
def test_each_row_comes_once_an_epoch_of_its_source(at_once: int | None) -> None:
    """Also where the rows of two shards are shuffled with each other."""
    order = order_of(_sources([1, 2]), [31, 17], None, 500, 5, [8, 5], at_once)
    epochs, rows = order.locate(np.arange(500))
    for first, size in ((0, 31), (31, 17)):
        own = (rows >= first) & (rows < first + size)
        for epoch in range(int(epochs[own].max())):
            assert sorted(rows[own & (epochs == epoch)].tolist()) == list(range(first, first + size))
    if at_once:
        shards = {int(row) // 8 for row in rows[(rows < 31) & (epochs == 0)][:16]}
        assert len(shards) == 2
    other = order_of(_sources([1, 2, 1]), [31, 17, 9], None, 500, 5, [8, 5, 4], at_once)
    pairs = [each.locate(np.arange(500))[1] for each in (order, other)]
    alone = [list(filter(lambda row: row < 31, rows.tolist()))[:31] for rows in pairs]
    assert alone[0] == alone[1], "another source changes nothing in the order of this one"


def test_caches_follow_their_own_sources() -> None:
    """Shards of a store are fetched by the numbers that samples have within their source."""
    parts: dict[str, Any] = {name: Mock(spec=PackedDataset) for name in ("s0", "s1")}
    order = order_of(_sources([1, [(0, 0), (0.5, 0), (0.5, 1)]]), [31, 17], None, 100, 5, [8, 5], 2)
    windows = MixtureDataset(parts, order)
    windows.follow(np.arange(12, 18))
    assert parts["s0"].follow.call_args.args == (order.order(0), 12)
    assert not parts["s1"].follow.called, "it has no sample yet"
    windows.follow(np.arange(70, 76))
    assert parts["s1"].follow.call_args.args == (order.order(1), 10)


@pytest.mark.parametrize("begin", [0, 5000, 10**12 - 3000])
def test_any_place_is_found_alone(begin: int) -> None:
    order = order_of(_sources([0.5, 0.3, 0.2]), [10**7, 10**8, 10**9], None, 10**13, 2)
    samples = begin + np.arange(6000)
    sources, numbers = order.assign(samples)
    draw = random.Random(begin)
    fresh = MixtureSampler(order.names, order.sizes, order.course, order.limits, order.seed)
    for place in draw.sample(range(6000), 40):
        assert [int(each[0]) for each in fresh.assign(samples[place : place + 1])] == [sources[place], numbers[place]]
        assert fresh.counts_before(int(samples[place]))[sources[place]] == numbers[place]
    assert np.abs(np.array(order.counts_before(begin)) - begin * np.array([0.5, 0.3, 0.2])).max() < 1 + begin * 1e-15


def test_order_is_the_same_on_every_machine_and_release() -> None:
    def sources(seed: int) -> str:
        return "".join(map(str, order_of(_sources([2, 1, 1]), [9, 9, 9], None, 100, seed).assign(np.arange(24))[0]))

    assert sources(1) == "021002100120012001200120"
    assert sources(2) != sources(1)


@pytest.mark.parametrize(
    ("exponent", "expected"), [(None, [0.5, 0.5]), (0.5, [10 / 11, 1 / 11]), (1.0, [100 / 101, 1 / 101])]
)
def test_temperature_raises_sizes_to_a_power(exponent: float | None, expected: list[float]) -> None:
    order = order_of(_sources([1, 1]), [10_000, 100], exponent, 100, 0)
    assert order.shares(0) == pytest.approx(expected)
