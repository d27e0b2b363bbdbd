r"""What the generator is paid for a negative, and what is subtracted from it.

The reward is *plus* the discriminator's output: the generator minimises the value that the discriminator maximises, so
it is paid for negatives that pass for true pairs. This is what Eq. 7 of the paper descends; its text, "the negative of
the discriminator's output", names the penalty, and read literally would drive the generator to easy words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pretrain.base import distributed

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
