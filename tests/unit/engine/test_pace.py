"""Pace of a run's saves, by a simulated clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import pytest

from capt.pretrain.engine.callbacks.checkpointer import LONGEST, SHARE, Pace


def _train(
    every: int | Literal["auto"], seconds: Callable[[float], float], cost: float, until: float, longest: float
) -> tuple[list[int], list[float], float]:
    """Train for ``until`` seconds; return the steps saved, the seconds between two saves, and the share of the cost."""
    now, step, saved, times = 0.0, 0, [], [0.0]
    pace = Pace(every, 0, longest=longest, clock=lambda: now)
    while now < until:
        now += seconds(now)
        step += 1
        if step < pace.next_look:
            assert not pace.is_due(step), "due at a step that a task with many updates would have passed over"
        elif pace.is_due(step):
            times.append(now)
            with pace.cost():
                now += cost
            saved.append(step)
            pace.saved(step)
    gaps = [after - before for before, after in pairwise(times)]
    late = saved[len(saved) // 2 :]
    share = cost * len(late) / (now - times[-len(late)]) if late else 0.0
    return saved, gaps, share


@pytest.mark.parametrize("step", [0.1, 0.7, 7.0])
@pytest.mark.parametrize("cost", [0.02, 0.5, 2.0])
def test_the_cost_stays_below_its_share(step: float, cost: float) -> None:
    saved, gaps, share = _train("auto", lambda now: step, cost, 8e3 * step, math.inf)
    assert len(saved) >= 3
    assert share <= 1.2 * SHARE  # the first distances are short
    assert max(gaps[-2:]) <= 1.1 * max(cost / SHARE + cost, 4 * 10 * step + cost)


@pytest.mark.parametrize("step", [2.0, 120.0, 1000.0])
@pytest.mark.parametrize("cost", [0.1, 30.0, 400.0])
@pytest.mark.parametrize("slower", [1.0, 1.7])
def test_at_most_fifteen_minutes_lie_between_two(step: float, cost: float, slower: float) -> None:
    """Steps that become slower while the next save is planned included."""
    seconds = lambda now: step * (slower if 1000 < now % 5000 < 3000 else 1.0)  # noqa: E731
    saved, gaps, _ = _train("auto", seconds, cost, 1e4, LONGEST)
    assert saved
    assert max(gaps) <= LONGEST + cost + 2 * step * slower
    if cost < SHARE * LONGEST and step < LONGEST:
        assert sum(gaps) / len(gaps) < LONGEST


@pytest.mark.parametrize("every", [0, 1, 7])
def test_a_fixed_distance_is_kept(every: int) -> None:
    saved, *_ = _train(every, lambda now: 1.0, 0.0, 50.0, LONGEST)
    assert saved == (list(range(every, 51, every)) if every else [])


def test_a_slow_first_save_is_no_measure() -> None:
    saved, *_ = _train("auto", lambda now: 0.1, 60.0, 1000.0, math.inf)
    assert saved[:3] == [10, 50, 210]


def test_a_save_that_is_passed_over_keeps_the_measure() -> None:
    now = 0.0
    pace = Pace("auto", 0, clock=lambda: now)
    with pace.cost():
        now += 1.0
    pace.skip(5)
    assert pace.next_look == 15
    now += 15.0
    pace.saved(15)
    assert pace.next_look == 15 + 40
