r"""Learning of the generator: rewards, the gradient of its loss from the drawn words alone, and its update.

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
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.embeddings.config import EmbeddingJob
from capt.pretrain.embeddings.generator import Draws
from capt.pretrain.embeddings.objectives import (
    augmented,
    classification_loss,
    margin_loss,
    nce_logits,
    self_adversarial_weights,
)
from capt.pretrain.embeddings.skipgram import Band
from capt.pretrain.embeddings.tables import EmbeddingTables
from capt.pretrain.engine.callbacks.agreement import TrainingDivergedError
from capt.pretrain.engine.engines.base import Engine

MOST_IMPORTANT = 10.0
"""The largest importance weight."""
ENTROPY_WORDS = 100
"""With ``generator.entropy`` the generator is pushed up while it is below the entropy of this many equal words."""

# Which generated negatives are true neighbours of the centre: known pairs that are not negatives.


def is_neighbour(drawn: Int64[Tensor, "n m"], nearby: Int64[Tensor, "n w"]) -> Bool[Tensor, "n m"]:
    """Return whether each drawn word is in ``nearby``, the words of its centre's window (-1 where there is none).

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
    r"""Return what to add to the advantages so that :math:`\beta \max(0, \log k - H(G(\cdot | x)))` is descended as
    well.

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


# The discriminator's loss for any sampler, weights and objective, as a function of its scores.
#
# The negatives of a centre :math:`x_i` with :math:`c_i` neighbours are the ``shared`` noise words of its block and
# ``samples`` words from the generator, with weights that make them :math:`\lambda K` and :math:`(1 - \lambda) K` for
# each pair: an average of the mixture of section 2.2 in place of draws from it.


@dataclass(frozen=True)
class Scores:
    """Something about every pair of a band: scores, weights or log-densities.

    ``noise`` and ``generated`` are side by side in ``negative``, in this order.
    """

    positive: Float[Tensor, "b c w"]
    negative: Float[Tensor, "b c k"]


def noise_share(job: EmbeddingJob) -> float:
    """Lambda: the part of the negatives that comes from the noise."""
    return {"noise": 1.0, "generator": 0.0, "mixture": job.negatives.mixture}[job.negatives.sampler]


def reweighted(job: EmbeddingJob, scores: Scores, weights: Scores) -> Scores:
    """The weights with which pairs enter the loss: of self-adversarial negatives those of the scores, else the same."""
    if job.negatives.weights != "self_adversarial":
        return weights
    negative = self_adversarial_weights(scores.negative.detach(), job.negatives.alpha, weights.negative)
    return Scores(weights.positive, negative)


def discriminator_loss(
    job: EmbeddingJob, scores: Scores, weights: Scores, log_density: Scores | None
) -> Float[Tensor, ""]:
    """The sum over this rank's pairs, in nats (for the margin objective in units of the score).

    Args:
        job: which objective.
        scores: the discriminator's, with a graph.
        weights: 1 or 0 of positives; of negatives how much each counts (`reweighted`).
        log_density: log of the density that negatives are drawn from, for ``nce``.
    """
    if job.objective.type == "margin":
        return _margin(job, scores, weights.positive, weights.negative)
    logits = _logits(job, scores, log_density)
    return classification_loss(logits.positive, logits.negative, weights.positive, weights.negative)


def curvatures(
    x: Float[Tensor, "b c d"], y: Float[Tensor, "b k d"], drawn: Float[Tensor, "b c m d"] | None, weights: Scores
) -> tuple[Float[Tensor, "b c"], Float[Tensor, "b k"], Float[Tensor, "b c m"] | None]:
    r"""Upper bounds of the curvature of a loss of log-sigmoids along each row, without graph.

    :math:`h_i = \frac14 \sum_j w_{ij} |y_j|^2` over the pairs of row :math:`x_i`, and likewise along rows of columns.

    Args:
        x: rows of the centres.
        y: rows of the columns of each block.
        drawn: rows of each centre's own negatives, which are last in the weights.
        weights: those of the loss.
    """
    with torch.no_grad():
        together = torch.cat([weights.positive, weights.negative], dim=2)
        shared, own = together[:, :, : y.shape[1]], together[:, :, y.shape[1] :]
        of_x, of_y = (rows.square().sum(-1) / 4 for rows in (x, y))
        along_y = (shared.mT @ of_x[..., None])[..., 0]
        along_x = (shared @ of_y[..., None])[..., 0]
        if drawn is None:
            return along_x, along_y, None
        return along_x + (own * drawn.square().sum(-1) / 4).sum(2), along_y, own * of_x[..., None]


def reward(
    job: EmbeddingJob, scores: Float[Tensor, "*shape"], log_density: Float[Tensor, "*shape"] | None
) -> Float[Tensor, "*shape"]:
    """The generator's reward for negatives with these scores, before it is normalised."""
    if job.objective.type == "margin":
        return rewards_of(augmented(scores, job.objective.margin), "identity")
    logits = scores if log_density is None else nce_logits(scores, log_density, job.negatives.number)
    return rewards_of(logits, "probability" if job.generator.reward == "d" else "softplus")


def _logits(job: EmbeddingJob, scores: Scores, log_density: Scores | None) -> Scores:
    if log_density is None:
        return scores
    number = job.negatives.number
    return Scores(
        nce_logits(scores.positive, log_density.positive, number),
        nce_logits(scores.negative, log_density.negative, number),
    )


def _margin(job: EmbeddingJob, scores: Scores, neighbour: Tensor, weights: Tensor) -> Float[Tensor, ""]:
    """Every pair against the negatives of its centre, whose weights are those of all pairs of the centre together."""
    block, centre, column = torch.nonzero(neighbour, as_tuple=True)
    pairs = neighbour.sum(2, keepdim=True).clamp_min(1.0)
    return margin_loss(
        scores.positive[block, centre, column],
        scores.negative[block, centre],
        job.objective.margin,
        (weights / pairs)[block, centre],
    )


@dataclass(frozen=True)
class Played:
    """Scores of the negatives of an update by the discriminator before it was moved, and what belongs to them.

    Attributes:
        band: centres, noise and weights.
        draws: the generator's words for each centre.
        scores: of the negatives, first the noise of each block, then the draws.
        masked: which draws are words of their centre's window, where that is looked for.
        log_density: of what NCE's negatives come from, at every word that was scored.
        log_density_of_greedy: the same at the generator's most probable word for each centre.
        log_generator: log-probabilities of the generator, of the draws or of all words that were scored.
        log_noise: of the noise words in the fixed noise.
    """

    band: Band
    draws: Draws
    scores: Float[Tensor, "b c k"]
    masked: Bool[Tensor, "n m"] | None
    log_density: Scores | None
    log_density_of_greedy: Float[Tensor, " n"] | None
    log_generator: Scores
    log_noise: Float[Tensor, "b n"]


@dataclass(frozen=True)
class Outcome:
    """Rewards of the generator for its draws; each centre counts by its pairs, over all ranks 1 together.

    Computed in float64, because rewards that are close together must still differ after they are normalised.

    Attributes:
        statistics: of the rewards before they are normalised.
        rewards: of the draws, normalised.
        noise_rewards: of the noise words, with the same statistics.
        baseline: what is subtracted.
        weights: how much each draw counts; 0 for false negatives and padding.
        share: how much each centre counts.
        pairs: on all ranks.
    """

    statistics: RewardStatistics
    rewards: Float64[Tensor, "n m"]
    noise_rewards: Float64[Tensor, "n k"]
    baseline: Float64[Tensor, "n m"]
    weights: Float64[Tensor, "n m"]
    share: Float64[Tensor, " n"]
    pairs: Float64[Tensor, ""]


def judge(job: EmbeddingJob, discriminator: EmbeddingTables, played: Played) -> Outcome:
    """Reward the draws. All ranks call this together.

    Raises:
        TrainingDivergedError: a score of the discriminator is not a number, on all ranks.
    """
    section, m = job.generator, played.draws.words.shape[1]
    pairs = played.band.neighbour.sum(2).flatten().double()
    total = distributed.all_reduce_sum(pairs.sum()).clamp_min(1.0)
    # Every pair of all ranks has one share; padding and known pairs have the weight 0.
    share = pairs / total
    weights = (share[:, None] / m).expand(-1, m)
    if played.masked is not None:
        weights = weights.masked_fill(played.masked, 0.0)
    density = None if played.log_density is None else played.log_density.negative.flatten(0, 1).double()
    rewards = reward(job, played.scores.flatten(0, 1).double(), density)
    # The draws alone make the statistics; the noise, which is before them, is scaled by the same.
    statistics = RewardStatistics.of(rewards[:, -m:], weights)
    if not math.isfinite(statistics.mean):
        raise TrainingDivergedError(
            "the discriminator has diverged: its scores are not numbers; resume from the last checkpoint with a lower "
            f"optimizer.lr (it is {job.optimizer.lr:g}) or optimizer.clip=1.0"
        )
    rewards = statistics.normalise(rewards, section.temperature)
    # What is subtracted from the reward: it changes the variance of the estimate, not its expectation.
    own = rewards[:, -m:]
    match section.baseline:
        case "none":
            baseline = torch.zeros_like(own)
        case "constant":
            baseline = torch.full_like(own, 0.5)
        case "batch_mean":
            baseline = leave_one_out_mean(own, weights)
        case "self_critical":
            greedy = reward(job, _greedy_scores(discriminator, played), played.log_density_of_greedy)
            greedy = statistics.normalise(greedy, section.temperature)
            baseline = greedy[:, None].expand_as(own)
    return Outcome(statistics, own, rewards[:, :-m], baseline, weights, share, total)


def _greedy_scores(discriminator: EmbeddingTables, played: Played) -> Float64[Tensor, " n"]:
    with torch.no_grad():
        x = discriminator.rows("input", played.band.centres.flatten())
        y = discriminator.rows("context", played.draws.greedy)
        return (x.double() * y.double()).sum(1)


def update_generator(job: EmbeddingJob, engine: Engine, played: Played, outcome: Outcome) -> None:
    """Descend the generator's loss, a sum over the pairs of all ranks, once. All ranks call this together.

    As a mean its gradients would be as small as what optimizers add to their divisors.
    """
    section, m = job.generator, played.draws.words.shape[1]
    log_g = played.log_generator.negative.flatten(0, 1)
    coefficients = outcome.weights * (outcome.rewards - outcome.baseline)
    if not section.importance:
        gradient, of_noise = score_gradient(coefficients), None
    else:
        lam, k = noise_share(job), outcome.noise_rewards.shape[1]
        # Words of the noise take the place of draws of the generator, each weighted by G / noise.
        ratio = importance_weights(log_g[:, :-m], _per_centre(played.log_noise, played.band), MOST_IMPORTANT)
        advantages = outcome.noise_rewards - outcome.baseline.mean(1, keepdim=True)
        fixed = lam * ratio * advantages * (outcome.share[:, None] / k)
        of_noise, of_draws = fixed_score_gradient(fixed, m)
        # Noise and draws are two estimates of one gradient, mixed as the negatives are.
        gradient = score_gradient((1 - lam) * coefficients) + of_draws
    if section.entropy:
        # in float64: of rows that are nearly uniform the two are nearly equal
        log_draws, entropy = log_g[:, -m:].double(), played.draws.entropy.double()
        bonus = entropy_rewards(log_draws, entropy, section.entropy, ENTROPY_WORDS)
        gradient = gradient + score_gradient(bonus * (outcome.share[:, None] / m))
    _descend(engine, played, gradient * outcome.pairs, None if of_noise is None else of_noise * outcome.pairs)


def _per_centre(values: Float[Tensor, "b n"], band: Band) -> Float[Tensor, "c n"]:
    return values[:, None].expand(-1, band.centres.shape[1], -1).flatten(0, 1)


def _descend(
    engine: Engine, played: Played, gradient: Float64[Tensor, "n m"], of_noise: Float64[Tensor, "n k"] | None
) -> None:
    tables = engine.module
    assert isinstance(tables, EmbeddingTables)
    band, (n, m) = played.band, gradient.shape
    x = tables.rows("input", band.centres.flatten())
    y = tables.rows("context", played.draws.words.flatten()).unflatten(0, (n, m))
    scores, slopes = [(y @ x[..., None])[..., 0]], [gradient.to(x.dtype)]
    if of_noise is not None:
        noise: Int64[Tensor, "b k"] = band.columns[:, band.neighbour.shape[2] :]
        rows = tables.rows("context", noise.flatten()).unflatten(0, noise.shape)
        scores.append((x.unflatten(0, band.centres.shape) @ rows.mT).flatten(0, 1))
        slopes.append(of_noise.to(x.dtype))
    # The gradients by the scores are known: no loss has to be formed.
    torch.autograd.backward(scores, slopes)
    tables.apply_gradients(engine)


def metrics_of(played: Played, outcome: Outcome, vocabulary: int) -> dict[str, float]:
    """Figures of the generator over all ranks, the same on every rank, which all call this.

    ``generator_loss`` is the mean of :math:`-(r - b) \\log G`, ``penalty`` the mean of minus the normalised reward (the
    paper's figures 3, 6 and 9), ``generator_reward`` that of the reward before it is normalised, ``generator_entropy``
    that of the softmax rows in nats; ``distinct_rate`` is the number of different words among the draws, by what it
    could be: the number of draws or of words.
    """
    m = outcome.rewards.shape[1]
    log_g = played.log_generator.negative.flatten(0, 1)[:, -m:]
    loss = -(outcome.weights * (outcome.rewards - outcome.baseline) * log_g).sum()
    sums = [(outcome.weights * outcome.rewards).sum(), outcome.weights.sum(), loss]
    sums.append((outcome.share * played.draws.entropy).sum())
    paid, counted, loss_, entropy = distributed.all_reduce_sum(torch.stack(sums).double()).tolist()
    words = distributed.gather_ragged(played.draws.words[outcome.share > 0].flatten())[0]
    return {
        "generator_loss": loss_,
        "generator_reward": outcome.statistics.mean,
        "penalty": -paid / counted if counted else math.nan,
        "generator_entropy": entropy,
        "distinct_rate": len(torch.unique(words)) / max(1, min(len(words), vocabulary)),
    }
