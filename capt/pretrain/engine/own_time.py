"""Working time of this rank in sections that do not wait for other ranks: fetching data, forward passes.

A rank that is slow makes all others wait in the next collective, so that steps take equally long everywhere; only what
is before the collectives tells who is slow. On a GPU a section is between two events of the stream, which are read
when the device has been waited for anyway. At ZeRO 3 forward passes wait for the weights of other ranks: there only the
data tell.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch


class _Own:
    on = False
    seconds = 0.0
    events: ClassVar[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []


def measure(on: bool) -> None:
    """Switch the measurement on or off, and forget what was measured."""
    _Own.on, _Own.seconds, _Own.events = on, 0.0, []


@contextmanager
def own_section() -> Iterator[None]:
    """Count the time of a block, of training alone (with gradients on).

    The first pass of a cached contrast has none and does not count: a micro-batch is one forward pass on every rank,
    whether its graph was kept or is made again.
    """
    if not _Own.on or not torch.is_grad_enabled():
        yield
        return
    if torch.cuda.is_available():
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        _Own.events.append((begin, end))
        return
    begun = time.perf_counter()
    yield
    _Own.seconds += time.perf_counter() - begun


def take() -> float:
    """The seconds since the last call. On a GPU the device must have been waited for."""
    seconds, _Own.seconds = _Own.seconds, 0.0
    for begin, end in _Own.events:
        seconds += float(begin.elapsed_time(end)) / 1000
    _Own.events = []
    return seconds
