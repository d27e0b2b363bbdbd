"""What the contrast sees of a micro-batch, and the contrast of a whole step from what it sees of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from capt.pretrain.contrast.cached import RepresentationCache
from capt.pretrain.contrastive.kept_graphs import KeptGraphs


@dataclass(frozen=True)
class Views:
    """Both views of some samples.

    Attributes:
        s: unit rows of the originals.
        s_hat: unit rows of their corruptions.
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
        """What gradients flow to: ``s``, ``s_hat`` and a learned temperature, as a row."""
        learned = (self.temperature.reshape(1),) if isinstance(self.temperature, Tensor) else ()
        return self.s, self.s_hat, *learned

    @classmethod
    def joined(cls, views: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """The views of all samples, of the same class, of which ``tensors`` are the `tensors` one after another.

        The temperature is that of the first micro-batch, for all have the same.
        """
        s, s_hat, *learned = tensors
        only = None
        if any(each.only is not None for each in views):
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
"""What is contrasted of a micro-batch, the sum of its other losses, and its metrics."""


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
        """What to add to the loss of micro-batch ``number`` in place of its contrast, where an engine takes means."""
        return self._micro_batches * self._cache.surrogate(number, views.tensors())
