r"""InfoNCE of texts that are compared in a way of their own, exact over all ranks.

`info_nce` is of unit rows and their products. Here a row is whatever a representation makes of a text, always of one
width (the weights of words, several vectors one after another), and the similarity :math:`f` of two rows is any
function with a gradient:

.. math::
    x_i = \log \sum_{j \in \mathcal{N}(i)} e^{f(q_i, k_j) / \tau} - f(q_i, k_i^+) / \tau, \qquad
    L_i = \log(1 + e^{x_i}).

As there, anchors travel and keys stay: each rank compares the anchors of all ranks with its own keys, twice and in
blocks, so that memory holds the graph of one block. The first pass gives the sum over the keys of all ranks,
:math:`\ell_i`; the second one the gradient, with the weights :math:`\sigma(x_i) e^{f(q_i, k_j) / \tau} / (\ell_i \tau)`
of the negatives and :math:`-\sigma(x_i) / \tau` of the positive. ``backward`` has no collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast.exchange import Exchange
from capt.pretrain.contrast.info_nce import check_known, check_negatives, check_temperature
from capt.pretrain.contrast.masks import KnownPairs
from capt.pretrain.contrast.metrics import ContrastStats
from capt.pretrain.contrast.options import ContrastOptions
from capt.pretrain.contrast.queue import NO_ID

Similarity = Callable[[Tensor, Tensor], Tensor]
"""The similarity of each row of queries ``(m, w)`` with each of documents ``(n, w)``, as ``(m, n)``: the same for a
pair, whatever rows are beside it."""

_PAIRS = 1 << 14
"""Pairs of rows that are compared at a time: of several vectors each pair is a matrix."""


def product(queries: Float[Tensor, "m w"], documents: Float[Tensor, "n w"]) -> Float[Tensor, "m n"]:
    """The similarity of vectors."""
    return queries @ documents.T


def blockwise(similarity: Similarity) -> Similarity:
    """The similarity, computed in the memory of `_PAIRS` pairs at a time."""
    step = math.isqrt(_PAIRS)

    def compare(queries: Tensor, documents: Tensor) -> Tensor:
        rows = [
            torch.cat([similarity(part, each) for each in documents.split(step)], dim=1) for part in queries.split(step)
        ]
        return torch.cat(rows)

    return compare


def paired(similarity: Similarity, first: Float[Tensor, "n w"], second: Float[Tensor, "n w"]) -> Float[Tensor, " n"]:
    """The similarity of each row of ``first`` with the same row of ``second``: of a block the diagonal."""
    blocks = zip(first.split(32), second.split(32), strict=True)
    return torch.cat([similarity(one, other).diagonal() for one, other in blocks])


def similarity_nce(
    anchors: Float[Tensor, "n w"],
    positives: Float[Tensor, "n w"],
    similarity: Similarity,
    *,
    temperature: float | Float[Tensor, ""] | Float[Tensor, " n"],
    negatives: Float[Tensor, "k w"] | None = None,
    negative_ids: Tensor | None = None,
    negative_owners: Tensor | None = None,
    ids: Tensor | None = None,
    query_ids: Tensor | None = None,
    known: Tensor | None = None,
    group: distributed.Group = None,
    stats: ContrastStats | None = None,
    options: ContrastOptions | None = None,
    **changes: Any,
) -> Float[Tensor, ""]:
    """`info_nce` of queries and documents by ``similarity``: the form ``infonce``, without queue and widths.

    Args:
        anchors: a row for each query; all rows of all ranks have one width.
        positives: a row for each query's document.
        similarity: of queries with documents.
        temperature: a number, or one for each query; it takes no gradient.
        negatives: hard negatives; they and the arguments after them are as for `info_nce`.
        options: ``in_batch``, ``hard_negatives``, ``equal_rows`` and both reductions are read.

    Raises:
        ConfigError: a temperature that is not positive or that is learned, or arguments that do not fit each other.
    """
    options = replace(options or ContrastOptions(), **changes)
    check_temperature(temperature)
    check_known(len(anchors), ids, query_ids, known)
    check_negatives(anchors, negatives, negative_ids, negative_owners, ids, options)
    if isinstance(temperature, Tensor) and temperature.requires_grad:
        raise ConfigError("a similarity has no learned temperature: give a number")
    samples = Exchange.gather_counts(len(anchors), anchors.device, group, equal=options.equal_rows)
    # Other ranks' anchors are needed where this rank holds keys for them.
    exchange = samples if options.in_batch == "global" else samples.local()
    real, first = exchange.real_rows(anchors.device), sum(exchange.counts[: exchange.rank])
    # Places among the anchors of all ranks: of each, and of the one that each key belongs to (-1: nobody's).
    places = torch.arange(len(real), device=anchors.device)
    mine = places[first : first + len(anchors)]
    owners = [mine]
    keys = [mine if ids is None else ids]  # without ids every document is an instance of its own
    seen_by_all = [torch.full_like(mine, options.in_batch != "none", dtype=torch.bool)]
    if negatives is not None:
        nobody = mine.new_full((len(negatives),), -1)
        owners.append(nobody if negative_owners is None else (negative_owners + first).where(negative_owners >= 0, -1))
        keys.append(torch.full_like(nobody, NO_ID) if negative_ids is None else negative_ids)
        seen_by_all.append(torch.full_like(nobody, options.sees_all_hard_negatives, dtype=torch.bool))
    owner, key, shared = torch.cat(owners), torch.cat(keys), torch.cat(seen_by_all)
    instances = places if ids is None else exchange.all_gather(ids)[real]
    pairs = None
    if known is not None and query_ids is not None and len(known):
        pairs = KnownPairs.of(exchange.all_gather(query_ids)[real], key, known)

    def excluded(rows: slice) -> Tensor:
        """``(m, c)``, true where a key is no negative of the anchors ``rows``."""
        seen = (shared | (places[rows, None] == owner)) & (instances[rows, None] != key)
        return ~(seen if pairs is None else seen & pairs.block(rows, slice(None)).negative_mask.bool())

    dtype = torch.promote_types(anchors.dtype, torch.float32)
    tau = torch.as_tensor(temperature, dtype=dtype, device=anchors.device).expand(len(anchors))
    context = _Context(
        similarity, exchange, real, slice(first, first + len(anchors)), excluded,
        exchange.all_gather(tau)[real][:, None], options.sum_scale(samples), stats,
    )  # fmt: skip
    live = torch.cat([positives, negatives]) if negatives is not None else positives
    with torch.autocast(anchors.device.type, enabled=False):
        return _SimilaritySoftmax.apply(anchors.to(dtype), live.to(dtype), context)  # type: ignore[no-any-return]


class _Context(NamedTuple):
    """The inputs of the softmax that are not differentiable: ``real`` and ``mine`` are places of the gathered anchors,
    ``tau`` is a column of their temperatures.
    """

    similarity: Similarity
    exchange: Exchange
    real: Tensor
    mine: slice
    excluded: Callable[[slice], Tensor]
    tau: Tensor
    scale: float
    stats: ContrastStats | None

    def blocks(self, keys: int) -> Iterator[slice]:
        """The anchors of all ranks in blocks; none where there is no key."""
        step, count = max(1, _PAIRS // max(1, keys)), len(self.real) if keys else 0
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def logits(self, scores: Tensor, rows: slice) -> Tensor:
        """The logits of some anchors, -inf where a key is no negative."""
        return (scores / self.tau[rows]).masked_fill(self.excluded(rows), -torch.inf)

    def log_of_sum(self, values: Tensor) -> Tensor:
        """The logarithm of the sum over the ranks of terms whose logarithms are ``values``; -inf where all are."""
        largest = self.exchange.all_reduce_max(values).clamp_min(torch.finfo(values.dtype).min)
        return largest + self.exchange.all_reduce_sum((values - largest).exp()).log()


class _SimilaritySoftmax(torch.autograd.Function):
    """``forward`` computes the loss and both gradients; ``backward`` multiplies them by the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, anchors: Tensor, live: Tensor, context: _Context) -> Tensor:
        """The loss of this rank's ``anchors (n, w)`` against the keys of all ranks, ``live (c, w)`` on this one."""
        exchange, mine = context.exchange, context.mine
        queries = exchange.all_gather(anchors)[context.real]
        # 1. Sums over this rank's keys for all anchors: of the terms, and for diagnostics of their squares.
        sums = queries.new_full((3, len(queries)), -torch.inf)
        for rows in context.blocks(len(live)):
            logits = context.logits(context.similarity(queries[rows], live), rows)
            sums[:, rows] = torch.stack([logits.logsumexp(1), (2 * logits).logsumexp(1), logits.amax(1)])
        total = context.log_of_sum(sums[0].double())
        # 2. The owner of each anchor computes its loss, in float64: there is one number per anchor.
        tau = context.tau[mine, 0].double()
        positive = paired(context.similarity, anchors, live[: len(anchors)]).double() / tau
        margins = total[mine] - positive
        if context.stats is not None:
            squares, nearest = context.log_of_sum(sums[1].double())[mine], exchange.all_reduce_max(sums[2])[mine]
            # An anchor without negatives has found its positive, by a distance that means nothing.
            distance = torch.where(nearest.isfinite(), positive - nearest, 1.0) * tau
            effective = torch.where(squares.isfinite(), (2 * total[mine] - squares).exp(), 0.0)
            context.stats.update(torch.sigmoid(-margins), distance, effective)
        if any(ctx.needs_input_grad):
            # 3. The gradient by every similarity, block by block; that of the anchors goes back to their owners.
            weight = exchange.all_gather(torch.sigmoid(margins) * context.scale)[context.real][:, None] / context.tau
            of_queries, of_keys = _gradients(queries, live, total, weight, context)
            padded = anchors.new_zeros(max(exchange.counts) * len(exchange.counts), anchors.shape[1])
            padded[context.real] = of_queries
            by_owner = padded.unflatten(0, (len(exchange.counts), -1))
            own = distributed.reduce_scatter_sum(by_owner, exchange.group) if len(by_owner) > 1 else by_owner[0]
            ctx.save_for_backward(own[: len(anchors)], of_keys)
        return (torch.logaddexp(margins, torch.zeros_like(margins)).sum() * context.scale).to(anchors.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The saved gradients times that of the objective with respect to this loss."""
        return *(grad_output * grad for grad in ctx.saved_tensors), None


def _gradients(
    queries: Tensor, live: Tensor, total: Tensor, weight: Tensor, context: _Context
) -> tuple[Tensor, Tensor]:
    """The gradient of the loss of all anchors through this rank's keys: by the ``queries``, and by these keys."""
    of_queries, of_keys = torch.zeros_like(queries), torch.zeros_like(live)
    lowest = torch.finfo(total.dtype).min  # of an anchor without negatives: exp(-inf - lowest) is 0, and no NaN
    for rows in context.blocks(len(live)):
        q, k = queries[rows].detach().requires_grad_(), live.detach().requires_grad_()
        with torch.enable_grad():
            scores = context.similarity(q, k)
        share = (context.logits(scores.detach(), rows).double() - total[rows, None].clamp_min(lowest)).exp()
        # The positive of an anchor of this rank is the key of the same place.
        own = torch.arange(len(queries), device=q.device)[context.mine]
        own = own[(own >= rows.start) & (own < rows.stop)]
        share[own - rows.start, own - context.mine.start] -= 1
        gradients = torch.autograd.grad(scores, (q, k), (share * weight[rows]).to(scores.dtype))
        of_queries[rows], of_keys = gradients[0], of_keys + gradients[1]
    return of_queries, of_keys
