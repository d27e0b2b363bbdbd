r"""The sharded softmax: InfoNCE against keys that no single rank holds, and its exact gradient, in one function.

For an anchor :math:`q_i` with positive :math:`k_i^+` and negatives :math:`k_j`, write :math:`s_{ij} = q_i \cdot k_j /
\tau` and :math:`\ell_i = \sum_j e^{s_{ij}}` over the negatives alone. Then, with :math:`\sigma` the logistic function,

.. math::
    x_i = \log \ell_i - s_i^+, \qquad L_i = \log(1 + e^{x_i}), \qquad
    \frac{\partial L_i}{\partial q_i} = \frac{\sigma(x_i)}{\tau} (\bar k_i - k_i^+), \qquad
    \bar k_i = \frac{1}{\ell_i} \sum_j e^{s_{ij}} k_j .

So loss and gradient need two sums over the negatives, and a sum over keys is a sum over ranks: **anchors travel, keys
stay**. One step has five parts:

1. all-gather the anchors :math:`q_i / \tau`;
2. each rank adds up its own keys for all anchors, :math:`\sum_j e^{s_{ij}}` and :math:`\sum_j e^{s_{ij}} k_j`;
3. reduce-scatter these sums, so that every anchor's totals arrive at its owner;
4. the owner computes :math:`L_i` and the gradients of :math:`q_i`, :math:`k_i^+` and :math:`\tau`;
5. all-gather :math:`s_i^+ + L_i`, one number per anchor, from which each rank computes the gradient of its live keys.

The difference :math:`p_i^+ - 1`, which loses all its digits once an anchor has found its positive, is never formed.
Besides the collectives above there are only those of the anchors' ids, of their largest logits where a running maximum
is needed, and of the ranks' row counts. ``backward`` has none. ``docs/contrast.md`` has the proofs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.contrast.exchange import Exchange
from pretrain.contrast.hardness import accumulate_hard
from pretrain.contrast.kernels.products import Products
from pretrain.contrast.kernels.protocol import InstanceIds, Kernel, SoftmaxSums
from pretrain.contrast.queue import NO_ID
from pretrain.contrast.stats import ContrastStats, effective_number


@dataclass(frozen=True)
class SoftmaxContext:
    """The inputs of one softmax that are not differentiable.

    Attributes:
        exchange: the ranks that see each other's anchors, and their numbers of anchors.
        kernel: the arithmetic on this rank's keys.
        queued: frozen negatives of this rank ``(k, d)`` and their instances ``(k,)``, or ``None``.
        queued_weight: how often each of them counts, a scalar (None: once), the same on all ranks.
        hardness: the sharpness of their weights, 0 for equal ones (:mod:`pretrain.contrast.hardness`).
        in_batch: whose anchors see this rank's live keys: ``global``, ``local`` or ``none``.
        anchor_ids: ``(m,)``, the instance of each anchor.
        live_ids: ``(c,)``, the instance of each live key; a key of the anchor's own instance is never a negative.
        shared_ids: whether an id means the same on every rank and in the queue (because the user gave it).
        products: the precision of the matrix products; exponentials and sums are fp32 (fp64).
        needs_max: whether logits may be too large for a bare exponential, or diagnostics ask for the largest.
        scale: factor of the returned loss and of all gradients.
        stats: diagnostics to fill, or ``None``.
    """

    exchange: Exchange
    kernel: Kernel
    queued: tuple[Tensor, Tensor] | None
    queued_weight: Tensor | None
    hardness: float
    in_batch: str
    anchor_ids: Tensor
    live_ids: Tensor
    shared_ids: bool
    products: Products
    needs_max: bool
    scale: float
    stats: ContrastStats | None

    def gathered_ids(self, gathered: int) -> Tensor:
        """The ids of all ``gathered`` anchors; without shared ids only this rank's are known, and needed."""
        if self.shared_ids or len(self.exchange.counts) == 1:
            return self.exchange.all_gather(self.anchor_ids)
        ids = self.anchor_ids.new_full((gathered,), NO_ID)
        ids[self.exchange.local_rows] = self.anchor_ids
        return ids

    def live_blocks(self, gathered_ids: Tensor) -> Iterator[tuple[slice, InstanceIds | None]]:
        """The gathered anchors that see this rank's live keys, in blocks, with ids where a block has own keys."""
        local, end = self.exchange.local_rows, len(gathered_ids)
        if self.in_batch == "global" and self.shared_ids:
            yield slice(0, end), InstanceIds(gathered_ids, self.live_ids)
        elif self.in_batch != "none":
            yield local, InstanceIds(self.anchor_ids, self.live_ids)
            if self.in_batch == "global" and local.start:
                yield slice(0, local.start), None
            if self.in_batch == "global" and local.stop < end:
                yield slice(local.stop, end), None


class ShardedSoftmax(torch.autograd.Function):
    """``forward`` computes the loss and every gradient; ``backward`` multiplies them by the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, positives: Tensor, live: Tensor, temperature: Tensor | float, context: SoftmaxContext
    ) -> Tensor:
        """The loss of this rank's anchors, a scalar. Shapes: anchors and positives ``(m, d)``, live keys ``(c, d)``."""
        queries = context.exchange.all_gather((anchors / temperature).to(context.products.wire_dtype(anchors.dtype)))
        gathered_ids = context.gathered_ids(len(queries))
        blocks = list(context.live_blocks(gathered_ids))
        least = anchors.new_full((len(queries),), -1.0) * (1 / temperature + context.hardness)
        sums = SoftmaxSums(
            normaliser=torch.zeros_like(least),
            weighted_keys=anchors.new_zeros(queries.shape) if any(ctx.needs_input_grad) else None,
            running_max=least.clone() if context.needs_max else None,
            squares=torch.zeros_like(least) if context.stats is not None else None,
            largest=least if context.stats is not None and context.hardness else None,
        )
        _accumulate_keys(sums, queries, gathered_ids, live, blocks, temperature, context)
        sums = context.exchange.reduce_scatter(sums)

        # One number per anchor: float64 costs nothing here and saves the digits of a difference of large logits.
        positive_logits = (anchors.double() * positives.double()).sum(1) / temperature
        margins = sums.normaliser.double().log() - positive_logits  # x_i
        if sums.running_max is not None:
            margins += sums.running_max
        losses = torch.logaddexp(margins, torch.zeros_like(margins))
        if context.stats is not None and sums.running_max is not None and sums.squares is not None:
            nearest = sums.running_max if sums.largest is None else sums.largest
            context.stats.update(
                torch.sigmoid(-margins),
                (positive_logits - nearest) * temperature,
                effective_number(sums.normaliser.double(), sums.squares.double()),
            )

        if sums.weighted_keys is not None:
            tiny = torch.finfo(anchors.dtype).tiny  # an anchor without any negative: 0 / tiny, times sigmoid(-inf)
            mean_negative = sums.weighted_keys / sums.normaliser.clamp_min(tiny)[:, None]
            weight = torch.sigmoid(margins).to(anchors.dtype)[:, None] * context.scale / temperature
            grad_anchors = weight * (mean_negative - positives)
            grad_temperature = -(anchors * grad_anchors).sum() / temperature if ctx.needs_input_grad[3] else None
            grad_live = None
            if ctx.needs_input_grad[2]:
                lse = context.exchange.all_gather((positive_logits + losses).to(anchors.dtype))
                grad_live = _live_gradient(queries, lse, live, blocks, context)
            ctx.save_for_backward(grad_anchors, -weight * anchors, grad_live, grad_temperature)
        return (losses.sum() * context.scale).to(anchors.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The saved gradients times the gradient of the objective with respect to this loss."""
        saved = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return *(grad_output * grad if grad is not None and needed else None for grad, needed in saved), None


def _accumulate_keys(
    sums: SoftmaxSums,
    queries: Tensor,
    gathered_ids: Tensor,
    live: Tensor,
    blocks: list[tuple[slice, InstanceIds | None]],
    temperature: Tensor | float,
    context: SoftmaxContext,
) -> None:
    """Add this rank's queue rows and live keys to the sums of all anchors; give all ranks the same running maxima."""
    if context.queued is not None:
        queued, queued_ids = context.queued
        ids = InstanceIds(gathered_ids, queued_ids) if context.shared_ids else None
        if context.hardness:
            accumulate_hard(
                sums, queries, queued, ids, hardness=context.hardness, temperature=temperature,
                exchange=context.exchange, kernel=context.kernel, products=context.products,
            )  # fmt: skip
        else:
            context.kernel.accumulate(sums, queries, queued, ids, context.products)
        if context.queued_weight is not None:
            sums.weigh(context.queued_weight)
    for rows, ids in blocks:
        context.kernel.accumulate(sums[rows], queries[rows], live, ids, context.products)
    if sums.running_max is not None:
        sums.rescale(context.exchange.all_reduce_max(sums.running_max))
    if sums.largest is not None:
        sums.largest.copy_(context.exchange.all_reduce_max(sums.largest))


def _live_gradient(
    queries: Tensor,
    lse: Tensor,
    live: Tensor,
    blocks: list[tuple[slice, InstanceIds | None]],
    context: SoftmaxContext,
) -> Tensor:
    r"""The gradient of this rank's live keys from the anchors of all ranks, :math:`\frac1\tau \sum_i p_{ij} q_i`."""
    total = lse.new_zeros(live.shape)
    for rows, ids in blocks:
        total += context.kernel.key_gradient(queries[rows], live, lse[rows], ids, context.products)
    return total * context.scale
