"""Decide how often a run is saved: every N steps, or as often as keeps the measured cost of saving low."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from capt.pretrain.base import distributed
from capt.pretrain.engine.loop import next_multiple

SHARE = 0.01
"""Largest share of the training time that saving may cost with ``every: auto``."""
_FIRST = 10
"""Steps before the first save with ``every: auto``."""
_GROWTH = 4
"""Largest growth of the distance from one save to the next: a single slow save is not a measure."""


def distance(cost: float, step: float, before: int) -> int:
    """Return the steps of ``step`` seconds until the next save, so that ``cost`` seconds of saving are `SHARE`."""
    return min(max(1, math.ceil(cost / (SHARE * max(step, 1e-9)))), _GROWTH * before)


class Pace:
    """The steps after which one kind of checkpoint is due. All ranks agree: rank 0 measures.

    Args:
        every: steps between two saves; 0 = none; "auto" = by the measured cost.
        step: the finished steps at the start.
        longest: seconds that may be between two saves with "auto".
        clock: seconds, from any origin.
    """

    def __init__(
        self,
        every: int | Literal["auto"],
        step: int,
        *,
        longest: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every, self._longest, self._clock = every, longest, clock
        self._distance = _FIRST
        self._cost, self._since, self._since_step = 0.0, clock(), step
        self.skip(step)

    def skip(self, step: int) -> None:
        """Plan the next save after ``step``, without a measurement."""
        if self._every == "auto":
            self._due = step + self._distance
            self.next_look = self._due if self._longest == math.inf else step + 1
        else:
            self.next_look = self._due = next_multiple(step, self._every)

    @contextmanager
    def cost(self) -> Iterator[None]:
        """Count the time that is spent inside as time of saving."""
        begin = self._clock()
        try:
            yield
        finally:
            self._cost += self._clock() - begin

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``. Collective at ``next_look``, the next step at which it may be true."""
        if step < self.next_look:
            return False
        if step >= self._due:
            return True
        # Steps may become slower before the save is due, so the remaining time is looked at again halfway.
        spent = self._clock() - self._since
        in_time = int((self._longest - spent) / max(spent / (step - self._since_step), 1e-9))
        left = min(self._due - step, distributed.broadcast_object(in_time))
        self.next_look = step + max(1, left // 2)
        return left < 1

    def saved(self, step: int) -> None:
        """Plan the next save, after the one of ``step``. Collective with "auto"."""
        if self._every == "auto":
            of_a_step = (self._clock() - self._since - self._cost) / max(step - self._since_step, 1)
            self._distance = distributed.broadcast_object(distance(self._cost, of_a_step, self._distance))
            self._cost, self._since, self._since_step = 0.0, self._clock(), step
        self.skip(step)
