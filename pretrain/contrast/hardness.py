r"""Queued negatives weighted by how near they are to the anchor, exact over the shards of the queue.

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

import torch
from torch import Tensor

from pretrain.contrast.exchange import Exchange
from pretrain.contrast.kernels.products import Products
from pretrain.contrast.kernels.protocol import InstanceIds, Kernel, SoftmaxSums


def accumulate_hard(
    sums: SoftmaxSums,
    queries: Tensor,
    keys: Tensor,
    ids: InstanceIds | None,
    *,
    hardness: float,
    temperature: Tensor | float,
    exchange: Exchange,
    kernel: Kernel,
    products: Products,
) -> None:
    r"""Add this rank's queued ``keys (k, d)``, so weighted, to the sums of all anchors (collective).

    Args:
        sums: nothing has been added to them yet. Their running maxima, where they have some, are at most
            :math:`-(\alpha + 1/\tau)` and become those of the weighted terms.
        queries: ``(N, d)``, the anchors divided by the temperature.
        ids: of anchors and keys; a key with the anchor's id is no negative.
        hardness: :math:`\alpha`, above 0.
        temperature: :math:`\tau`.
        exchange: the ranks that hold the queue.
        kernel: the arithmetic.
        products: its precision.
    """
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
