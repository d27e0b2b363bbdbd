r"""InfoNCE with negatives from the batch of every rank and from a sharded queue: the function the other tasks call."""

from __future__ import annotations

import functools
import math
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pretrain.base.errors import ConfigError
from pretrain.contrast.exchange import Exchange
from pretrain.contrast.kernels import KERNELS
from pretrain.contrast.kernels.products import Precision, Products, require
from pretrain.contrast.queue import NO_ID, ShardedQueue
from pretrain.contrast.sharded import ShardedSoftmax, SoftmaxContext
from pretrain.contrast.stats import ContrastStats
from pretrain.engine import distributed

InBatch = Literal["global", "local", "none"]
Reduction = Literal["mean", "sum"]

BOUNDED = {torch.float32: 64.0, torch.float64: 640.0}
"""The largest ``1 / tau`` at which logits of unit rows need no reference: ``exp(s)`` and its sums stay in range."""


def info_nce(
    anchors: Float[Tensor, "n d"],
    positives: Float[Tensor, "n d"],
    *,
    temperature: float | Float[Tensor, ""],
    queue: ShardedQueue | None = None,
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
        queue: more negatives, over all ranks. Enqueue *after* the loss.
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
        ConfigError: a temperature that is not positive, rows without unit norm (on a GPU, and in compiled code, this
            is looked at only when ``stats`` are asked for), arguments that do not fit each other, or a precision that
            the device does not have.
    """
    _check_options(temperature, in_batch, reduction, grad_reduction, impl)
    require(precision, anchors.device)
    _check_rows(anchors, positives, negatives, ids, look_at_values=stats is not None or _may_look(anchors))
    _check_queue(anchors, queue, negatives, in_batch, group)

    dtype = torch.float64 if torch.float64 in (anchors.dtype, positives.dtype) else torch.float32
    if dtype == torch.float64 and precision != "fp32":
        raise ConfigError(
            f"precision {precision} is for float32 rows; float64 rows are multiplied in float64, with fp32"
        )
    products = Products(precision)
    bounded = not isinstance(temperature, Tensor) and 1 / temperature <= BOUNDED[dtype]
    samples = Exchange.agree(len(anchors), anchors.device, group, equal=equal_rows)
    scale = float(distributed.world_size(group)) if grad_reduction == "mean" else 1.0
    if reduction == "mean":
        scale /= sum(samples.counts) * (2 if symmetric else 1)
    instances = torch.arange(len(anchors), device=anchors.device) if ids is None else ids
    extra = [] if negatives is None else [negatives]

    losses: list[Tensor] = []
    for q, k, live in _softmaxes(anchors, positives, symmetric, within_view, in_batch):
        step = SoftmaxContext(
            exchange=samples.views(len(q)) if queue is not None or in_batch == "global" else samples.alone(len(q)),
            kernel=KERNELS[impl],
            queue=queue,
            in_batch=in_batch,
            anchor_ids=_joined([instances] * len(q)),
            live_ids=_joined(
                [*(instances[: len(rows)] for rows in live), *(instances.new_full((len(k),), NO_ID) for k in extra)]
            ),
            shared_ids=ids is not None,
            products=products,
            running_reference=not bounded or stats is not None,
            scale=scale,
            stats=stats,
        )
        tensors = [_joined(rows).to(dtype) for rows in (q, k, [*live, *extra])]
        tensors[2] = tensors[2].view_as(tensors[2])  # the positives may be the live keys: a compiler wants them apart
        with torch.autocast(anchors.device.type, enabled=False), products.on(anchors.device):
            losses.append(ShardedSoftmax.apply(*tensors, temperature, step))
    return functools.reduce(torch.add, losses)


def _softmaxes(
    a: Tensor, p: Tensor, symmetric: bool, within_view: bool, in_batch: InBatch
) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """The views that are anchors, their positives, and the live keys they see, for each softmax of the loss."""
    if symmetric and within_view:
        parts = [([a, p], [p, a], [a, p])]
    elif symmetric:
        parts = [([a], [p], [p]), ([p], [a], [a])]
    else:
        parts = [([a], [p], [a, p] if within_view else [p])]
    return [(q, k, live if in_batch != "none" else [a[:0].detach()]) for q, k, live in parts]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_options(temperature: float | Tensor, in_batch: str, reduction: str, grad_reduction: str, impl: str) -> None:
    choices = {
        "in_batch": (in_batch, get_args(InBatch)),
        "reduction": (reduction, get_args(Reduction)),
        "grad_reduction": (grad_reduction, get_args(Reduction)),
        "impl": (impl, tuple(KERNELS)),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    if isinstance(temperature, Tensor) and not _may_look(temperature):
        return
    tau = temperature.item() if isinstance(temperature, Tensor) else temperature
    if not (tau > 0 and math.isfinite(tau)):
        raise ConfigError(f"the temperature must be a positive number, got {tau}")


def _check_rows(
    anchors: Tensor, positives: Tensor, negatives: Tensor | None, ids: Tensor | None, look_at_values: bool
) -> None:
    if positives.shape != anchors.shape or (negatives is not None and negatives.shape[1:] != anchors.shape[1:]):
        shapes = [tuple(rows.shape) for rows in (anchors, positives, negatives) if rows is not None]
        raise ConfigError(f"anchors and positives must have one shape, negatives the same width, got {shapes}")
    if ids is not None and (ids.shape != anchors.shape[:1] or ids.dtype != torch.int64):
        raise ConfigError(f"ids must be {len(anchors)} int64 numbers, got {tuple(ids.shape)} of {ids.dtype}")
    if not look_at_values:
        return
    named = {"anchors": anchors, "positives": positives, "negatives": negatives}
    lengths = {name: _lengths(rows.detach()) for name, rows in named.items() if rows is not None}
    if _off_one(torch.cat(list(lengths.values()))):
        name = next(name for name, values in lengths.items() if _off_one(values))
        raise ConfigError(f"{name} must have unit norm: apply torch.nn.functional.normalize(rows, dim=-1) first")


def _may_look(values: Tensor) -> bool:
    """Whether a number can be read without waiting for a stream, or breaking a compiled graph."""
    return not values.is_cuda and not torch.compiler.is_compiling()


def _lengths(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
    return lengths


def _off_one(lengths: Tensor) -> bool:
    """NaN passes: an fp16 step that overflowed must reach the loss scaler as NaN, not end the run here."""
    return bool(((lengths - 1).abs_() > 0.01).any())


def _check_queue(
    anchors: Tensor, queue: ShardedQueue | None, negatives: Tensor | None, in_batch: str, group: distributed.Group
) -> None:
    if in_batch == "none" and (queue is None or negatives is not None):
        raise ConfigError("in_batch=none leaves only the queue: pass one, and no negatives")
    if queue is None:
        return
    if queue.dim != anchors.shape[1]:
        raise ConfigError(f"the queue holds rows of {queue.dim} features, the anchors have {anchors.shape[1]}")
    world = distributed.world_size(group)
    if queue.world != world:
        raise ConfigError(f"the queue is sharded over {queue.world} ranks, the loss over {world}: give both one group")
