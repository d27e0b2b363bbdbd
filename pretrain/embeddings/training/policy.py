"""The update of the generator from the negatives that the discriminator has just been trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from pretrain.embeddings.config import EmbeddingJob
from pretrain.embeddings.sampler.reinforce import (
    entropy_rewards,
    fixed_score_gradient,
    importance_weights,
    score_gradient,
)
from pretrain.embeddings.sampler.reward import RewardStatistics, leave_one_out_mean
from pretrain.embeddings.sampler.softmax import gather_ragged
from pretrain.embeddings.sampler.window import Draws
from pretrain.embeddings.tables import EmbeddingTables
from pretrain.embeddings.training.contrast import Scores, noise_share, reward
from pretrain.embeddings.training.skipgram import Band
from pretrain.engine import distributed
from pretrain.engine.engines.base import Engine
from pretrain.engine.task import StepMetrics


@dataclass(frozen=True)
class Played:
    """What the discriminator has said of the negatives of an update, before it was moved.

    Attributes:
        band: centres, noise and weights.
        draws: the generator's words for each centre.
        scores: of the negatives, first the noise of each block, then the draws.
        weights: how much each counts in the discriminator's loss.
        log_density: of what NCE's negatives come from.
        log_generator: log-probabilities of the generator, of the draws or of all words that were scored.
        log_noise: of the noise words in the fixed noise.
    """

    band: Band
    draws: Draws
    scores: Float[Tensor, "b c k"]
    weights: Scores
    log_density: Scores | None
    log_generator: Scores | None
    log_noise: Float[Tensor, "b n"]


def update_generator(job: EmbeddingJob, engine: Engine, discriminator: EmbeddingTables, played: Played) -> StepMetrics:
    """Descend the generator's loss, a mean over the pairs of all ranks, once. All ranks call this together."""
    section, m = job.generator, played.draws.words.shape[1]
    pairs = played.band.neighbour.sum(2).flatten()
    total = distributed.all_reduce_sum(pairs.sum()).clamp_min(1.0)
    rewards = _rewards(job, played)
    own, noise = rewards[:, -m:], rewards[:, :-m]
    counts = (played.weights.negative.flatten(0, 1)[:, -m:] > 0).to(own.dtype) if noise_share(job) < 1 else None
    weight = pairs[:, None].expand_as(own) / (m * total)
    weight = weight if counts is None else weight * counts
    statistics = RewardStatistics.of(own, weight)
    normalised = statistics.normalise(own, section.temperature) if section.normalise else own
    baseline = _baseline(job, discriminator, played, statistics, normalised, weight)
    assert played.log_generator is not None
    log_g = played.log_generator.negative.flatten(0, 1)
    advantages = normalised - baseline
    if section.entropy:
        bonus = entropy_rewards(log_g[:, -m:], played.draws.entropy, section.entropy, section.entropy_words)
        coefficients = weight * advantages + bonus * pairs[:, None] / (m * total)
    else:
        coefficients = weight * advantages
    of_noise = None
    if section.importance and noise.shape[1]:
        share = noise_share(job)
        ratio = importance_weights(log_g[:, :-m], _per_centre(played.log_noise, played.band), section.importance_clip)
        paid = statistics.normalise(noise, section.temperature) if section.normalise else noise
        level = (weight * baseline).sum() / weight.sum().clamp_min(1e-12)
        fixed = share * ratio * (paid - level) * (pairs[:, None] / (noise.shape[1] * total))
        of_noise, to_draws = fixed_score_gradient(fixed, m)
        gradient = score_gradient((1 - share) * coefficients) + to_draws
    else:
        gradient = score_gradient(coefficients)
    _descend(engine, played, gradient, of_noise)
    return _metrics(played, statistics, normalised, weight, log_g[:, -m:], advantages, pairs / total)


def _rewards(job: EmbeddingJob, played: Played) -> Float[Tensor, "n k"]:
    density = None if played.log_density is None else played.log_density.negative.flatten(0, 1)
    return reward(job, played.scores.flatten(0, 1), density)


def _per_centre(values: Float[Tensor, "b n"], band: Band) -> Float[Tensor, "c n"]:
    return values[:, None].expand(-1, band.centres.shape[1], -1).flatten(0, 1)


def _baseline(
    job: EmbeddingJob,
    discriminator: EmbeddingTables,
    played: Played,
    statistics: RewardStatistics,
    rewards: Float[Tensor, "n m"],
    weights: Float[Tensor, "n m"],
) -> Float[Tensor, "n m"]:
    match job.generator.baseline:
        case "none":
            return torch.zeros_like(rewards)
        case "constant":
            return torch.full_like(rewards, 0.5)
        case "batch_mean":
            return leave_one_out_mean(rewards, weights)
        case "self_critical":
            with torch.no_grad():
                x = discriminator.rows("input", played.band.centres.flatten())
                y = discriminator.rows("context", played.draws.greedy)
            greedy = reward(job, (x * y).sum(1), None)
            if job.generator.normalise:
                greedy = statistics.normalise(greedy, job.generator.temperature)
            return greedy[:, None].expand_as(rewards)


def _descend(
    engine: Engine, played: Played, gradient: Float[Tensor, "n m"], of_noise: Float[Tensor, "n k"] | None
) -> None:
    tables = engine.module
    assert isinstance(tables, EmbeddingTables)
    band, (n, m) = played.band, gradient.shape
    x = tables.rows("input", band.centres.flatten())
    y = tables.rows("context", played.draws.words.flatten()).view(n, m, -1)
    scores, slopes = [(y @ x[..., None])[..., 0]], [gradient]
    if of_noise is not None:
        noise: Int64[Tensor, "b k"] = band.columns[:, band.neighbour.shape[2] :]
        rows = tables.rows("context", noise.flatten()).view(*noise.shape, -1)
        scores.append((x.unflatten(0, band.centres.shape) @ rows.mT).flatten(0, 1))
        slopes.append(of_noise)
    torch.autograd.backward(scores, slopes)
    tables.apply_gradients(engine)


def _metrics(
    played: Played,
    statistics: RewardStatistics,
    rewards: Float[Tensor, "n m"],
    weights: Float[Tensor, "n m"],
    log_generator: Float[Tensor, "n m"],
    advantages: Float[Tensor, "n m"],
    share: Float[Tensor, " n"],
) -> StepMetrics:
    """Figures of the generator, over all ranks: each is the same on every rank."""
    sums = torch.stack([
        (weights * rewards).sum(), weights.sum(), -(weights * advantages * log_generator).sum(),
        (share * played.draws.entropy).sum(),
    ])  # fmt: skip
    paid, counted, loss, entropy = distributed.all_reduce_sum(sums.double()).tolist()
    real = played.band.neighbour.sum(2).flatten() > 0
    every = gather_ragged(played.draws.words[real].flatten())[0]
    return {
        "generator_loss": loss,
        "generator_reward": statistics.mean,
        "penalty": -paid / counted if counted else math.nan,
        "generator_entropy": entropy,
        "distinct_rate": len(torch.unique(every)) / max(len(every), 1),
    }
