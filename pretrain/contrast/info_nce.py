r"""InfoNCE with negatives from the batch of every rank and from a sharded queue: the function the other tasks call."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pretrain.contrast.checks import (
    InBatch,
    Reduction,
    check_options,
    check_queue,
    check_rows,
    compute_dtype,
)
from pretrain.contrast.exchange import Exchange
from pretrain.contrast.kernels import KERNELS
from pretrain.contrast.kernels.products import Precision, Products, check_precision
from pretrain.contrast.queue import NO_ID, ShardedQueue
from pretrain.contrast.sharded import ShardedSoftmax, SoftmaxContext
from pretrain.contrast.stats import ContrastStats
from pretrain.engine import distributed

LARGEST_INVERSE_TEMPERATURE = {torch.float32: 64.0, torch.float64: 640.0}
"""Up to this ``1 / tau`` (plus the hardness) logits of unit rows need no running maximum: their exponentials and sums
stay in range."""


def info_nce(
    anchors: Float[Tensor, "n d"],
    positives: Float[Tensor, "n d"],
    *,
    temperature: float | Float[Tensor, ""],
    queue: ShardedQueue | None = None,
    queue_share: float | None = None,
    hardness: float = 0.0,
    negatives: Float[Tensor, "k d"] | None = None,
    in_batch: InBatch = "global",
    symmetric: bool = False,
    within_view: bool = False,
    ids: Int[Tensor, " n"] | None = None,
    group: distributed.Group = None,
    equal_rows: bool = False,
    reduction: Reduction = "mean",
    grad_reduction: Reduction = "mean",
    impl: str = "chunked",
    precision: Precision = "fp32",
    stats: ContrastStats | None = None,
) -> Float[Tensor, ""]:
    r"""Contrastive loss of ``n`` anchors per rank, exact over all ranks of ``group``.

    .. math::
        L_i = -\log \frac{e^{q_i \cdot k_i^+ / \tau}}{e^{q_i \cdot k_i^+ / \tau} + \sum_{j \in \mathcal{N}(i)} e^{q_i
        \cdot k_j / \tau}}

    The negatives of anchor ``i`` are all rows of the queue and, of the live batch, the positives of other samples; with
    ``within_view`` the anchors of other samples, too. The sample's own rows are never among them. The queue is frozen;
    live rows receive gradients from the anchors of every rank that sees them.

    Args:
        anchors: unit rows. In float64 everything is computed in float64, else in float32, whatever their type.
        positives: unit rows; row ``i`` is the positive of anchor ``i``.
        temperature: a number, or a positive scalar tensor whose exact gradient is wanted.
        queue: more negatives, over all ranks. Enqueue *after* the loss; with a ``drift``, those views that are keys
            here, whose statistics the queued rows take on.
        queue_share: how much the queue may weigh beside the live keys. Every queued row then counts
            ``min(1, queue_share * L / K)`` times, of ``L`` live rows of the views that are keys, ``negatives`` not
            counted (of all ranks, or of a rank in the mean where ``in_batch`` is local), and ``K`` rows that the queue
            holds, so that stale rows never drown live ones. 0 = as without the queue, None = every row counts once.
        hardness: :math:`\alpha`; each queued row counts :math:`K_i e^{\alpha c_{ij}} / \sum_{j'} e^{\alpha c_{ij'}}`
            times, with its cosine :math:`c_{ij}` to the anchor and :math:`K_i` queued negatives of it, so that near
            ones count more and all together as often as before (:mod:`pretrain.contrast.hardness`). The weights take
            no gradient. 0 = every row counts once.
        negatives: more live negatives for every anchor that sees this rank's batch, unit rows, any number.
        in_batch: whose live rows are negatives: those of all ranks, of this rank, or none.
        symmetric: positives are anchors as well (the mean is then over both directions).
        within_view: rows of the anchor's own view are negatives as well (SimCLR, CAPT).
        ids: instance of each sample; a key with the anchor's id, live or queued, is no negative (it shows the same
            thing). The positive always counts once.
        group: the ranks over which batch and queue are spread. Ranks may hold different ``n``.
        equal_rows: the caller knows that they do not: then no rank asks the others for theirs, and the host does not
            wait for the device. Other sizes would be an error of the collectives, or wrong rows.
        reduction: ``mean`` over the anchors of all ranks, or ``sum``.
        grad_reduction: how the engine combines the parameter gradients of the ranks. The value returned on each rank is
            scaled so that this very combination of the ranks' values, and of their gradients, is exact.
        impl: ``chunked``, or ``dense`` (all logits of a rank at once, to compare with).
        precision: of the matrix products with keys and queue, :mod:`pretrain.contrast.kernels.products`; exponentials,
            sums and all else stay in float32.
        stats: filled with diagnostics of this rank's anchors.

    Raises:
        ConfigError: a temperature that is not positive, a hardness below 0, rows without unit norm (on a GPU, and in
            compiled code, this is looked at only when ``stats`` are asked for), arguments that do not fit each other,
            or a precision that the device does not have.
    """
    check_options(temperature, in_batch, reduction, grad_reduction, impl)
    check_precision(precision, anchors.device)
    check_rows(anchors, positives, negatives, ids, wait_for_values=stats is not None)
    check_queue(anchors, queue, negatives, in_batch, group, queue_share, hardness)
    if queue_share == 0:  # its rows would count 0 times, and still be the nearest ones
        queue = None
    dtype = compute_dtype(anchors, positives, precision)

    samples = Exchange.gather_counts(len(anchors), anchors.device, group, equal=equal_rows)
    scale = float(distributed.world_size(group)) if grad_reduction == "mean" else 1.0
    if reduction == "mean":
        scale /= max(1, sum(samples.counts)) * (2 if symmetric else 1)  # of no anchor at all the loss is 0
    # other ranks' anchors are needed where this rank holds keys for them
    exchange = samples if queue is not None or in_batch == "global" else samples.local()
    hardness = float(hardness) if queue is not None else 0.0
    largest = LARGEST_INVERSE_TEMPERATURE[dtype]
    bounded = not isinstance(temperature, Tensor) and 1 / temperature + hardness <= largest
    instances = torch.arange(len(anchors), device=anchors.device) if ids is None else ids
    extra = [] if negatives is None else [negatives]

    queued, queued_weight = None, None
    if queue is not None:
        live_views = [anchors, positives] if symmetric or within_view else [positives]
        queued = queue.negatives(live_views), queue.ids
        if queue_share is not None:
            live_rows = len(live_views) * sum(samples.counts) / (1 if in_batch == "global" else len(samples.counts))
            queued_weight = _weight_of_queue(queue_share * live_rows, queued[0], group)

    losses: list[Tensor] = []
    for q, k, live in _softmaxes(anchors, positives, symmetric, within_view, in_batch):
        context = SoftmaxContext(
            exchange=exchange.with_views(len(q)),
            kernel=KERNELS[impl],
            queued=queued,
            queued_weight=queued_weight,
            hardness=hardness,
            in_batch=in_batch,
            anchor_ids=_concatenate([instances] * len(q)),
            live_ids=_concatenate(
                [*(instances[: len(rows)] for rows in live), *(instances.new_full((len(k),), NO_ID) for k in extra)]
            ),
            shared_ids=ids is not None,
            products=Products(precision),
            needs_max=not bounded or stats is not None,
            scale=scale,
            stats=stats,
        )
        tensors = [_concatenate(rows).to(dtype) for rows in (q, k, [*live, *extra])]
        tensors[2] = tensors[2].view_as(tensors[2])  # the positives may be the live keys: a compiler wants them apart
        with torch.autocast(anchors.device.type, enabled=False), context.products.applied_on(anchors.device):
            losses.append(ShardedSoftmax.apply(*tensors, temperature, context))
    return functools.reduce(torch.add, losses)


def _softmaxes(
    a: Tensor, p: Tensor, symmetric: bool, within_view: bool, in_batch: InBatch
) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """The views that are anchors, their positives, and the live keys that they see, for each softmax of the loss."""
    if symmetric and within_view:
        parts = [([a, p], [p, a], [a, p])]
    elif symmetric:
        parts = [([a], [p], [p]), ([p], [a], [a])]
    else:
        parts = [([a], [p], [a, p] if within_view else [p])]
    return [(q, k, live if in_batch != "none" else [a[:0].detach()]) for q, k, live in parts]


def _weight_of_queue(rows: float, queued: Tensor, group: distributed.Group) -> Tensor:
    """How often each queued row counts where all of them together may count as ``rows`` at most."""
    held = distributed.all_reduce_sum(
        torch.full((), float(len(queued)), dtype=torch.float64, device=queued.device), group
    )
    return (rows / held.clamp_min(1.0)).clamp_max(1.0)


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
