"""The contrast of a whole step: both views of its micro-batches, and which of these keep their first pass's graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from capt.pretrain.contrast.cached import RepresentationCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Views:
    """Both views of some samples.

    Attributes:
        s: rows of the originals, unit vectors unless the task has a ``similarity`` of its own.
        s_hat: rows of their corruptions.
        ids: instance of each sample.
        temperature: of this step; a tensor where it is learned.
        only: the samples that are anchors and negatives; None = all of them.
    """

    s: Float[Tensor, "n d"]
    s_hat: Float[Tensor, "n d"]
    ids: Int[Tensor, " n"]
    temperature: float | Float[Tensor, ""]
    only: Int[Tensor, " k"] | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that get gradients: ``s``, ``s_hat``, and a learned temperature as a row."""
        learned = (self.temperature.reshape(1),) if isinstance(self.temperature, Tensor) else ()
        return self.s, self.s_hat, *learned

    @classmethod
    def joined(cls, views: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """Return one object of this class for all samples; ``tensors`` are those of all ``views``, concatenated.

        The temperature is that of the first micro-batch, for all have the same.
        """
        s, s_hat, *learned = tensors
        only = None
        if any(each.only is not None for each in views):
            # Places within a micro-batch become places within the step.
            only = torch.cat([
                (torch.arange(len(each.ids), device=s.device) if each.only is None else each.only) + start
                for each, start in zip(views, starts_of(views), strict=True)
            ])  # fmt: skip
        temperature = learned[0][0] if learned else views[0].temperature
        return cls(s, s_hat, torch.cat([each.ids for each in views]), temperature, only)


def starts_of(views: Sequence[Views]) -> list[int]:
    """The place of the first sample of each micro-batch when they are one after another."""
    return list(accumulate((len(each.ids) for each in views[:-1]), initial=0))


Losses = tuple[Views | None, Tensor, dict[str, Tensor]]
"""Views of a micro-batch to contrast, the sum of its other losses, and its metrics."""


class CachedContrast:
    """The loss of all micro-batches of a step as one batch, and each one's part of its gradient.

    Args:
        represent: one for each micro-batch, which encodes it. Called here, without a graph.
        losses: one for each micro-batch, which encodes it again, with a graph and its other losses; or for the first
            time, where the graph is kept.
        contrast: the loss of the views of all samples of the step on this rank. Called once.
        kept: which graphs are kept.
    """

    def __init__(
        self,
        represent: Sequence[Callable[[], Views]],
        losses: Sequence[Callable[[], Losses]],
        contrast: Callable[[Views], Tensor],
        kept: KeptGraphs,
    ) -> None:
        self._cache, self._losses = RepresentationCache(), losses
        self._kept: dict[int, Losses] = {}
        seen: list[Views] = []

        def encode(one: Callable[[], Views]) -> tuple[Tensor, ...]:
            seen.append(one())
            return seen[-1].tensors()

        # The first pass, without graphs but for the kept ones: what the contrast of the whole step is computed of.
        for number, one in enumerate(represent):
            if kept.has_room_for(number):
                with kept.measured():
                    self._kept[number] = losses[number]()
                views = self._kept[number][0]
                assert views is not None
                self._cache.keep(views.tensors())
                seen.append(views)
            else:
                self._cache.record(lambda one=one: encode(one))  # type: ignore[misc]
        loss = contrast(type(seen[0]).joined(seen, self._cache.views()))
        if loss.requires_grad:  # not without any anchor
            loss.backward()
        self.loss = loss.detach()
        """Loss of the step."""
        self._micro_batches = len(seen)

    def losses(self, number: int) -> Losses:
        """The losses of micro-batch ``number`` with their graph, drawn with the random numbers of the first pass."""
        if number in self._kept:
            return self._kept.pop(number)
        self._cache.rewind(number)
        return self._losses[number]()

    def surrogate(self, number: int, views: Views) -> Tensor:
        """Return what micro-batch ``number`` adds to its loss in place of its contrast, where an engine takes means."""
        return self._micro_batches * self._cache.surrogate(number, views.tensors())


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
        # None is to be measured. A CPU has no peak of memory to read, so that `auto` keeps nothing there.
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
        """Return whether micro-batch ``number`` keeps its graph; those before it that did are held now."""
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
