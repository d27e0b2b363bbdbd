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

**Hardness.** Queued negatives can be weighted by how near they are to the anchor, exact over the shards of the queue.
With the cosine :math:`c_{ij} = q_i \cdot k_j` of anchor and queued row, and :math:`K_i` rows that are negatives of the
anchor, each counts

.. math::
    w_{ij} = K_i \frac{e^{\alpha c_{ij}}}{\sum_{j'} e^{\alpha c_{ij'}}}

times, :math:`K_i` altogether, as without. This is the importance weighting of Robinson et al. 2021
(arXiv:2010.04592, without their correction for false negatives), of queued rows alone: live ones count once. The
weights are numbers and take no gradient. So

.. math::
    \sum_j w_{ij} e^{c_{ij} / \tau} = K_i \frac{B_i}{A_i}, \qquad A_i = \sum_j e^{\alpha c_{ij}}, \quad
    B_i = \sum_j e^{(\alpha + 1/\tau) c_{ij}},

and :math:`A` and :math:`B` are the sums of one kernel at the temperatures :math:`1 / \alpha` and
:math:`1 / (\alpha + 1/\tau)`. :math:`A_i` and :math:`K_i` are totalled over the ranks before the live keys are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast.kernels import KERNELS, InstanceIds, Kernel, Precision, Products, SoftmaxSums
from capt.pretrain.contrast.metrics import ContrastStats, effective_number
from capt.pretrain.contrast.queue import NO_ID

InBatch = Literal["global", "local", "none"]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class ContrastOptions:
    r"""How a contrast is computed: one object from the job to the kernel.

    A field here is a keyword of the loss, and a key of the section ``contrast`` of that name sets it.

    Attributes:
        queue_share: how much the queue may weigh beside the live keys. Every queued row then counts
            ``min(1, queue_share * L / K)`` times, of ``L`` live rows of the views that are keys, ``negatives`` not
            counted (of all ranks, or of a rank in the mean where ``in_batch`` is local), and ``K`` rows that the queue
            holds, so that stale rows never drown live ones. 0 = as without the queue, None = every row counts once.
        hardness: :math:`\alpha`; each queued row counts :math:`K_i e^{\alpha c_{ij}} / \sum_{j'} e^{\alpha c_{ij'}}`
            times, with its cosine :math:`c_{ij}` to the anchor and :math:`K_i` queued negatives of it, so that near
            ones count more and all together as often as before. The weights take no gradient. 0 = every row counts
            once.
        in_batch: whose live rows are negatives: those of all ranks, of this rank, or none.
        equal_rows: the caller knows that all ranks hold the same number of rows: then no rank asks the others for
            theirs, and the host does not wait for the device. Other sizes would be an error of the collectives, or
            wrong rows.
        reduction: ``mean`` over the anchors of all ranks, or ``sum``.
        grad_reduction: how the engine combines the parameter gradients of the ranks. The value returned on each rank is
            scaled so that this very combination of the ranks' values, and of their gradients, is exact.
        impl: ``chunked``, or ``dense`` (all logits of a rank in one matrix, to compare with).
        precision: of the matrix products with keys and queue, :mod:`capt.pretrain.contrast.kernels`; exponentials,
            sums and all else stay in float32.

    Raises:
        ConfigError: an unknown choice, or a number that is negative or not finite.
    """

    queue_share: float | None = None
    hardness: float = 0.0
    in_batch: InBatch = "global"
    equal_rows: bool = False
    reduction: Reduction = "mean"
    grad_reduction: Reduction = "mean"
    impl: str = "chunked"
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        choices = {
            "in_batch": (self.in_batch, get_args(InBatch)),
            "reduction": (self.reduction, get_args(Reduction)),
            "grad_reduction": (self.grad_reduction, get_args(Reduction)),
            "impl": (self.impl, tuple(KERNELS)),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if not 0 <= self.hardness < math.inf:
            raise ConfigError(f"hardness is a number of 0 or more, got {self.hardness}")
        if self.queue_share is not None and (self.in_batch == "none" or not 0 <= self.queue_share < math.inf):
            raise ConfigError(
                f"queue_share is a number of 0 or more, and a share of the live keys, got {self.queue_share} with "
                f"in_batch={self.in_batch}"
            )


@dataclass(frozen=True)
class Exchange:
    """Collectives over ``group``, whose rank ``r`` has ``counts[r]`` rows in this step.

    Collectives need equal shapes, so each rank's rows are padded with zeros to the longest. No mask is needed: a zero
    anchor adds nothing to the gradient of any key, its own sums are dropped by its owner, and keys are never sent.
    """

    counts: tuple[int, ...]
    group: distributed.Group

    @classmethod
    def gather_counts(
        cls, rows: int, device: torch.device, group: distributed.Group, *, equal: bool = False
    ) -> Exchange:
        """Learn every rank's number of rows: an all-gather of 8 bytes per rank, for whose result the host waits.

        With ``equal`` the caller knows that all ranks have the same number, and there is no collective.
        """
        if equal or distributed.world_size(group) == 1:
            return cls((rows,) * distributed.world_size(group), group)
        counts = distributed.all_gather(torch.tensor(rows, device=device), group)
        return cls(tuple(counts.tolist()), group)

    def with_views(self, views: int) -> Exchange:
        """The exchange of ``views`` rows per sample in place of one."""
        return Exchange(tuple(count * views for count in self.counts), self.group)

    def local(self) -> Exchange:
        """The exchange of this rank's rows with itself, for a loss in which no other rank holds keys."""
        return Exchange((self.counts[self.rank],), None)

    @property
    def rank(self) -> int:
        """This rank's place in ``counts``."""
        return distributed.rank(self.group) if len(self.counts) > 1 else 0

    @property
    def local_rows(self) -> slice:
        """The place of this rank's rows among the gathered ones."""
        start = self.rank * max(self.counts)
        return slice(start, start + self.counts[self.rank])

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, padded: ``(n, ...) -> (W * max n, ...)``."""
        if len(self.counts) == 1:
            return rows
        missing = max(self.counts) - len(rows)
        if missing:
            rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
        return distributed.all_gather(rows, self.group).flatten(0, 1)

    def reduce_scatter(self, sums: SoftmaxSums) -> SoftmaxSums:
        """Total the sums of all ranks and return those of this rank's anchors, in one collective.

        All ranks must have the same running maxima (:meth:`all_reduce_max`).
        """
        if len(self.counts) == 1:
            return sums
        numbers = [sums.normaliser] if sums.squares is None else [sums.normaliser, sums.squares]
        columns = [each[:, None] for each in numbers]
        if sums.weighted_keys is not None:
            columns.append(sums.weighted_keys)
        by_owner = torch.cat(columns, dim=1).unflatten(0, (len(self.counts), -1))
        totals = distributed.reduce_scatter_sum(by_owner, self.group)[: self.counts[self.rank]]
        return SoftmaxSums(
            normaliser=totals[:, 0],
            weighted_keys=None if sums.weighted_keys is None else totals[:, len(numbers) :],
            running_max=None if sums.running_max is None else sums.running_max[self.local_rows],
            squares=None if sums.squares is None else totals[:, 1],
            largest=None if sums.largest is None else sums.largest[self.local_rows],
        )

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over the ranks."""
        return values if len(self.counts) == 1 else distributed.all_reduce_max(values, self.group)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over the ranks."""
        return values if len(self.counts) == 1 else distributed.all_reduce_sum(values, self.group)


def accumulate_hard(
    sums: SoftmaxSums,
    queries: Tensor,
    keys: Tensor,
    ids: InstanceIds | None,
    temperature: Tensor | float,
    context: SoftmaxContext,
) -> None:
    r"""Add this rank's queued ``keys (k, d)``, so weighted, to the sums of all anchors (collective).

    Args:
        sums: nothing has been added to them yet. Their running maxima, where they have some, are at most
            :math:`-(\alpha + 1/\tau)` and become those of the weighted terms.
        queries: ``(N, d)``, the anchors divided by the temperature.
        ids: of anchors and keys; a key with the anchor's id is no negative.
        temperature: :math:`\tau`.
        context: with the hardness :math:`\alpha`, which is above 0.
    """
    exchange, kernel, products, hardness = context.exchange, context.kernel, context.products, context.options.hardness
    queries = queries.to(sums.normaliser.dtype)
    scale = hardness * temperature
    proposal = SoftmaxSums(
        normaliser=torch.zeros_like(sums.normaliser),
        weighted_keys=None,
        running_max=None if sums.running_max is None else torch.full_like(sums.running_max, -hardness),
    )
    kernel.accumulate(proposal, queries * scale, keys, ids, products)
    if proposal.running_max is not None:
        proposal.rescale(exchange.all_reduce_max(proposal.running_max))
    negatives = torch.full_like(proposal.normaliser, float(len(keys)))
    if ids is not None:
        negatives -= ids.own_keys()
    negatives, total = exchange.all_reduce_sum(torch.stack([negatives, proposal.normaliser]))

    kernel.accumulate(sums, queries * (1 + scale), keys, ids, products)
    if sums.largest is not None:
        sums.largest.div_(1 + scale)
    sums.weigh(negatives / total.clamp_min(torch.finfo(total.dtype).tiny))  # 0 / tiny: an anchor without any negative
    if sums.running_max is not None and proposal.running_max is not None:
        sums.running_max.sub_(proposal.running_max)


@dataclass(frozen=True)
class SoftmaxContext:
    """The inputs of one softmax that are not differentiable.

    Attributes:
        exchange: the ranks that see each other's anchors, and their numbers of anchors.
        options: how it is computed; ``hardness`` is 0 without a queue.
        queued: frozen negatives of this rank ``(k, d)`` and their instances ``(k,)``, or ``None``.
        queued_weight: how often each of them counts, a scalar (None: once), the same on all ranks.
        anchor_ids: ``(m,)``, the instance of each anchor.
        live_ids: ``(c,)``, the instance of each live key; a key of the anchor's own instance is never a negative.
        shared_ids: whether an id means the same on every rank and in the queue (because the user gave it).
        needs_max: whether logits may be too large for a bare exponential, or diagnostics ask for the largest.
        scale: factor of the returned loss and of all gradients.
        stats: diagnostics to fill, or ``None``.
    """

    exchange: Exchange
    options: ContrastOptions
    queued: tuple[Tensor, Tensor] | None
    queued_weight: Tensor | None
    anchor_ids: Tensor
    live_ids: Tensor
    shared_ids: bool
    needs_max: bool
    scale: float
    stats: ContrastStats | None

    @property
    def kernel(self) -> Kernel:
        """The arithmetic on this rank's keys."""
        return KERNELS[self.options.impl]

    @property
    def products(self) -> Products:
        """The matrix products; exponentials and sums are fp32 (fp64)."""
        return Products(self.options.precision)

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
        if self.options.in_batch == "global" and self.shared_ids:
            yield slice(0, end), InstanceIds(gathered_ids, self.live_ids)
        elif self.options.in_batch != "none":
            yield local, InstanceIds(self.anchor_ids, self.live_ids)
            if self.options.in_batch == "global" and local.start:
                yield slice(0, local.start), None
            if self.options.in_batch == "global" and local.stop < end:
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
        least = anchors.new_full((len(queries),), -1.0) * (1 / temperature + context.options.hardness)
        sums = SoftmaxSums(
            normaliser=torch.zeros_like(least),
            weighted_keys=anchors.new_zeros(queries.shape) if any(ctx.needs_input_grad) else None,
            running_max=least.clone() if context.needs_max else None,
            squares=torch.zeros_like(least) if context.stats is not None else None,
            largest=least if context.stats is not None and context.options.hardness else None,
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
        if context.options.hardness:
            accumulate_hard(sums, queries, queued, ids, temperature, context)
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
