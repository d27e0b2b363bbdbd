"""How much each drawn negative counts."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def self_adversarial_weights(
    scores: Float[Tensor, "*rows k"], alpha: float, weights: Float[Tensor, "*rows k"]
) -> Float[Tensor, "*rows k"]:
    r"""Softmax of the discriminator's own scores over the drawn negatives, with the total weight kept.

    .. math:: w'_j = \Big(\sum_l w_l\Big) \frac{w_j \exp(\alpha s_j)}{\sum_l w_l \exp(\alpha s_l)}

    (Sun et al. 2019, RotatE, Eq. 5, times the number of negatives, so that :math:`\alpha \to 0` is the plain sum).
    It is importance sampling from :math:`P_n(y) \exp(\alpha s(x, y))`: harder negatives without a generator. No
    gradient flows through the weights.

    Args:
        scores: of the negatives that compete with each other, in the last dimension.
        alpha: inverse temperature.
        weights: what each would count without this; 0 for those that are masked. A row of zeros stays so.
    """
    with torch.no_grad():
        logits = (alpha * scores).masked_fill(weights == 0, -torch.inf) + weights.log()
        shares = torch.softmax(logits, dim=-1)
        return torch.where(weights > 0, shares * weights.sum(-1, keepdim=True), 0.0)
