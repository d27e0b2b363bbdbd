"""Which micro-batches of a cached contrast keep the graph of their first pass, so that they are encoded once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

logger = logging.getLogger(__name__)

MARGIN = 0.05
"""Share of a GPU's memory that is left free, as what the allocator holds is more than what is in use."""


class KeptGraphs:
    """The first micro-batches of every step: the number that ``contrast.keep`` says, or all that a GPU has memory for.

    ``auto`` keeps one graph in each step up to the one after the first update, and measures it. From the peak so far,
    which has held weights, gradients, the optimizer's state, the contrast and the graph, follows the room for others.
    At ZeRO 0 that state is made by the first update, after the first graph, and fp16 may leave out the first updates.
    The first step of another size (``batch.ramp``) keeps one again, and is measured in place of those before.
    Ranks may keep different numbers: a graph that is kept gives the gradient that it would give if it was made again.
    """

    def __init__(self, keep: int | Literal["auto"], device: torch.device) -> None:
        self._fixed = keep if keep != "auto" else None if device.type == "cuda" else 0
        self._has_state = False
        self._room: int | None = None
        self._held = self._largest = self._sequences = 0

    def begin_step(self, sequences: int) -> None:
        """Begin a step of ``sequences`` over all ranks; called before its first micro-batch."""
        self._held = 0
        if sequences != self._sequences and self._room is not None:
            self._room, self._largest = None, 0
            torch.cuda.reset_peak_memory_stats()  # the peak of the steps before holds their kept graphs
        self._sequences = sequences

    def end_step(self, was_skipped: Callable[[], bool]) -> None:
        """End a step, whose update may have been left out (``was_skipped``), before the peak of memory is reset."""
        if self._fixed is not None or self._room is not None:
            return
        if not self._has_state:
            self._has_state = not was_skipped()
        else:
            free, _ = torch.cuda.mem_get_info()
            whole = free + torch.cuda.memory_reserved()
            spare = int((1 - MARGIN) * whole) - torch.cuda.max_memory_allocated()
            self._room = max(0, spare) + self._largest  # that of this step is part of the peak
            logger.info(
                "contrast.keep=auto: there is room for %d graphs of micro-batches (%.1f GiB each)",
                self._room // max(1, self._largest), self._largest / 2**30,
            )  # fmt: skip

    def has_room_for(self, number: int) -> bool:
        """Whether micro-batch ``number`` keeps its graph; those before it that did are held now."""
        if self._fixed is not None:
            return number < self._fixed
        if self._room is None:
            return number == 0
        return self._held + self._largest <= self._room

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add the graph that is made within to those that are held."""
        if self._fixed is not None:
            yield
            return
        before = torch.cuda.memory_allocated()
        yield
        graph = torch.cuda.memory_allocated() - before
        self._held += graph
        self._largest = max(self._largest, graph)
