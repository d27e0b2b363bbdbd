"""The discriminator's loss over a band, for every objective, weights and sampler, against literal loops over pairs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from capt.pretrain.embeddings.config import EmbeddingJob
from capt.pretrain.embeddings.policy import (
    Scores,
    curvatures,
    discriminator_loss,
    noise_share,
    reward,
    reweighted,
)

BLOCKS, SIZE, WIDTH, NOISE, DRAWN = 2, 3, 4, 2, 3
NUMBER, ALPHA, MARGIN, MIXTURE = 5, 0.7, 1.3, 0.25
OBJECTIVES, WEIGHTS, SAMPLERS = (
    ("sgns", "nce", "margin"),
    ("uniform", "self_adversarial"),
    ("noise", "generator", "mixture"),
)
CASES = [case for case in itertools.product(OBJECTIVES, WEIGHTS, SAMPLERS) if case[:2] != ("nce", "self_adversarial")]


def _job(objective: str, weights: str, sampler: str, **generator: Any) -> EmbeddingJob:
    return EmbeddingJob.model_validate({
        "task": {"type": "ace"},
        "data": {"files": ["text.txt"]},
        "objective": {"type": objective, "margin": MARGIN},
        "negatives": {
            "weights": weights, "alpha": ALPHA, "sampler": sampler, "mixture": MIXTURE, "number": NUMBER,
        },
        "generator": generator,
    })  # fmt: skip


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def _world() -> tuple[Scores, Scores, Scores]:
    """Scores, weights and log-densities. One centre has no neighbour, and some negatives are masked."""
    generator = torch.Generator().manual_seed(3)
    scores = Scores(_random(generator, BLOCKS, SIZE, WIDTH), _random(generator, BLOCKS, SIZE, NOISE + DRAWN))
    neighbour = (torch.rand(BLOCKS, SIZE, WIDTH, generator=generator) < 0.6).double()
    neighbour[0, 1] = 0.0
    pairs = neighbour.sum(2, keepdim=True)
    shares = torch.rand(BLOCKS, SIZE, NOISE + DRAWN, generator=generator, dtype=torch.float64)
    shares[1, 0, 2] = shares[0, 2, 4] = 0.0
    weights = Scores(neighbour, pairs * shares)
    density = Scores(
        -_random(generator, BLOCKS, SIZE, WIDTH).abs(), -_random(generator, BLOCKS, SIZE, NOISE + DRAWN).abs()
    )
    return scores, weights, density


def _softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def _literal(objective: str, weighting: str, scores: Scores, weights: Scores, density: Scores) -> float:
    """The sum over pairs: each pair of a centre has an equal part in the centre's negatives."""
    total = 0.0
    for block in range(BLOCKS):
        for centre in range(SIZE):
            row = [float(w) for w in weights.negative[block, centre]]
            negative = [float(s) for s in scores.negative[block, centre]]
            if weighting == "self_adversarial" and sum(row):
                tilted = [w * math.exp(ALPHA * s) for w, s in zip(row, negative, strict=True)]
                row = [sum(row) * t / sum(tilted) for t in tilted]
            pairs = [j for j in range(WIDTH) if weights.positive[block, centre, j]]
            for j in pairs:
                positive = float(scores.positive[block, centre, j])
                if objective == "nce":
                    positive -= math.log(NUMBER) + float(density.positive[block, centre, j])
                if objective != "margin":
                    total += _softplus(-positive)
                for k, score in enumerate(negative):
                    share = row[k] / len(pairs)
                    if objective == "margin":
                        total += share * max(0.0, MARGIN + score - positive)
                    elif objective == "nce":
                        total += share * _softplus(score - math.log(NUMBER) - float(density.negative[block, centre, k]))
                    else:
                        total += share * _softplus(score)
    return total


@pytest.mark.parametrize(("objective", "weighting", "sampler"), CASES)
def test_loss_is_the_sum_over_the_pairs(objective: str, weighting: str, sampler: str) -> None:
    scores, weights, density = _world()
    job = _job(objective, weighting, sampler)
    loss = discriminator_loss(job, scores, reweighted(job, scores, weights), density if objective == "nce" else None)
    assert float(loss) == pytest.approx(_literal(objective, weighting, scores, weights, density))


@pytest.mark.parametrize(("objective", "weighting"), [case[:2] for case in CASES if case[2] == "mixture"])
def test_gradient_is_that_of_the_literal_loss(objective: str, weighting: str) -> None:
    """By central differences of the literal loop; self-adversarial weights are held fixed, as they have no gradient."""
    scores, weights, density = _world()
    leaves = [scores.positive.clone().requires_grad_(), scores.negative.clone().requires_grad_()]
    job = _job(objective, weighting, "mixture")
    known = Scores(*leaves)
    discriminator_loss(job, known, reweighted(job, known, weights), density if objective == "nce" else None).backward()  # type: ignore[no-untyped-call]
    fixed = weights
    if weighting == "self_adversarial":
        tilted = weights.negative * (ALPHA * scores.negative).exp()
        total = tilted.sum(2, keepdim=True)
        kept = weights.negative.sum(2, keepdim=True)
        fixed = Scores(weights.positive, torch.where(total > 0, kept * tilted / total, 0.0))
    step = 1e-6
    for name, leaf in zip(("positive", "negative"), leaves, strict=True):
        assert leaf.grad is not None
        for index in itertools.product(*(range(n) for n in leaf.shape)):
            ends = []
            for sign in (1, -1):
                moved = {"positive": scores.positive.clone(), "negative": scores.negative.clone()}
                moved[name][index] += sign * step
                ends.append(_literal(objective, "uniform", Scores(**moved), fixed, density))
            assert float(leaf.grad[index]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("objective", ["sgns", "nce"])
@pytest.mark.parametrize("form", ["d", "softplus"])
def test_reward_is_what_the_discriminator_thinks_of_a_negative(objective: str, form: str) -> None:
    scores, _, density = _world()
    log_density = density.negative if objective == "nce" else None
    ours = reward(_job(objective, "uniform", "mixture", reward=form), scores.negative, log_density)
    for index in itertools.product(range(BLOCKS), range(SIZE), range(NOISE + DRAWN)):
        logit = float(scores.negative[index])
        if objective == "nce":
            logit -= math.log(NUMBER) + float(density.negative[index])
        probability = 1 / (1 + math.exp(-logit))
        expected = probability if form == "d" else -math.log(1 - probability)
        assert float(ours[index]) == pytest.approx(expected)


def test_reward_of_the_margin_is_the_augmented_score() -> None:
    scores, _, _ = _world()
    assert torch.allclose(reward(_job("margin", "uniform", "mixture"), scores.negative, None), scores.negative + MARGIN)


@pytest.mark.parametrize(("sampler", "share"), [("noise", 1.0), ("generator", 0.0), ("mixture", MIXTURE)])
def test_lambda_is_the_part_of_the_noise(sampler: str, share: float) -> None:
    assert noise_share(_job("sgns", "uniform", sampler)) == share


def test_curvatures_bound_second_derivatives_along_rows() -> None:
    """At scores of 0, where a log-sigmoid bends most, they are the second derivatives' sums over coordinates."""
    _, weights, _ = _world()
    generator = torch.Generator().manual_seed(4)
    rows = [_random(generator, BLOCKS, n, 3) for n in (SIZE, WIDTH + NOISE)]
    rows.append(_random(generator, BLOCKS, SIZE, DRAWN, 3))
    together = torch.cat([weights.positive, weights.negative], dim=2)

    def loss(x: Tensor, y: Tensor, drawn: Tensor) -> Tensor:
        scores = torch.cat([x @ y.mT, (drawn @ x[..., None])[..., 0]], dim=2)
        return (together * torch.nn.functional.softplus(scores)).sum()

    for number, found in enumerate(curvatures(*rows, weights)):  # type: ignore[arg-type]
        assert found is not None
        at = [row if n != number else torch.zeros_like(row) for n, row in enumerate(rows)]
        if number == 0:  # zero rows of the centres make all scores 0
            hessian = torch.autograd.functional.hessian(lambda x: loss(x, *rows[1:]), at[0])  # type: ignore[no-untyped-call]
        elif number == 1:
            hessian = torch.autograd.functional.hessian(lambda y: loss(rows[0], y, rows[2]), at[1])  # type: ignore[no-untyped-call]
        else:
            hessian = torch.autograd.functional.hessian(lambda drawn: loss(*rows[:2], drawn), at[2])  # type: ignore[no-untyped-call]
        trace = hessian.flatten(0, at[number].dim() - 1).flatten(1).diagonal().view(at[number].shape).sum(-1)
        torch.testing.assert_close(found, trace)
