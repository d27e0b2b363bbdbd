r"""Distillation of vectors: a teacher's vector of every text of the batch, exact over all ranks.

With the student's vector :math:`s_i` of text :math:`i` (in the teacher's space: projected where the widths differ) and
the teacher's :math:`t_i`, over the :math:`N` texts of all ranks,

.. math::
    L_\mathrm{cosine} = \frac1N \sum_i (1 - \cos(s_i, t_i)), \qquad
    L_\mathrm{mse} = \frac1{N d} \sum_i \|s_i - t_i\|^2 .

The listwise loss compares no vector with another space's, but how a text lies among the others of the batch: with the
cosines :math:`c_{ij}` of the student, :math:`g_{ij}` of the teacher, and a temperature for each,

.. math::
    p_{ij} = \frac{e^{g_{ij} / T}}{\sum_{k \ne i} e^{g_{ik} / T}}, \qquad
    r_{ij} = \frac{e^{c_{ij} / \tau}}{\sum_{k \ne i} e^{c_{ik} / \tau}}, \qquad
    L_\mathrm{listwise} = \frac1N \sum_i \sum_{j \ne i} p_{ij} \log \frac{p_{ij}}{r_{ij}} ,

whose gradient with respect to :math:`c_{ij}` is :math:`(r_{ij} - p_{ij}) / (N \tau)`. Anchors travel with their teacher
rows, and keys stay: each rank compares the texts of all ranks with its own ones, in blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cosine_similarity, normalize

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast.exchange import Exchange
from capt.pretrain.contrast.info_nce import check_temperature
from capt.pretrain.contrast.options import ContrastOptions
from capt.pretrain.contrast.sharded import cut

_BLOCK = 1 << 22
"""Cosines in memory at a time."""


def cosine_distance_loss(
    rows: Float[Tensor, "n d"],
    teacher: Float[Tensor, "n e"],
    *,
    group: distributed.Group = None,
    options: ContrastOptions | None = None,
    **changes: Any,
) -> Float[Tensor, ""]:
    r"""Mean of :math:`1 - \cos(s_i, t_i)` over the texts of all ranks of ``group``, which may hold different numbers.

    Args:
        rows: the student's vectors, of any length.
        teacher: the teacher's.
        group: the ranks over which the batch is spread.
        options: ``reduction``, ``grad_reduction`` and ``equal_rows`` are read, and the widths of ``matryoshka``, to
            which both sides are cut.
        changes: fields of the options that differ from ``options``.

    Raises:
        ConfigError: rows that do not fit each other.
    """

    def distances(own: Tensor, its: Tensor, weight: float) -> Tensor:
        return weight * (1 - cosine_similarity(own, its, dim=1, eps=1e-12)).sum()

    return _mean_distance(rows, teacher, distances, group, replace(options or ContrastOptions(), **changes))


def squared_distance_loss(
    rows: Float[Tensor, "n d"],
    teacher: Float[Tensor, "n e"],
    *,
    group: distributed.Group = None,
    options: ContrastOptions | None = None,
    **changes: Any,
) -> Float[Tensor, ""]:
    """Mean squared difference of the two vectors, over columns and the texts of all ranks; as `cosine_distance_loss`.

    Both are as long as they are: what the teacher's length says of a text is learnt too.
    """

    def distances(own: Tensor, its: Tensor, weight: float) -> Tensor:
        return weight / own.shape[1] * (own - its).square().sum()

    return _mean_distance(rows, teacher, distances, group, replace(options or ContrastOptions(), **changes))


def _mean_distance(
    rows: Tensor, teacher: Tensor, distances: Callable[[Tensor, Tensor, float], Tensor], group: distributed.Group,
    options: ContrastOptions,
) -> Tensor:  # fmt: skip
    """The mean over the texts of all ranks; ``distances`` is the sum over this rank's, at one width and its weight."""
    _check(rows, teacher, same_width=True)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_zeros((), dtype=dtype)
    for columns, weight in options.widths(rows.shape[1]):
        total = total + distances(rows[:, columns].to(dtype), teacher[:, columns].to(dtype), weight)
    exchange = Exchange.gather_counts(len(rows), rows.device, group, equal=options.equal_rows)
    return total * options.sum_scale(exchange)


def listwise_loss(
    rows: Float[Tensor, "n d"],
    teacher: Float[Tensor, "n e"],
    *,
    temperature: float,
    teacher_temperature: float | None = None,
    group: distributed.Group = None,
    options: ContrastOptions | None = None,
    **changes: Any,
) -> Float[Tensor, ""]:
    r"""Mean of :math:`\mathrm{KL}(p_i \,\|\, r_i)` over the texts of all ranks of ``group``; of one text alone it is 0.

    Args:
        rows: the student's vectors; they need not be as wide as the teacher's.
        teacher: the teacher's.
        temperature: :math:`\tau`.
        teacher_temperature: :math:`T`; None: that of the student.
        group: as for `cosine_distance_loss`.
        options: the same; the student alone is cut to the widths of ``matryoshka``.
        changes: the same.

    Raises:
        ConfigError: rows that do not fit each other, or a temperature that is not positive.
    """
    options = replace(options or ContrastOptions(), **changes)
    _check(rows, teacher, same_width=False)
    above = temperature if teacher_temperature is None else teacher_temperature
    check_temperature(temperature)
    check_temperature(above)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    exchange = Exchange.gather_counts(len(rows), rows.device, group, equal=options.equal_rows)
    own = normalize(teacher.to(dtype), dim=1)
    sides = (own, exchange.all_gather(own))
    total = rows.new_zeros((), dtype=dtype)
    for columns, weight in options.widths(rows.shape[1]):
        unit = cut(normalize(rows.to(dtype), dim=1), columns)
        # Autocast would multiply in 16 bits, which is coarse beside a temperature of 0.02.
        with torch.autocast(rows.device.type, enabled=False):
            total = total + weight * _Listwise.apply(unit, *sides, exchange, temperature, above)
    scale = 1.0 if options.grad_reduction == "mean" else 1.0 / distributed.world_size(group)
    if options.reduction == "mean":
        scale /= max(1, sum(exchange.counts))
    return total * scale


class _Listwise(torch.autograd.Function):
    """The sum over the texts of all ranks, the same on every rank; the gradient is right in the mean over them."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, teacher: Tensor, teachers: Tensor, exchange: Exchange, tau: float, above: float
    ) -> Tensor:
        anchors = exchange.all_gather(rows)
        world, most = len(exchange.counts), max(exchange.counts)
        real = torch.zeros(len(anchors), dtype=torch.bool, device=rows.device)
        real[exchange.real_rows(rows.device)] = True
        own = torch.arange(len(rows), device=rows.device) + exchange.local_rows.start
        step = max(1, _BLOCK // max(1, len(rows)))

        def logits(block: slice) -> tuple[Tensor, Tensor]:
            """The student's and the teacher's logits of some anchors with this rank's texts, none with itself."""
            same = torch.arange(block.start, min(block.stop, len(anchors)), device=rows.device)[:, None] == own
            pairs = ((anchors, rows, tau), (teachers, teacher, above))
            return tuple(  # type: ignore[return-value]
                ((left[block] @ right.T) / by).masked_fill(same, -torch.inf) for left, right, by in pairs
            )

        blocks = [slice(start, start + step) for start in range(0, len(anchors), step)]
        sums = torch.stack(
            [torch.cat([_logsumexp(each) for each in side]) for side in zip(*map(logits, blocks), strict=True)]
        )
        largest = exchange.all_reduce_max(sums)
        largest = torch.where(largest.isfinite(), largest, 0.0)  # an anchor that no rank has a key for
        sums = largest + exchange.all_reduce_sum((sums - largest).exp()).log()
        loss, gradient = rows.new_zeros(()), torch.zeros_like(rows)
        of_anchors = torch.zeros_like(anchors)
        for block in blocks:
            log_r, log_p = (each - log[block, None] for each, log in zip(logits(block), sums, strict=True))
            keep = real[block, None] & log_p.isfinite() & log_r.isfinite()
            p = log_p.exp().where(keep, 0.0)
            loss += (p * (log_p - log_r).where(keep, 0.0)).sum()
            slope = (log_r.exp().where(keep, 0.0) - p) / tau
            gradient += slope.T @ anchors[block]
            of_anchors[block] = slope @ rows
        if world == 1:
            gradient += of_anchors
        else:
            totals = distributed.reduce_scatter_sum(of_anchors.unflatten(0, (world, most)), exchange.group)
            gradient += totals[: len(rows)]
        ctx.save_for_backward(world * gradient)
        return exchange.all_reduce_sum(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return grad * gradient, None, None, None, None, None


def _logsumexp(logits: Tensor) -> Tensor:
    """The log of a sum for each row, of no key -inf."""
    return logits.logsumexp(1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)


def _check(rows: Tensor, teacher: Tensor, *, same_width: bool) -> None:
    if len(rows) != len(teacher) or (same_width and rows.shape[1] != teacher.shape[1]):
        raise ConfigError(
            f"vectors of {tuple(rows.shape)} and a teacher's of {tuple(teacher.shape)}: one of each for every text"
            + (", of one width" if same_width else "")
        )
