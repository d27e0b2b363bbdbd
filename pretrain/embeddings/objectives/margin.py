r"""Max-margin estimation with drawn negatives (Adversarial Contrastive Estimation, Sec. 2.1).

The structural hinge asks that the true output beats every other by its cost:

.. math:: \max_{\hat y}\{\Delta(y, \hat y) + s(x, \hat y)\} - s(x, y)

ACE puts the negatives of a learned sampler in place of the argmax. Eq. 2 and 3 of the paper differ in sign: with
:math:`\tilde e = -\Delta - s`, the loss-augmented argmax of Eq. 2 is the arg*min* of :math:`\tilde e`. This is Eq. 2.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def margin_loss(
    positive: Float[Tensor, "*rows"],
    negative: Float[Tensor, "*rows k"],
    cost: Float[Tensor, "*rows k"] | float,
    weights: Float[Tensor, "*rows k"] | None = None,
) -> Float[Tensor, ""]:
    r"""The sum over pairs and their negatives of :math:`w \max(0, \Delta + s(x, \hat y) - s(x, y))`.

    The hinge at 0 is the true output itself, which belongs to the outputs that Eq. 2 maximises over: its cost is 0.

    Args:
        positive: scores of true pairs.
        negative: scores of the negatives of each pair.
        cost: :math:`\Delta(y, \hat y) \ge 0`, for words one number: the margin.
        weights: how much each negative counts; 0 for those that are masked.
    """
    hinge = torch.relu(augmented(negative, cost) - positive[..., None])
    return hinge.sum() if weights is None else (hinge.masked_fill(weights == 0, 0.0) * weights).sum()


def augmented(scores: Float[Tensor, "*shape"], cost: Float[Tensor, "*shape"] | float) -> Float[Tensor, "*shape"]:
    r""":math:`\Delta + s`: what loss-augmented inference maximises, and the reward of a sampler in its place."""
    return scores + cost
