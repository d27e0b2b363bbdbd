r"""The sharded softmax: InfoNCE against keys that no single rank holds, and its exact gradient, in one function.

For an anchor :math:`q_i` with positive :math:`k_i^+` and negatives :math:`k_j`, write :math:`s_{ij} = q_i \cdot k_j /
\tau` and :math:`\ell_i = \sum_j e^{s_{ij}}` over the negatives alone. Then, with :math:`\sigma` the logistic function,

.. math::
    x_i = \log \ell_i - s_i^+, \qquad L_i = \log(1 + e^{x_i}), \qquad
    \frac{\partial L_i}{\partial q_i} = \frac{\sigma(x_i)}{\tau} (\bar k_i - k_i^+), \qquad
    \bar k_i = \frac{1}{\ell_i} \sum_j e^{s_{ij}} k_j .

So loss and gradient need two sums over the negatives, and a sum over keys is a sum over ranks: **anchors travel, keys
stay**. Every rank adds up its own keys for all anchors; one reduce-scatter brings each anchor's totals home. The
difference :math:`p_i^+ - 1`, which loses all its digits once an anchor has found its positive, is never formed.

Collectives of a step: all-gather of the anchors, reduce-scatter of the sums; besides these two only numbers per anchor
(its log-sum where live keys take gradients, its id, its largest logit where a reference is needed) and per rank (its
row count). None happens in ``backward``. ``docs/contrast.md`` has the proofs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.contrast.exchange import Exchange
from pretrain.contrast.kernels.products import Products
from pretrain.contrast.kernels.protocol import Ids, Kernel, Sums
from pretrain.contrast.queue import NO_ID, ShardedQueue
from pretrain.contrast.stats import ContrastStats


@dataclass(frozen=True)
class SoftmaxContext:
    """What one call knows besides its differentiable tensors.

    ``anchor_ids (m,)`` and ``live_ids (c,)`` name instances; a key of the anchor's own instance is never a negative.
    ``shared_ids`` says that an id means the same on every rank and in the queue (because the user gave it).
    ``products`` is the precision of all matrix products; sums are fp32 (fp64).
    """

    exchange: Exchange
    kernel: Kernel
    queue: ShardedQueue | None
    in_batch: str
    anchor_ids: Tensor
    live_ids: Tensor
    shared_ids: bool
    products: Products
    running_reference: bool
    scale: float
    stats: ContrastStats | None

    def query_ids(self, queries: Tensor) -> Tensor:
        """The instances of the gathered anchors; without shared ids only this rank's own are known, and needed."""
        if self.shared_ids or len(self.exchange.counts) == 1:
            return self.exchange.gather(self.anchor_ids)
        ids = self.anchor_ids.new_full((len(queries),), NO_ID)
        ids[self.exchange.own] = self.anchor_ids
        return ids

    def live_parts(self, query_ids: Tensor) -> Iterator[tuple[slice, Ids | None]]:
        """Which gathered anchors see this rank's live keys, and the ids that tell own keys from negatives."""
        own, end = self.exchange.own, len(query_ids)
        if self.in_batch == "global" and self.shared_ids:
            yield slice(0, end), Ids(query_ids, self.live_ids)
        elif self.in_batch != "none":
            yield own, Ids(self.anchor_ids, self.live_ids)
            if self.in_batch == "global" and own.start:
                yield slice(0, own.start), None
            if self.in_batch == "global" and own.stop < end:
                yield slice(own.stop, end), None


class ShardedSoftmax(torch.autograd.Function):
    """``forward`` finds the loss and every gradient; ``backward`` multiplies them by the gradient that comes in."""

    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, positives: Tensor, live: Tensor, temperature: Tensor | float, step: SoftmaxContext
    ) -> Tensor:
        """This rank's share of the loss, a scalar. Shapes: anchors and positives ``(m, d)``, live keys ``(c, d)``."""
        queries = step.exchange.gather((anchors / temperature).to(step.products.travels_as(anchors.dtype)))
        query_ids = step.query_ids(queries)

        wants_gradient = any(ctx.needs_input_grad)
        sums = Sums(
            normaliser=anchors.new_zeros(len(queries)),
            weighted=anchors.new_zeros(queries.shape) if wants_gradient else None,
            reference=anchors.new_full((len(queries),), -1.0) / temperature if step.running_reference else None,
        )
        if step.queue is not None:
            ids = Ids(query_ids, step.queue.ids) if step.shared_ids else None
            step.kernel.accumulate(sums, queries, step.queue.rows, ids, step.products)
        live_parts = list(step.live_parts(query_ids))
        for part, ids in live_parts:
            step.kernel.accumulate(sums[part], queries[part], live, ids, step.products)
        if sums.reference is not None:
            sums.raise_reference(step.exchange.highest(sums.reference))
        own = step.exchange.bring_home(sums)

        # One number an anchor: float64 costs nothing here and saves the digits of a difference of large logits.
        positive_logits = (anchors.double() * positives.double()).sum(1) / temperature
        margins = own.normaliser.double().log() - positive_logits
        if own.reference is not None:
            margins += own.reference
        losses = torch.logaddexp(margins, torch.zeros_like(margins))
        if step.stats is not None and own.reference is not None:
            step.stats.update(torch.sigmoid(-margins), (positive_logits - own.reference) * temperature)

        if own.weighted is not None:
            tiny = torch.finfo(anchors.dtype).tiny  # an anchor without any negative: 0 / tiny, times sigmoid(-inf)
            mean_negative = own.weighted / own.normaliser.clamp_min(tiny)[:, None]
            weight = torch.sigmoid(margins).to(anchors.dtype)[:, None] * step.scale / temperature
            d_anchors = weight * (mean_negative - positives)
            d_temperature = -(anchors * d_anchors).sum() / temperature if ctx.needs_input_grad[3] else None
            d_live = None
            if ctx.needs_input_grad[2]:
                lse = (positive_logits + losses).to(anchors.dtype)
                d_live = _live_gradient(queries, live_parts, live, lse, step)
            ctx.save_for_backward(d_anchors, -weight * anchors, d_live, d_temperature)
        return (losses.sum() * step.scale).to(anchors.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The saved gradients times the gradient of the objective with respect to this loss."""
        saved = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return *(gradient * g if g is not None and needed else None for g, needed in saved), None


def _live_gradient(
    queries: Tensor, parts: list[tuple[slice, Ids | None]], live: Tensor, lse: Tensor, step: SoftmaxContext
) -> Tensor:
    r"""What all anchors ask of this rank's live keys: :math:`\frac1\tau \sum_i p_{ij} q_i`, ``(c, d)``."""
    total = lse.new_zeros(live.shape)
    everyone_lse = step.exchange.gather(lse)
    for part, ids in parts:
        total += step.kernel.key_gradient(queries[part], live, everyone_lse[part], ids, step.products)
    return total * step.scale
