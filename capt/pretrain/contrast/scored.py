r"""Losses of pairs whose similarity is given as a number, exact over all ranks.

With the cosine :math:`c_i` of pair :math:`i`, its score :math:`y_i` and a temperature :math:`\tau`, CoSENT (Su 2022,
https://kexue.fm/archives/8847) asks of every two pairs of the batch that the one with the higher score has the higher
cosine, by how much does not matter:

.. math::
    L = \log \Big( 1 + \sum_{y_i < y_j} e^{(c_i - c_j) / \tau} \Big).

The sum over two pairs is one over pairs sorted by score, :math:`\sum_j e^{-c_j / \tau} \sum_{y_i < y_j} e^{c_i /
\tau}`, whose inner sums are running ones: :math:`O(N \log N)` for :math:`N` pairs and never a matrix. What travels is
two numbers a pair. Regression of the cosine is :math:`\frac1N \sum_i (c_i - y_i)^2`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast.exchange import Exchange
from capt.pretrain.contrast.info_nce import check_rows, check_temperature
from capt.pretrain.contrast.options import ContrastOptions
from capt.pretrain.contrast.queue import is_readable
from capt.pretrain.contrast.sharded import cut


def cosent_loss(
    first: Float[Tensor, "n d"],
    second: Float[Tensor, "n d"],
    scores: Float[Tensor, " n"],
    *,
    temperature: float | Float[Tensor, ""],
    group: distributed.Group = None,
    options: ContrastOptions | None = None,
    **changes: Any,
) -> Float[Tensor, ""]:
    r"""CoSENT over the pairs of all ranks of ``group``; of fewer than two different scores it is 0.

    Args:
        first: unit rows, the first text of each pair.
        second: unit rows; row ``i`` is the second text of pair ``i``.
        scores: similarity of each pair on any scale; only their order is read.
        temperature: :math:`\tau`; 1/20 is the scale of sentence-transformers.
        group: the ranks over which the batch is spread. They may hold different ``n``.
        options: ``grad_reduction``, ``equal_rows`` and the widths of ``matryoshka`` are read.
        changes: fields of the options that differ from ``options``.

    Raises:
        ConfigError: rows or scores that do not fit each other, or a temperature that is not positive.
    """
    options = replace(options or ContrastOptions(), **changes)
    check_temperature(temperature)
    _check_scores(first, second, scores)
    exchange = Exchange.gather_counts(len(first), first.device, group, equal=options.equal_rows)
    real = exchange.real_rows(first.device)
    # Stable, so that pairs of equal scores have one order on all ranks, and the sums one rounding.
    order = exchange.all_gather(scores.double())[real].argsort(stable=True)
    labels = exchange.all_gather(scores.double())[real][order]
    lower = torch.searchsorted(labels, labels)  # pairs of lower scores, which come first
    world = distributed.world_size(group)
    total = first.new_zeros((), dtype=torch.float64)
    for columns, weight in options.widths(first.shape[1]):
        own = (cut(first.double(), columns) * cut(second.double(), columns)).sum(1)
        own = world * own - (world - 1) * own.detach()  # every rank has the whole loss, and the part of its own rows
        # The collective carries no gradient: this rank's own cosines, which have a graph, replace their copies.
        cosines = exchange.all_gather(own.detach()).clone()
        cosines[exchange.local_rows] = own
        logits = cosines[real][order] / temperature
        total = total + weight * _log_one_plus(logits, lower)
    # Every rank returns the loss of all pairs: right where the engine averages, counted W times where it adds.
    scale = 1.0 if options.grad_reduction == "mean" else 1.0 / world
    return (scale * total).to(torch.promote_types(first.dtype, torch.float32))


def cosine_regression_loss(
    first: Float[Tensor, "n d"],
    second: Float[Tensor, "n d"],
    scores: Float[Tensor, " n"],
    *,
    group: distributed.Group = None,
    options: ContrastOptions | None = None,
    **changes: Any,
) -> Float[Tensor, ""]:
    """Mean squared difference of the cosine of a pair and its score, over the pairs of all ranks of ``group``.

    Args:
        first: unit rows, the first text of each pair.
        second: unit rows; row ``i`` is the second text of pair ``i``.
        scores: the cosine that each pair should have.
        group: the ranks over which the batch is spread. They may hold different ``n``.
        options: ``reduction``, ``grad_reduction``, ``equal_rows`` and the widths of ``matryoshka`` are read.
        changes: fields of the options that differ from ``options``.

    Raises:
        ConfigError: rows or scores that do not fit each other.
    """
    options = replace(options or ContrastOptions(), **changes)
    _check_scores(first, second, scores)
    exchange = Exchange.gather_counts(len(first), first.device, group, equal=options.equal_rows)
    dtype = torch.promote_types(first.dtype, torch.float32)
    total = first.new_zeros((), dtype=dtype)
    for columns, weight in options.widths(first.shape[1]):
        cosines = (cut(first.to(dtype), columns) * cut(second.to(dtype), columns)).sum(1)
        total = total + weight * (cosines - scores.to(dtype)).square().sum()
    return total * options.sum_scale(exchange)


def _log_one_plus(logits: Tensor, lower: Tensor) -> Tensor:
    """The logarithm of 1 plus the sum over pairs, of logits in the order of their scores."""
    # Place k is the log of the sum of the first k terms, and log 0 where there are none.
    running = torch.cat([logits.new_full((1,), -torch.inf), logits.logcumsumexp(0)]) if len(logits) else logits
    has_lower = lower > 0  # of the others the gradient of the sum of nothing would be nan
    terms = running[lower[has_lower]] - logits[has_lower]
    return torch.cat([terms, logits.new_zeros(1)]).logsumexp(0)


def _check_scores(first: Tensor, second: Tensor, scores: Tensor) -> None:
    check_rows(first, second, None, None, wait_for_values=False)
    if scores.shape != first.shape[:1]:
        raise ConfigError(f"scores are one number for each of {len(first)} pairs, got {tuple(scores.shape)}")
    if is_readable(scores) and not bool(scores.isfinite().all()):
        raise ConfigError("a score is not finite: leave out pairs without scores")
