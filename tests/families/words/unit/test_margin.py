"""The hinge against a literal loop; max-margin ACE on sequences, whose loss-augmented argmax is known."""

from __future__ import annotations

import itertools

import pytest
import torch

from capt.pretrain.embeddings.objectives import augmented, margin_loss
from capt.pretrain.embeddings.policy import rewards_of, score_gradient

LENGTH = 4
OUTPUTS = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=LENGTH)), dtype=torch.float64)
"""Every sequence of four signs."""


def test_loss_is_the_literal_sum() -> None:
    draw = torch.Generator().manual_seed(0)
    positive, negative = torch.randn(4, generator=draw), torch.randn(4, 3, generator=draw)
    cost, weights = torch.rand(4, 3, generator=draw), torch.rand(4, 3, generator=draw)
    want = sum(
        float(weights[i, j]) * max(0.0, float(cost[i, j]) + float(negative[i, j]) - float(positive[i]))
        for i in range(4)
        for j in range(3)
    )
    assert float(margin_loss(positive, negative, cost, weights)) == pytest.approx(want, rel=1e-6)


def _scores(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A chain: each sign with its input, and with the sign before it. ``x [n 4]`` gives ``[n 16]``."""
    pairwise = (OUTPUTS[:, 1:] * OUTPUTS[:, :-1]).sum(1)
    return weights[0] * x @ OUTPUTS.T + weights[1] * pairwise


def _hamming(truth: torch.Tensor) -> torch.Tensor:
    return (OUTPUTS[truth][:, None] != OUTPUTS[None]).double().sum(-1)


def _loss_augmented_argmax(weights: torch.Tensor, x: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """By dynamic programming over the chain, as a structural SVM would do it: no output is enumerated."""
    found = []
    for row, number in zip(x.tolist(), truth.tolist(), strict=True):
        gold = OUTPUTS[number].tolist()
        unary, pair = float(weights[0]), float(weights[1])
        best: dict[float, tuple[float, list[float]]] = {}
        for place in range(LENGTH):
            step: dict[float, tuple[float, list[float]]] = {}
            for sign in (-1.0, 1.0):
                own = unary * row[place] * sign + (sign != gold[place])
                ways = [(total + pair * sign * last, path) for last, (total, path) in best.items()] or [(0.0, [])]
                total, path = max(ways)
                step[sign] = (total + own, [*path, sign])
            best = step
        _, path = max(best.values())
        found.append(next(i for i, output in enumerate(OUTPUTS.tolist()) if output == path))
    return torch.tensor(found)


def _train_sampler(weights: torch.Tensor, x: torch.Tensor, truth: torch.Tensor, sign: float) -> torch.Tensor:
    """The logits of a sampler for each input, after REINFORCE with the reward cost + score times ``sign``."""
    draw = torch.Generator().manual_seed(1)
    logits = torch.zeros(len(x), len(OUTPUTS), dtype=torch.float64)
    cost, scores = _hamming(truth), _scores(weights, x)
    for _ in range(600):
        column = torch.multinomial(logits.softmax(1), 64, replacement=True, generator=draw)
        rewards = sign * rewards_of(augmented(scores, cost).gather(1, column), "identity")
        logits.scatter_add_(1, column, -0.3 * score_gradient(rewards / 64))
    return logits


def test_sampler_takes_the_place_of_loss_augmented_inference() -> None:
    """With the flipped reward it goes to the easiest outputs instead, and the test of it fails."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(6, LENGTH, generator=draw, dtype=torch.float64)
    truth = torch.randint(len(OUTPUTS), (6,), generator=draw)
    weights = torch.tensor([0.8, 0.3], dtype=torch.float64)
    want = _loss_augmented_argmax(weights, x, truth)
    enumerated = augmented(_scores(weights, x), _hamming(truth)).argmax(1)
    assert want.tolist() == enumerated.tolist()
    assert _train_sampler(weights, x, truth, +1.0).argmax(1).tolist() == want.tolist()
    assert not (_train_sampler(weights, x, truth, -1.0).argmax(1) == want).any()


def test_learning_against_the_sampler_reaches_the_margin() -> None:
    """The alternating game on a separable task ends with every margin kept, as a structural SVM's solution would."""
    draw = torch.Generator().manual_seed(2)
    x = 2 * torch.randn(8, LENGTH, generator=draw, dtype=torch.float64)
    truth = _scores(torch.tensor([1.0, 0.4], dtype=torch.float64), x).argmax(1)
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    logits = torch.zeros(len(x), len(OUTPUTS), dtype=torch.float64)
    cost = _hamming(truth)

    def structural_hinge() -> float:
        scores = _scores(weights.detach(), x)
        return float(((augmented(scores, cost)).amax(1) - scores[torch.arange(8), truth]).sum())

    before = structural_hinge()
    for _ in range(500):
        column = torch.multinomial(logits.softmax(1), 8, replacement=True, generator=draw)
        scores = _scores(weights, x)
        negative = scores.gather(1, column)
        loss = margin_loss(scores[torch.arange(8), truth], negative, cost.gather(1, column)) / 64
        (gradient,) = torch.autograd.grad(loss, weights)
        rewards = rewards_of(augmented(negative, cost.gather(1, column)), "identity")
        logits.scatter_add_(1, column, -0.3 * score_gradient(rewards / 8))
        with torch.no_grad():
            weights -= 0.5 * gradient
    assert before == pytest.approx(8 * LENGTH)  # all scores are 0, so the output that differs everywhere costs most
    assert structural_hinge() < 0.1 * before
