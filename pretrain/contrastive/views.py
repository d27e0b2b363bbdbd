"""What the contrast sees of a micro-batch, and the contrast of a whole step from what it sees of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        negatives: unit rows that are negatives of the samples, any number; None = none but other samples.
        negative_ids: instance of each of them.
        owners: sample of each of them.
        own_alone: a sample is compared with its own negatives alone.
    """

    s: Float[Tensor, "n d"]
    s_hat: Float[Tensor, "n d"]
    ids: Int[Tensor, " n"]
    temperature: float | Float[Tensor, ""]
    only: Int[Tensor, " k"] | None = None
    negatives: Float[Tensor, "m d"] | None = None
    negative_ids: Int[Tensor, " m"] | None = None
    owners: Int[Tensor, " m"] | None = None
    own_alone: bool = False

    def tensors(self) -> tuple[Tensor, ...]:
        """What gradients flow to: ``s``, ``s_hat``, negatives and a learned temperature, as a row."""
        learned = (self.temperature.reshape(1),) if isinstance(self.temperature, Tensor) else ()
        negatives = () if self.negatives is None else (self.negatives,)
        return self.s, self.s_hat, *negatives, *learned


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
        loss = contrast(joined(seen, *self._cache.views()))
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


def joined(views: Sequence[Views], s: Tensor, s_hat: Tensor, *rest: Tensor) -> Views:
    """The views of all samples, ``rest`` being the other `Views.tensors`.

    The temperature is that of the first micro-batch, for all have the same.
    """
    starts = list(accumulate((len(each.ids) for each in views), initial=0))
    only = negatives = negative_ids = owners = None
    if any(each.only is not None for each in views):
        only = torch.cat([
            (torch.arange(len(each.ids), device=s.device) if each.only is None else each.only) + start
            for each, start in zip(views, starts, strict=False)
        ])  # fmt: skip
    if views[0].negatives is not None:
        negatives, rest = rest[0], rest[1:]
        negative_ids = torch.cat([each.negative_ids for each in views if each.negative_ids is not None])
        owners = torch.cat([
            each.owners + start for each, start in zip(views, starts, strict=False) if each.owners is not None
        ])  # fmt: skip
    learned = rest[0][0] if rest else views[0].temperature
    ids = torch.cat([each.ids for each in views])
    return Views(s, s_hat, ids, learned, only, negatives, negative_ids, owners, views[0].own_alone)
