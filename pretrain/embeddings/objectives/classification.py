r"""A pair is true or drawn: negative sampling and noise-contrastive estimation.

Both minimise, over positive pairs with logits :math:`a` and negative pairs with logits :math:`\tilde a`,

.. math:: L = -\sum_i w_i \log \sigma(a_i) - \sum_j \tilde w_j \log \sigma(-\tilde a_j)

(Adversarial Contrastive Estimation, Eq. 4, with the sign for which the energies of Eq. 1 and the value function agree:
the sum over negatives is minimised as the sum over positives is). They differ in the logits: for negative sampling
these are the scores themselves, and NCE subtracts the logarithm of the density that the negatives come from.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def classification_loss(
    positive: Float[Tensor, ...],
    negative: Float[Tensor, ...],
    positive_weights: Float[Tensor, ...] | None = None,
    negative_weights: Float[Tensor, ...] | None = None,
) -> Float[Tensor, ""]:
    r"""The sum of :math:`w\,\mathrm{softplus}(-a)` and of :math:`\tilde w\,\mathrm{softplus}(\tilde a)`, in nats.

    Args:
        positive: logits of true pairs, of any shape.
        negative: logits of drawn pairs, of any shape; where negatives are shared, weights keep their expected number.
        positive_weights: as ``positive``; 0 for what is no pair. Without it all count 1.
        negative_weights: as ``negative``.
    """
    return _weighted_sum(F.softplus(-positive), positive_weights) + _weighted_sum(
        F.softplus(negative), negative_weights
    )


def nce_logits(scores: Float[Tensor, ...], log_noise: Float[Tensor, ...], number: int) -> Float[Tensor, ...]:
    r""":math:`s - \log(K\,P_n)`: the log-odds of a true pair against :math:`K` draws from :math:`P_n`.

    With them the minimum of the loss is :math:`s(x, y) = \log P(y | x)`, a normalised model (Gutmann and Hyvarinen
    2010, JMLR 13).

    Args:
        scores: of pairs (x, y).
        log_noise: :math:`\log P_n(y | x)` of the same pairs, for positives and negatives alike.
        number: :math:`K`, negatives of each positive pair.
    """
    return scores - (log_noise + math.log(number))


def mixture_log_density(
    log_noise: Float[Tensor, ...], log_generator: Float[Tensor, ...], mixture: float
) -> Float[Tensor, ...]:
    r""":math:`\log(\lambda P_{nce} + (1 - \lambda) P_\theta)`, exact, as the generator's softmax is known (Sec. 2.2).

    Args:
        log_noise: log-density of the fixed noise.
        log_generator: log-density of the generator.
        mixture: :math:`\lambda`, the part of the noise; at 1 and at 0 only one density counts, even where it is 0.
    """
    if mixture == 1:
        return log_noise.expand_as(torch.broadcast_tensors(log_noise, log_generator)[0])
    if mixture == 0:
        return log_generator.expand_as(torch.broadcast_tensors(log_noise, log_generator)[0])
    return torch.logaddexp(log_noise + math.log(mixture), log_generator + math.log1p(-mixture))


def _weighted_sum(values: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return values.sum()
    # what has weight 0 may hold infinite scores
    return (values.masked_fill(weights == 0, 0.0) * weights).sum()
