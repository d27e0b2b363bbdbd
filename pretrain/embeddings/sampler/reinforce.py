r"""The gradient of the generator's loss with respect to its scores, from the words that were drawn and no others.

The generator maximises :math:`J = \sum_x P(x) \sum_y G(y | x)\, r(x, y)`. With scores :math:`g` and
:math:`\nabla \log G(y | x) = \nabla g(x, y) - \mathbb{E}_{G}[\nabla g(x, \cdot)]`, REINFORCE (Williams 1992; Eq. 7 of
the paper) is a covariance,

.. math:: \nabla J = \mathrm{E}_x\, \mathrm{Cov}_{y \sim G(\cdot | x)}\big(r(x, y),\, \nabla g(x, y)\big),

and the covariance of the draws of one centre is an unbiased estimate of it. It moves the rows of the drawn words alone:
no gradient as large as the table, and no second product with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from capt.pretrain.base import distributed

# Which generated negatives are true neighbours of the centre: known pairs that are not negatives.


def is_neighbour(drawn: Int64[Tensor, "n m"], nearby: Int64[Tensor, "n w"]) -> Bool[Tensor, "n m"]:
    """Whether each word drawn for a centre is one of ``nearby``: the words in its window (-1 where there is none).

    The window is the whole one and not the one that the centre has drawn, so it holds all positives and some more.
    """
    found: Bool[Tensor, "n m"] = (drawn[:, :, None] == nearby[:, None, :]).any(-1)
    return found


def score_gradient(coefficients: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    r"""Gradient of :math:`-\sum_j c_j \log G(y_j | x)` with respect to the scores of the draws, ``m`` for each centre.

    :math:`\mathbb{E}_G[\nabla g]` is replaced, for each draw, by the mean over the *other* draws of its centre:
    :math:`\partial L / \partial g_j = -\frac{1}{m - 1}\big(m\,c_j - \sum_l c_l\big)`. It is unbiased where
    :math:`c_j` depends on draw j, on other centres and on numbers fixed in advance. It is computed from
    :math:`c_j - c_1`, so that equal coefficients give exactly 0 and no rounding, which Adam would scale up.

    Args:
        coefficients: :math:`c_j = w_j (r_j - b_j)`; 0 for draws that are masked.
    """
    m = coefficients.shape[1]
    assert m > 1, "the covariance needs two draws of each centre"
    differences = coefficients - coefficients[:, :1]
    return -(m * differences - differences.sum(1, keepdim=True)) / (m - 1)


def fixed_score_gradient(
    coefficients: Float[Tensor, "n k"], draws: int
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n draws"]]:
    r"""The same for words that were *not* drawn from the generator, with importance weights in :math:`c_j`.

    Args:
        coefficients: of the words from the fixed noise.
        draws: how many words were drawn from the generator for each centre; they represent its expectation.

    Returns:
        the gradients with respect to the scores of the noise words and of the generator's draws.
    """
    share = coefficients.sum(1, keepdim=True) / draws
    return -coefficients, share.expand(-1, draws)


def importance_weights(
    log_generator: Float[Tensor, "*shape"], log_noise: Float[Tensor, "*shape"], clip: float
) -> Float[Tensor, "*shape"]:
    r""":math:`\min(P_\theta(y | x) / P_{nce}(y), c)`: with it samples of the noise train the generator (end of Sec. 2).

    Unclipped the estimate is unbiased; the clip bounds its variance and biases it towards words that both propose.
    """
    return (log_generator - log_noise).detach().clamp_max(math.log(clip)).exp()


def entropy_rewards(
    log_generator: Float[Tensor, "n m"], entropy: Float[Tensor, " n"], weight: float, words: int
) -> Float[Tensor, "n m"]:
    r"""What is added to the advantages so that :math:`\beta \max(0, \log k - H(G(\cdot | x)))` is descended as well.

    As :math:`\nabla H = -\mathrm{Cov}_{y \sim G}(\log G(y | x), \nabla g(x, y))`, the entropy is a reward of
    :math:`-\log G - H`, in rows of less entropy than that of ``words`` equal words.

    Args:
        log_generator: :math:`\log G` of the draws.
        entropy: :math:`H` of each centre's row, in nats.
        weight: :math:`\beta`.
        words: :math:`k`.
    """
    active = weight * (entropy < math.log(words)).to(log_generator.dtype)
    return -active[:, None] * (log_generator + entropy[:, None]).detach()


# What the generator is paid for a negative, and what is subtracted from it.
#
# The reward is *plus* the discriminator's output: the generator minimises the value that the discriminator maximises,
# so it is paid for negatives that pass for true pairs. This is what Eq. 7 of the paper descends; its text, "the
# negative of the discriminator's output", names the penalty, and read literally would drive the generator to easy
# words.


EPSILON = 1e-8
"""Added to the deviation: rewards that are all equal become 0.5."""


def rewards_of(
    logits: Float[Tensor, "*shape"], form: Literal["probability", "softplus", "identity"]
) -> Float[Tensor, "*shape"]:
    r"""The reward of negatives that the discriminator gives ``logits``; no gradient flows back.

    Args:
        logits: what the objective's sigmoid is taken of; for the margin objective cost plus score.
        form: ``probability`` is :math:`D = \sigma(a)`; ``softplus`` is :math:`-\log(1 - D)`, what the negative adds to
            the discriminator's loss; ``identity`` is for objectives without a sigmoid.
    """
    logits = logits.detach()
    match form:
        case "probability":
            return torch.sigmoid(logits)
        case "softplus":
            return F.softplus(logits)
        case "identity":
            return logits


@dataclass(frozen=True)
class RewardStatistics:
    """Mean and deviation of the rewards of an update, over all ranks.

    The deviation is that of the differences from the mean. The mean square less the square of the mean would be 1e-8
    for rewards of 0.5 that are all equal, and of rewards that differ by less its rounding would become the rewards.
    """

    mean: float
    deviation: float

    @classmethod
    def of(cls, rewards: Float[Tensor, ...], weights: Float[Tensor, ...]) -> RewardStatistics:
        """Measure them (in float64; all ranks call this). ``weights`` are 0 for samples that do not count."""
        r, w = rewards.double(), weights.double().contiguous()  # both sums in one order: the mean of equals is exact
        counted, paid = distributed.all_reduce_sum(torch.stack([w.sum(), (w * r).sum()])).tolist()
        total = max(counted, EPSILON)
        mean = paid / total
        squares = distributed.all_reduce_sum((w * (r - mean).square()).sum())
        return cls(mean, (float(squares) / total) ** 0.5)

    def normalise(self, rewards: Float[Tensor, "*shape"], temperature: float) -> Float[Tensor, "*shape"]:
        r""":math:`\sigma\big((r - \mathrm{mean}) / (\mathrm{deviation} + \epsilon) / T\big)`, within 0 and 1 (Sec. 3).

        The paper's "temperature .5" divides.
        """
        return torch.sigmoid((rewards - self.mean) / ((self.deviation + EPSILON) * temperature))


def leave_one_out_mean(rewards: Float[Tensor, "*shape"], weights: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """For each sample the weighted mean of all *other* rewards, over all ranks: a baseline without a bias.

    The mean of all would hold the sample's own reward, and shrink the gradient by the sample's share.
    """
    r, w = rewards.double(), weights.double()
    total, sum_ = distributed.all_reduce_sum(torch.stack([w.sum(), (w * r).sum()])).unbind()
    others = total - w
    mean = torch.where(others > EPSILON, (sum_ - w * r) / others.clamp_min(EPSILON), 0.0)
    return mean.to(rewards.dtype)
