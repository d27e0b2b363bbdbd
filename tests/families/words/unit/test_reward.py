"""Rewards, their normalisation and baselines, against literal loops."""

from __future__ import annotations

import math

import pytest
import torch

from capt.pretrain.embeddings.policy import RewardStatistics, leave_one_out_mean, rewards_of


def test_forms() -> None:
    logits = torch.tensor([-2.0, 0.0, 3.0], requires_grad=True)
    probabilities = [1 / (1 + math.exp(-a)) for a in logits.tolist()]
    assert rewards_of(logits, "probability").tolist() == pytest.approx(probabilities)
    assert rewards_of(logits, "softplus").tolist() == pytest.approx([-math.log(1 - p) for p in probabilities])
    assert rewards_of(logits, "identity").tolist() == logits.tolist()
    assert not rewards_of(logits, "probability").requires_grad


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_normalisation_is_the_papers(temperature: float) -> None:
    rewards = torch.tensor([0.1, 0.4, 0.35, 0.9])
    mean = sum(rewards.tolist()) / 4
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards.tolist()) / 4)
    want = [1 / (1 + math.exp(-(r - mean) / deviation / temperature)) for r in rewards.tolist()]
    got = RewardStatistics.of(rewards, torch.ones(4)).normalise(rewards, temperature)
    assert got.tolist() == pytest.approx(want, rel=1e-5)


def test_rewards_that_hardly_differ_have_their_own_deviation() -> None:
    """The mean of squares less the square of the mean is 0, or 1e-8 of rounding."""
    rewards = 0.5 + 1e-10 * torch.arange(3, dtype=torch.float64)
    assert RewardStatistics.of(rewards, torch.full((3,), 0.1)).deviation == pytest.approx(
        1e-10 * (2 / 3) ** 0.5, rel=1e-4
    )


def test_the_mean_of_equal_rewards_is_exact() -> None:
    """Its error, divided by a deviation of nearly nothing, would move every normalised reward."""
    weights = (torch.rand(2048, 1, generator=torch.Generator().manual_seed(0)).double() / 7).expand(-1, 3)
    rewards = torch.full((2048, 9), 0.5, dtype=torch.float64)[:, -3:]
    statistics = RewardStatistics.of(rewards, weights)
    assert (statistics.mean, statistics.deviation) == (0.5, 0.0)


def test_masked_samples_do_not_count() -> None:
    rewards, weights = torch.tensor([1.0, 2.0, 100.0]), torch.tensor([1.0, 1.0, 0.0])
    assert RewardStatistics.of(rewards, weights) == RewardStatistics(1.5, 0.5)
    assert leave_one_out_mean(rewards, weights).tolist() == [2.0, 1.0, 1.5]


def test_equal_rewards_are_one_half_and_a_single_one_has_no_baseline() -> None:
    rewards = torch.full((3,), 0.25)
    assert RewardStatistics.of(rewards, torch.ones(3)).normalise(rewards, 0.5).tolist() == pytest.approx([0.5] * 3)
    assert leave_one_out_mean(torch.ones(1), torch.ones(1)).tolist() == [0.0]
