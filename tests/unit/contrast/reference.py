r"""The oracle of the sharded loss, on one process in float64: the paper's equations term by term, and all together.

Neither is for training. The first form is slow and obviously right. The second is exact even where the first loses its
digits, and autograd through it is the oracle of every gradient test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def capt_loss_by_terms(
    s: Float[Tensor, "n d"], s_hat: Float[Tensor, "n d"], temperature: float, queue: Float[Tensor, "k d"]
) -> Float[Tensor, ""]:
    """Eq. 4, the sum over samples of Eq. 2 and Eq. 3 with the queue in both denominators, one term at a time."""
    s, s_hat, queue = s.double(), s_hat.double(), queue.double()
    total = torch.zeros((), dtype=torch.float64)
    for own, other in ((s, s_hat), (s_hat, s)):
        for i in range(len(s)):
            numerator = torch.exp(own[i] @ other[i] / temperature)
            denominator = torch.zeros((), dtype=torch.float64)
            for j in range(len(s)):
                denominator = denominator + torch.exp(own[i] @ other[j] / temperature)
                if j != i:
                    denominator = denominator + torch.exp(own[i] @ own[j] / temperature)
            for row in queue:
                denominator = denominator + torch.exp(own[i] @ row / temperature)
            total = total - torch.log(numerator / denominator)
    return total


def capt_gradient_by_terms(
    s: Float[Tensor, "n d"], s_hat: Float[Tensor, "n d"], temperature: float, i: int
) -> Float[Tensor, " d"]:
    """Eq. 5: the gradient of Eq. 2, for sample ``i``, with respect to its anchor alone."""
    s, s_hat = s.double(), s_hat.double()
    others = [j for j in range(len(s)) if j != i]
    positive = torch.exp(s[i] @ s_hat[i] / temperature)
    z = sum((torch.exp(s[i] @ s_hat[j] / temperature) for j in others), positive)
    z = sum((torch.exp(s[i] @ s[j] / temperature) for j in others), z)
    total = (positive - z) * s_hat[i]
    for j in others:
        total = (
            total + torch.exp(s[i] @ s[j] / temperature) * s[j] + torch.exp(s[i] @ s_hat[j] / temperature) * s_hat[j]
        )
    return total / (temperature * z)


def info_nce_dense(
    anchors: Float[Tensor, "m d"],
    positives: Float[Tensor, "m d"],
    keys: Float[Tensor, "c d"],
    is_negative: Bool[Tensor, "m c"],
    temperature: float | Float[Tensor, ""],
    weights: Float[Tensor, "#m c"] | None = None,
) -> Float[Tensor, " m"]:
    r"""The loss of each anchor against all ``keys`` where ``is_negative``, as :math:`\log(1 + e^x)`.

    Each key counts ``weights`` times (None: once), for each anchor or for all of them alike.

    :math:`x` is the log-sum-exp of the negatives minus the positive's logit, so that neither value nor gradient is a
    difference of nearly equal numbers.
    """
    logits = (anchors @ keys.T / temperature).masked_fill(~is_negative, -torch.inf)
    logits = logits if weights is None else logits + weights.log()
    margins = torch.logsumexp(logits, 1) - (anchors * positives).sum(1) / temperature
    return torch.logaddexp(margins, torch.zeros_like(margins))


def capt_loss_dense(
    s: Float[Tensor, "n d"],
    s_hat: Float[Tensor, "n d"],
    temperature: float | Float[Tensor, ""],
    queue: Float[Tensor, "k d"],
    ids: Int[Tensor, " n"] | None = None,
    queue_ids: Int[Tensor, " k"] | None = None,
    queue_weight: float = 1.0,
) -> Float[Tensor, ""]:
    """Eq. 4 over all rows together. With ``ids`` and ``queue_ids``, keys of the anchor's instance are not negatives.

    Every row of the queue counts ``queue_weight`` times.
    """
    rows, partners = torch.cat([s, s_hat]), torch.cat([s_hat, s])
    instances = torch.arange(len(s)) if ids is None else ids
    instances = torch.cat([instances, instances])
    live = instances[:, None] != instances[None, :]
    if ids is None or queue_ids is None:
        queued = torch.ones(len(rows), len(queue), dtype=torch.bool)
    else:
        queued = instances[:, None] != queue_ids[None, :]
    keys = torch.cat([rows, queue])
    weights = torch.cat([torch.ones(len(rows)), torch.full((len(queue),), queue_weight, dtype=torch.float64)])
    return info_nce_dense(rows, partners, keys, torch.cat([live, queued], 1), temperature, weights[None]).sum()


def effective_negatives_by_terms(
    anchors: Float[Tensor, "m d"],
    keys: Float[Tensor, "c d"],
    is_negative: Bool[Tensor, "m c"],
    temperature: float,
    weights: Float[Tensor, "m c"] | None = None,
) -> list[float]:
    """The effective number of negatives of each anchor (:func:`capt.pretrain.contrast.metrics.effective_number`)."""
    numbers = []
    for i, anchor in enumerate(anchors.detach().double()):
        total = squares = 0.0
        for j, key in enumerate(keys.detach().double()):
            if is_negative[i, j]:
                weight = 1.0 if weights is None else float(weights[i, j])
                term = weight * math.exp(float(anchor @ key) / temperature)
                total, squares = total + term, squares + term * term
        numbers.append(total * total / squares if squares else 0.0)
    return numbers


def hard_weights_by_terms(
    anchors: Float[Tensor, "m d"], keys: Float[Tensor, "k d"], is_negative: Bool[Tensor, "m k"], hardness: float
) -> Float[Tensor, "m k"]:
    """Weight of each queued key for each anchor (:mod:`capt.pretrain.contrast.sharded`), one at a time, as
    numbers; 1 where it is not a negative.
    """
    weights = torch.ones(is_negative.shape, dtype=torch.float64)
    for i, anchor in enumerate(anchors.detach().double()):
        cosines = {j: float(anchor @ key) for j, key in enumerate(keys.detach().double()) if is_negative[i, j]}
        nearest = max(cosines.values(), default=0.0)
        total = sum(math.exp(hardness * (cosine - nearest)) for cosine in cosines.values())
        for j, cosine in cosines.items():
            weights[i, j] = len(cosines) * math.exp(hardness * (cosine - nearest)) / total
    return weights


def drifted_queue_by_terms(
    pushed: Sequence[Float[Tensor, "n d"]], live: Float[Tensor, "m d"], capacity: int, *, scale: bool
) -> Float[Tensor, "k d"]:
    """The newest ``capacity`` rows of the steps ``pushed``, each moved from the statistics of its own step to those of
    the live rows (and scaled, with ``scale``), one row and one feature at a time (:mod:`capt.pretrain.contrast.queue`).
    """
    mean_now, deviations_now = _moments_by_terms(live)
    out = []
    for rows in pushed:
        mean, deviations = _moments_by_terms(rows)
        for row in rows.double():
            moved = torch.empty_like(row)
            for j in range(len(row)):
                factor = deviations_now[j] / deviations[j] if scale else 1.0
                moved[j] = (row[j] - mean[j]) * factor + mean_now[j]
            out.append(moved / moved.square().sum().sqrt())
    return torch.stack(out)[-capacity:]


def _moments_by_terms(rows: Float[Tensor, "n d"]) -> tuple[list[float], list[float]]:
    """Mean and deviation of each feature, the latter at least a tenth of their root mean square."""
    columns = rows.double().T.tolist()
    means = [sum(column) / len(column) for column in columns]
    variances = [
        sum((x - mean) ** 2 for x in column) / len(column) for column, mean in zip(columns, means, strict=True)
    ]
    least = 0.1 * (sum(variances) / len(variances)) ** 0.5
    return means, [max(variance**0.5, least) for variance in variances]
