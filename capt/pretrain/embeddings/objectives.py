"""Objectives of the discriminator: pure functions of scores. Tensors go in and a scalar in nats comes out."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

# How much each drawn negative counts.


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


# A pair is true or drawn: negative sampling and noise-contrastive estimation.
#
# Both minimise, over positive pairs with logits :math:`a` and negative pairs with logits :math:`\tilde a`,
#
# .. math:: L = -\sum_i w_i \log \sigma(a_i) - \sum_j \tilde w_j \log \sigma(-\tilde a_j)
#
# (Adversarial Contrastive Estimation, Eq. 4, with the sign for which the energies of Eq. 1 and the value function
# agree: the sum over negatives is minimised as the sum over positives is). They differ in the logits: for negative
# sampling these are the scores themselves, and NCE subtracts the logarithm of the density that the negatives come
# from.


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


# Max-margin estimation with drawn negatives (Adversarial Contrastive Estimation, Sec. 2.1).
#
# The structural hinge asks that the true output beats every other by its cost:
#
# .. math:: \max_{\hat y}\{\Delta(y, \hat y) + s(x, \hat y)\} - s(x, y)
#
# ACE puts the negatives of a learned sampler in place of the argmax. Eq. 2 and 3 of the paper differ in sign: with
# :math:`\tilde e = -\Delta - s`, the loss-augmented argmax of Eq. 2 is the arg*min* of :math:`\tilde e`. This is Eq.
# 2.


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
