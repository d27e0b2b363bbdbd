r"""Distillation: a teacher's scores of a query's own candidates, as a distribution that the cosines follow.

The candidates :math:`C_i` of query :math:`q_i` are its positive and its hard negatives. With the teacher's scores
:math:`t_{ij}` (of a cross encoder, say), its temperature :math:`T`, and the temperature :math:`\tau` of the contrast,

.. math::
    p_{ij} = \frac{e^{t_{ij} / T}}{\sum_{j' \in C_i} e^{t_{ij'} / T}}, \qquad
    r_{ij} = \frac{e^{q_i \cdot k_j / \tau}}{\sum_{j' \in C_i} e^{q_i \cdot k_{j'} / \tau}}, \qquad
    L_i = \mathrm{KL}(p_i \,\|\, r_i) = \sum_{j \in C_i} p_{ij} \log \frac{p_{ij}}{r_{ij}} .

The candidates of a query are on its rank, so nothing but the numbers of rows travels, and a query may have any number
of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast.exchange import Exchange
from capt.pretrain.contrast.info_nce import check_rows, check_temperature, compute_dtype
from capt.pretrain.contrast.options import ContrastOptions
from capt.pretrain.contrast.queue import is_readable
from capt.pretrain.contrast.sharded import cut


def distillation_loss(
    anchors: Float[Tensor, "n d"],
    positives: Float[Tensor, "n d"],
    negatives: Float[Tensor, "k d"],
    *,
    negative_owners: Int[Tensor, " k"],
    positive_scores: Float[Tensor, " n"],
    negative_scores: Float[Tensor, " k"],
    temperature: float | Float[Tensor, ""] | Float[Tensor, " n"],
    teacher_temperature: float = 1.0,
    group: distributed.Group = None,
    options: ContrastOptions | None = None,
    **changes: Any,
) -> Float[Tensor, ""]:
    r"""Mean of :math:`\mathrm{KL}(p_i \,\|\, r_i)` over the queries of all ranks.

    Args:
        anchors: unit rows, the queries.
        positives: unit rows; row ``i`` is the positive of query ``i``.
        negatives: unit rows, the hard negatives of this rank's queries.
        negative_owners: the query of this rank that each is a candidate of.
        positive_scores: the teacher's score of each query's positive, on any scale.
        negative_scores: the teacher's score of each hard negative with its query.
        temperature: :math:`\tau`, or one for each query.
        teacher_temperature: :math:`T`.
        group: the ranks over which the batch is spread.
        options: ``reduction``, ``grad_reduction``, ``equal_rows`` and the widths of ``matryoshka`` are read.
        changes: fields of the options that differ from ``options``.

    Raises:
        ConfigError: rows, owners or scores that do not fit each other, or a temperature that is not positive.
    """
    options = replace(options or ContrastOptions(), **changes)
    check_temperature(temperature)
    check_temperature(teacher_temperature)
    check_rows(anchors, positives, negatives, None, wait_for_values=False)
    _check_candidates(len(anchors), len(negatives), negative_owners, positive_scores, negative_scores)
    # No key of another rank is multiplied here, so `precision` has no say; fp32 is right for float64 rows as well.
    dtype = compute_dtype(anchors, positives, "fp32")
    samples = Exchange.gather_counts(len(anchors), anchors.device, group, equal=options.equal_rows)

    # All candidates in one list, the positives first, each with its query: queries may have different numbers of them.
    owners = torch.cat([torch.arange(len(anchors), device=anchors.device), negative_owners])
    teacher = torch.cat([positive_scores, negative_scores]).to(dtype) / teacher_temperature
    log_p = _log_softmax(teacher, owners, len(anchors))
    total = anchors.new_zeros((), dtype=dtype)
    for columns, weight in options.widths(anchors.shape[1]):
        q, d, h = (cut(rows.to(dtype), columns) for rows in (anchors, positives, negatives))
        cosines = torch.cat([(q * d).sum(1), (q[negative_owners] * h).sum(1)])
        tau = temperature[owners] if isinstance(temperature, Tensor) and temperature.ndim else temperature
        log_r = _log_softmax(cosines / tau, owners, len(anchors))
        total = total + weight * (log_p.exp() * (log_p - log_r)).sum()
    return total * options.sum_scale(samples)


def _log_softmax(logits: Tensor, owners: Tensor, n: int) -> Tensor:
    """Log-softmax over the candidates of each of ``n`` queries, whatever their numbers."""
    # Less the largest logit of each query, so that no exponential overflows; a constant shift has no gradient.
    largest = logits.new_full((n,), -math.inf).scatter_reduce(0, owners, logits.detach(), "amax")
    shifted = logits - largest[owners]
    normaliser = logits.new_zeros(n).index_add(0, owners, shifted.exp())
    return shifted - normaliser.log()[owners]


def _check_candidates(n: int, k: int, owners: Tensor, positive_scores: Tensor, negative_scores: Tensor) -> None:
    if owners.shape != (k,) or owners.dtype != torch.int64:
        raise ConfigError(f"negative_owners is one int64 number for each of {k} negatives, got {tuple(owners.shape)}")
    if positive_scores.shape != (n,) or negative_scores.shape != (k,):
        raise ConfigError(
            f"scores are one number for each of {n} positives and {k} negatives, got {tuple(positive_scores.shape)} "
            f"and {tuple(negative_scores.shape)}"
        )
    if not is_readable(owners):
        return
    if k and not 0 <= int(owners.min()) <= int(owners.max()) < n:
        raise ConfigError(f"negative_owners are rows of the anchors, 0 to {n - 1}: every candidate belongs to a query")
    if not bool(torch.cat([positive_scores, negative_scores]).isfinite().all()):
        raise ConfigError("a score of the teacher is not finite: leave out rows without scores")
