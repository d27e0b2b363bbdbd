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
Besides the collectives above there are only those of the anchors' ids (and of their queries' where pairs are known that
belong together), of their largest logits where a running maximum
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

Live keys have the simpler weight of Lan et al. 2025 (arXiv:2503.04812), :math:`e^{\alpha c_{ij}}`, which is not kept at
a total: the logit is :math:`c_{ij} / \tau + \alpha c_{ij}`, the sums are those at :math:`1 / (\alpha + 1/\tau)`.

**Sides.** Where documents are anchors beside their queries (:mod:`capt.pretrain.contrast.forms`), :math:`\ell_i` is
the sum over the negatives of both, and each side has its own part of it in :math:`\bar k_i`. The rows of the sides
take turns, :math:`q_0, d_0, q_1, d_1, \dots`, so that they travel like any other anchors, and one side is every second
row. Where the denominator has the positive :math:`m` times, :math:`L_i = \log(m + e^{x_i}) = \log m + \log(1 + e^{x_i
- \log m})`.

**Temperatures of rows.** Every anchor may have a temperature :math:`\tau_i` of its own, by which it is divided before
it travels; nothing else changes, as long as no weight depends on the temperature (hardness).

**False negatives.** A negative whose cosine exceeds :math:`u_i`, the cosine of the positive plus a margin, is left out
(:mod:`capt.pretrain.contrast.masks`). :math:`u_i` is known to the owner of the anchor before the sums, and travels
with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize

from capt.pretrain.contrast.exchange import Exchange
from capt.pretrain.contrast.forms import Interaction, Span
from capt.pretrain.contrast.kernels import KERNELS, Kernel, Products, SoftmaxSums
from capt.pretrain.contrast.masks import InstanceIds, KnownPairs, NegativeMask
from capt.pretrain.contrast.metrics import ContrastStats, effective_number
from capt.pretrain.contrast.options import ContrastOptions
from capt.pretrain.contrast.queue import NO_ID


class Arrived(NamedTuple):
    """The anchors of all ranks, whole and not divided by the temperature, their ids, and those of their queries.

    ``columns`` are those that they are cut to.
    """

    anchors: Tensor
    ids: Tensor
    queries: Tensor | None
    columns: slice


@dataclass(frozen=True)
class Known:
    """Pairs of a query and a document that belong together, and the texts of one softmax by id.

    A document that belongs to a sample's query is no negative of the sample, nor is a query that belongs to its
    document. The id of a sample is that of its document.

    Attributes:
        pairs: ``(p, 2)``, the ids of query and document of each pair; the same on all ranks.
        queries: ``(m,)``, the query of each anchor's sample.
        live_queries: ``(c,)``, the query that each live key is, `NO_ID` where it is a document; None: all are.
        live_documents: ``(c,)``, the document that each live key is, `NO_ID` where it is a query.
    """

    pairs: Tensor
    queries: Tensor
    live_queries: Tensor | None
    live_documents: Tensor


class GatheredIds(NamedTuple):
    """Identity of the gathered anchors: their ids, and which queued and live keys are known to belong to them."""

    ids: Tensor
    queue: list[KnownPairs]
    live: list[KnownPairs]


@dataclass(frozen=True)
class SoftmaxContext:
    """The inputs of one softmax that are not differentiable.

    Attributes:
        exchange: the ranks that see each other's anchors, and their numbers of anchors.
        options: how it is computed; ``hardness`` is 0 without a queue.
        queued: frozen negatives of this rank ``(k, d)`` and their instances ``(k,)``, or ``None``.
        queued_weight: how often each of them counts, a scalar (None: once), the same on all ranks.
        queue_step: every anchor sees them (1), or every second one (2).
        anchor_ids: ``(m,)``, the instance of each anchor.
        anchor_places: ``(m,)``, the row of this rank that each anchor is; hard negatives are owned by such rows.
        live_ids: ``(c,)``, the instance of each live key; a key of the anchor's own instance is never a negative.
        live_owners: ``(c,)``, the row that each live key is a hard negative of, or another number than any row's.
        interactions: which anchors see which live keys.
        sides: how many rows share a denominator, one after another among the anchors.
        positive_count: how often the positive is in the denominator.
        arrived: what has been gathered before, where anchors are cut to fewer features; ``None``: it is sent.
        known: pairs that belong together, of other texts than those of one id; None: there are none.
        shared_ids: whether an id means the same on every rank and in the queue (because the user gave it).
        needs_max: whether logits may be too large for a bare exponential, or diagnostics ask for the largest.
        scale: factor of the returned loss and of all gradients.
        stats: diagnostics to fill, or ``None``.
    """

    exchange: Exchange
    options: ContrastOptions
    queued: tuple[Tensor, Tensor] | None
    queued_weight: Tensor | None
    queue_step: int
    anchor_ids: Tensor
    anchor_places: Tensor
    live_ids: Tensor
    live_owners: Tensor
    interactions: list[Interaction]
    sides: int
    positive_count: int
    arrived: Arrived | None
    known: Known | None
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

    def gathered_queries(self, anchors: Tensor, temperature: Tensor | float) -> Tensor:
        """The anchors of all ranks over the temperature, as they are multiplied."""
        wire = self.products.wire_dtype(anchors.dtype)
        tau = temperature
        if isinstance(tau, Tensor) and tau.ndim:
            tau = each_side(tau, self.sides)[:, None].to(anchors.dtype)
        # Not sent before: divided here, so that a temperature for each anchor need not travel.
        if self.arrived is None:
            return self.exchange.all_gather((anchors / tau).to(wire))
        # Sent whole by `_at_widths`, to be cut here: then the temperatures of rows follow.
        if isinstance(tau, Tensor) and tau.ndim:
            tau = self.exchange.all_gather(tau).clamp_min(torch.finfo(torch.float32).tiny)  # of padding it is 0
        return (cut(self.arrived.anchors.to(anchors.dtype), self.arrived.columns) / tau).to(wire)

    def least_logits(self, rows: int, temperature: Tensor | float, like: Tensor) -> Tensor:
        """A bound from below on the logits of each of ``rows`` gathered anchors, the same on all ranks."""
        # The cosine of unit rows is -1 at least, so that no logit is below -1 / tau.
        if isinstance(temperature, Tensor) and temperature.ndim:
            inverse = each_side(1 / temperature, self.sides).to(like.dtype)
            return -self.exchange.all_gather(inverse)
        return like.new_full((rows,), -1.0) * (1 / temperature + self.options.largest_hardness)

    def gathered_ids(self, gathered: int) -> Tensor:
        """The ids of all ``gathered`` anchors; without shared ids only this rank's are known, and needed."""
        if self.arrived is not None:
            return self.arrived.ids
        if self.shared_ids or len(self.exchange.counts) == 1:
            return self.exchange.all_gather(self.anchor_ids)
        ids = self.anchor_ids.new_full((gathered,), NO_ID)
        ids[self.exchange.local_rows] = self.anchor_ids
        return ids

    def gathered_queries_of(self) -> Tensor | None:
        """The id of the query of each gathered anchor's sample; None where no pairs are known."""
        if self.arrived is not None:
            return self.arrived.queries
        return None if self.known is None else self.exchange.all_gather(self.known.queries)

    def gathered(self, count: int) -> GatheredIds:
        """Return the identities of all ``count`` gathered anchors."""
        ids, known, queries = self.gathered_ids(count), self.known, self.gathered_queries_of()
        if known is None or queries is None:
            return GatheredIds(ids, [], [])
        live = [KnownPairs.of(queries, known.live_documents, known.pairs)]
        if known.live_queries is not None:
            live.append(KnownPairs.of(ids, known.live_queries, known.pairs.flip(1)))
        queue = [] if self.queued is None else [KnownPairs.of(queries, self.queued[1], known.pairs)]
        return GatheredIds(ids, queue, live)

    def gathered_limits(
        self, positive_cosines: Tensor, temperature: Tensor | float, dtype: torch.dtype
    ) -> Tensor | None:
        """The largest logit of a negative of each anchor of all ranks; None where no mask goes by the score."""
        limits = self.options.limits(positive_cosines)
        if limits is None:
            return None
        return self.exchange.all_gather(each_side((limits / temperature).to(dtype), self.sides))

    def queue_block(self, gathered: GatheredIds, limits: Tensor | None) -> Block | None:
        """The queue and the anchors that see it."""
        if self.queued is None:
            return None
        anchors, keys = Span(0, len(gathered.ids), self.queue_step), Span(0, len(self.queued[0]))
        # Without ids of the user an id is a place in this batch, which says nothing about queued rows.
        ids = InstanceIds(gathered.ids[anchors.index], self.queued[1]) if self.shared_ids else None
        known = [each.block(anchors.index, keys.index) for each in gathered.queue]
        limits = None if limits is None else limits[anchors.index]
        mask = None if ids is None and limits is None else NegativeMask(ids, known, limits=limits)
        return Block(anchors, keys, mask, self.options.hardness)

    def live_blocks(self, gathered: GatheredIds, limits: Tensor | None) -> Iterator[Block]:
        """The gathered anchors that see this rank's live keys, in blocks, with ids where a block has own keys."""
        for each in self.interactions:
            for anchors, is_local in self._anchors_that_see(each):
                ids = owners = None
                # Among local rows the sample's own keys must be found, with ids of the user or without.
                if is_local or self.shared_ids:
                    ids = InstanceIds(gathered.ids[anchors.index], self.live_ids[each.keys.index])
                known = [pairs.block(anchors.index, each.keys.index) for pairs in gathered.live]
                # Owners are anchors of this rank: to all others its hard negatives are those of somebody else.
                if is_local and each.owned is not None:
                    owners = InstanceIds(self.anchor_places[each.side :: self.sides], self.live_owners[each.keys.index])
                limit = None if limits is None else limits[anchors.index]
                mask = NegativeMask(ids, known, owners, bool(each.owned), limit)
                yield Block(anchors, each.keys, None if ids is None and limit is None else mask, each.hardness)

    def _anchors_that_see(self, interaction: Interaction) -> Iterator[tuple[Span, bool]]:
        """Rows of the interaction's side among the gathered ones, and whether they are this rank's.

        Where ids are shared and nothing depends on the owner, the rows of all ranks are one block.
        """
        side, sides = interaction.side, self.sides
        local, end = self.exchange.local_rows, max(self.exchange.counts) * len(self.exchange.counts)
        everywhere = self.options.in_batch == "global" and not interaction.owned
        if everywhere and self.shared_ids and interaction.owned is None:
            yield Span(side, end, sides), False
            return
        # This rank's own rows apart from those before and after them, for ids and owners are known of them alone.
        yield Span(local.start + side, local.stop, sides), True
        if everywhere and local.start:
            yield Span(side, local.start, sides), False
        if everywhere and local.stop < end:
            yield Span(local.stop + side, end, sides), False


@dataclass(frozen=True)
class Block:
    r"""Some of the gathered anchors, some of this rank's keys that they see, and how.

    Attributes:
        anchors: their places.
        keys: their places.
        mask: which of them are negatives; its limits are logits :math:`c_{ij} / \tau`. None: all.
        hardness: :math:`\alpha` of these keys.
    """

    anchors: Span
    keys: Span
    mask: NegativeMask | None
    hardness: float

    def scaled(self, queries: Tensor, temperature: Tensor | float) -> tuple[Tensor, NegativeMask | None]:
        r"""The block's anchors and mask for logits :math:`c_{ij} / \tau + \alpha c_{ij}`."""
        if not self.hardness:
            return queries[self.anchors.index], self.mask
        # q / tau times 1 + alpha tau: the logits are c / tau + alpha c.
        return self.at(queries, 1 + self.hardness * temperature)

    def at(self, queries: Tensor, factor: Tensor | float) -> tuple[Tensor, NegativeMask | None]:
        """The block's anchors and mask for logits multiplied by ``factor``."""
        rows, mask = queries[self.anchors.index], self.mask
        if mask is not None and mask.limits is not None:
            mask = replace(mask, limits=mask.limits * factor)
        # Rows that travelled in bf16 are scaled in fp32: a product in bf16 would be rounded once more.
        return rows.to(torch.promote_types(rows.dtype, torch.float32)) * factor, mask


def cut(rows: Tensor, columns: slice) -> Tensor:
    """Rows cut to some features and normalised again; whole rows as they are."""
    whole = columns == slice(0, rows.shape[1])
    return rows if whole else normalize(rows[:, columns], dim=-1)


def as_column(temperature: Tensor | float) -> Tensor | float:
    """A temperature, or one for each row, to divide rows by."""
    return temperature[:, None] if isinstance(temperature, Tensor) and temperature.ndim else temperature


def each_side(values: Tensor, sides: int) -> Tensor:
    """Values of denominators for each of the rows that share one."""
    return values if sides == 1 else torch.stack([values] * sides, 1).flatten(0, 1)


class ShardedSoftmax(torch.autograd.Function):
    """``forward`` computes the loss and every gradient; ``backward`` multiplies them by the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, positives: Tensor, live: Tensor, temperature: Tensor | float, context: SoftmaxContext
    ) -> Tensor:
        """The loss of this rank's anchors, a scalar.

        Shapes: anchors ``(m * sides, d)``, positives ``(m, d)``, live keys ``(c, d)``.
        """
        sides = context.sides
        # 1. Anchors travel: those of all ranks, over the temperature.
        queries = context.gathered_queries(anchors, temperature)
        gathered = context.gathered(len(queries))
        # One number per anchor: float64 costs nothing here and saves the digits of a difference of large logits.
        positive_cosines = (anchors[::sides].double() * positives.double()).sum(1)
        positive_logits = positive_cosines / temperature
        limits = context.gathered_limits(positive_cosines, temperature, anchors.dtype)
        # 2. Keys stay: this rank adds up its own ones, the queue's and the live ones, for all anchors.
        blocks = list(context.live_blocks(gathered, limits))
        # A finite start of the maxima: with -inf an anchor without negatives would have exp(-inf - -inf), which is NaN.
        least = context.least_logits(len(queries), temperature, anchors)
        sums = SoftmaxSums(
            normaliser=torch.zeros_like(least),
            weighted_keys=anchors.new_zeros(queries.shape) if any(ctx.needs_input_grad) else None,
            running_max=least.clone() if context.needs_max else None,
            squares=torch.zeros_like(least) if context.stats is not None else None,
            largest=least if context.stats is not None and context.options.largest_hardness else None,
        )
        _accumulate_keys(sums, queries, context.queue_block(gathered, limits), live, blocks, temperature, context)
        # 3. The totals of every anchor arrive at its owner.
        sums = context.exchange.reduce_scatter(sums).joined(sides)

        # 4. The owner computes the loss and its gradients, in float64 as far as there is one number per anchor.
        margins = sums.normaliser.double().log() - positive_logits  # x_i
        if sums.running_max is not None:
            margins += sums.running_max
        # The positive counts m times: log(m + e^x) = log m + log(1 + e^(x - log m)).
        margins -= math.log(context.positive_count)
        losses = torch.logaddexp(margins, torch.zeros_like(margins)) + math.log(context.positive_count)
        if context.stats is not None and sums.running_max is not None and sums.squares is not None:
            nearest = sums.running_max if sums.largest is None else sums.largest
            context.stats.update(
                torch.sigmoid(-margins),
                (positive_logits - nearest) * temperature,
                effective_number(sums.normaliser.double(), sums.squares.double()),
            )

        if sums.weighted_keys is not None:
            tiny = torch.finfo(anchors.dtype).tiny  # an anchor without any negative: 0 / tiny, times sigmoid(-inf)
            pull = sums.weighted_keys / each_side(sums.normaliser, sides).clamp_min(tiny)[:, None]  # mean negative
            pull[::sides] -= positives  # of a document that is an anchor, the positive's part is that of the positive
            weight = torch.sigmoid(margins).to(anchors.dtype)[:, None] * context.scale / as_column(temperature)
            grad_anchors = each_side(weight, sides) * pull
            # Every logit is q . k / tau: the derivative by tau is that by q, times -q / tau.
            grad_temperature = -(anchors * grad_anchors).sum() / temperature if ctx.needs_input_grad[3] else None
            grad_live = None
            if ctx.needs_input_grad[2]:
                # 5. One number per anchor, s_i^+ + L_i, tells each rank the gradient of its live keys.
                lse = context.exchange.all_gather(each_side((positive_logits + losses).to(anchors.dtype), sides))
                grad_live = _live_gradient(queries, lse, live, blocks, temperature, context)
            # In the order of the inputs: anchors, positives, live keys, temperature.
            ctx.save_for_backward(grad_anchors, -weight * anchors[::sides], grad_live, grad_temperature)
        return (losses.sum() * context.scale).to(anchors.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The saved gradients times the gradient of the objective with respect to this loss."""
        # Not strict: the last input, the context, has no gradient saved.
        saved = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return *(grad_output * grad if grad is not None and needed else None for grad, needed in saved), None


def _accumulate_keys(
    sums: SoftmaxSums,
    queries: Tensor,
    queue_block: Block | None,
    live: Tensor,
    blocks: list[Block],
    temperature: Tensor | float,
    context: SoftmaxContext,
) -> None:
    """Add this rank's queue rows and live keys to the sums of all anchors; give all ranks the same running maxima."""
    # The queue first: its weights multiply all that the sums hold by then.
    if context.queued is not None and queue_block is not None:
        of_queue = sums[queue_block.anchors.index]
        if queue_block.hardness:
            accumulate_hard(of_queue, queries, context.queued[0], queue_block, temperature, context)
        else:
            context.kernel.accumulate(
                of_queue, queries[queue_block.anchors.index], context.queued[0], queue_block.mask, context.products
            )
        if context.queued_weight is not None:
            of_queue.weigh(context.queued_weight)
    for block in blocks:
        _accumulate_block(sums[block.anchors.index], queries, live[block.keys.index], block, temperature, context)
    # Sums of different ranks can be added only when they are scaled to one maximum.
    if sums.running_max is not None:
        sums.rescale(context.exchange.all_reduce_max(sums.running_max))
    if sums.largest is not None:
        sums.largest.copy_(context.exchange.all_reduce_max(sums.largest))


def _accumulate_block(
    sums: SoftmaxSums, queries: Tensor, keys: Tensor, block: Block, temperature: Tensor | float, context: SoftmaxContext
) -> None:
    """Add the live ``keys`` of a block to the sums of its anchors."""
    largest = sums.largest
    # Logits are multiplied by 1 + alpha tau here: the largest is collected apart, and divided by that below.
    if block.hardness:
        sums = replace(sums, largest=None if largest is None else torch.full_like(largest, -torch.inf))
    scaled, mask = block.scaled(queries, temperature)
    context.kernel.accumulate(sums, scaled, keys, mask, context.products)
    if block.hardness and largest is not None and sums.largest is not None:
        torch.maximum(largest, sums.largest / (1 + block.hardness * temperature), out=largest)


def accumulate_hard(
    sums: SoftmaxSums,
    queries: Tensor,
    keys: Tensor,
    block: Block,
    temperature: Tensor | float,
    context: SoftmaxContext,
) -> None:
    r"""Add this rank's queued ``keys (k, d)``, so weighted, to the sums of the block's anchors (collective).

    Args:
        sums: of these anchors; nothing has been added to them yet. Their running maxima, where they have some, are at
            most :math:`-(\alpha + 1/\tau)` and become those of the weighted terms.
        queries: ``(N, d)``, all anchors divided by the temperature.
        keys: the queue of this rank.
        block: the anchors that see it, its mask, and the hardness :math:`\alpha`, which is above 0.
        temperature: :math:`\tau`.
        context: of the softmax.
    """
    exchange, kernel, products, hardness = context.exchange, context.kernel, context.products, block.hardness
    scale = hardness * temperature
    # A_i and K_i first, over all ranks: without them no weight is known.
    by_logits = block.mask is not None and (block.mask.limits is not None or bool(block.mask.known))
    proposal = SoftmaxSums(
        normaliser=torch.zeros_like(sums.normaliser),
        weighted_keys=None,
        running_max=None if sums.running_max is None else torch.full_like(sums.running_max, -hardness),
        count=torch.zeros_like(sums.normaliser) if by_logits else None,
    )
    kernel.accumulate(proposal, *_operands(block.at(queries, scale), keys), products)
    if proposal.running_max is not None:
        proposal.rescale(exchange.all_reduce_max(proposal.running_max))
    negatives = proposal.count
    # Where ids alone say it the number of negatives follows from them, and is not counted block by block.
    if negatives is None:
        negatives = torch.full_like(proposal.normaliser, float(len(keys)))
        if block.mask is not None and block.mask.ids is not None:
            negatives -= block.mask.ids.own_keys()
    negatives, total = exchange.all_reduce_sum(torch.stack([negatives, proposal.normaliser]))

    # Then B_i, in the sums of the loss, and w_ij = K_i B_i / A_i.
    kernel.accumulate(sums, *_operands(block.at(queries, 1 + scale), keys), products)
    if sums.largest is not None:
        sums.largest.div_(1 + scale)
    sums.weigh(negatives / total.clamp_min(torch.finfo(total.dtype).tiny))  # 0 / tiny: an anchor without any negative
    # Sums with the maxima r_B and r_A have a quotient with the maximum r_B - r_A.
    if sums.running_max is not None and proposal.running_max is not None:
        sums.running_max.sub_(proposal.running_max)


def _operands(scaled: tuple[Tensor, NegativeMask | None], keys: Tensor) -> tuple[Tensor, Tensor, NegativeMask | None]:
    """The arguments of a kernel for anchors and mask at one scale."""
    return scaled[0], keys, scaled[1]


def _live_gradient(
    queries: Tensor,
    lse: Tensor,
    live: Tensor,
    blocks: list[Block],
    temperature: Tensor | float,
    context: SoftmaxContext,
) -> Tensor:
    r"""The gradient of this rank's live keys from the anchors of all ranks, :math:`\frac1\tau \sum_i p_{ij} q_i`."""
    total = lse.new_zeros(live.shape)
    for block in blocks:
        scaled, mask = block.scaled(queries, temperature)
        part = context.kernel.key_gradient(
            scaled, live[block.keys.index], lse[block.anchors.index], mask, context.products
        )
        # The kernel multiplied by anchors scaled by 1 + alpha tau, but the hardness takes no gradient.
        total[block.keys.index] += part / (1 + block.hardness * temperature) if block.hardness else part
    return total * context.scale
