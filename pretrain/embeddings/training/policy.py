"""The update of the generator from the negatives that the discriminator has just been trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from pretrain.base import distributed
from pretrain.embeddings.config import EmbeddingJob
from pretrain.embeddings.sampler.reinforce import (
    entropy_rewards,
    fixed_score_gradient,
    importance_weights,
    score_gradient,
)
from pretrain.embeddings.sampler.reward import RewardStatistics, leave_one_out_mean
from pretrain.embeddings.sampler.window import Draws
from pretrain.embeddings.tables import EmbeddingTables
from pretrain.embeddings.training.contrast import Scores, noise_share, reward
from pretrain.embeddings.training.skipgram import Band
from pretrain.engine.callbacks.agreement import TrainingDivergedError
from pretrain.engine.engines.base import Engine


@dataclass(frozen=True)
class Played:
    """What the discriminator has said of the negatives of an update, before it was moved.

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
    """What the generator is paid for its draws; each centre counts by its pairs, over all ranks 1 together.

    In float64: rewards that lie close together are normalised, and must differ by more than their rounding.

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
        TrainingDivergedError: a score of the discriminator is no number, on all ranks.
    """
    section, m = job.generator, played.draws.words.shape[1]
    pairs = played.band.neighbour.sum(2).flatten().double()
    total = distributed.all_reduce_sum(pairs.sum()).clamp_min(1.0)
    share = pairs / total
    weights = (share[:, None] / m).expand(-1, m)
    if played.masked is not None:
        weights = weights.masked_fill(played.masked, 0.0)
    density = None if played.log_density is None else played.log_density.negative.flatten(0, 1).double()
    rewards = reward(job, played.scores.flatten(0, 1).double(), density)
    statistics = RewardStatistics.of(rewards[:, -m:], weights)
    if not math.isfinite(statistics.mean):
        raise TrainingDivergedError(
            "the discriminator has diverged: its scores are no numbers; resume from the last checkpoint with a lower "
            f"optimizer.lr (it is {job.optimizer.lr:g}) or optimizer.clip=1.0"
        )
    if section.normalise:
        rewards = statistics.normalise(rewards, section.temperature)
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
            greedy = statistics.normalise(greedy, section.temperature) if section.normalise else greedy
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
        ratio = importance_weights(log_g[:, :-m], _per_centre(played.log_noise, played.band), section.importance_clip)
        advantages = outcome.noise_rewards - outcome.baseline.mean(1, keepdim=True)
        fixed = lam * ratio * advantages * (outcome.share[:, None] / k)
        of_noise, of_draws = fixed_score_gradient(fixed, m)
        gradient = score_gradient((1 - lam) * coefficients) + of_draws
    if section.entropy:
        # in float64: of rows that are nearly uniform the two are nearly equal
        log_draws, entropy = log_g[:, -m:].double(), played.draws.entropy.double()
        bonus = entropy_rewards(log_draws, entropy, section.entropy, section.entropy_words)
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
