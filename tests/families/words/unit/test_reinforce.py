"""In a world of six words the REINFORCE gradient is the exact sum over the vocabulary, and its sign counts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capt.pretrain.embeddings.policy import (
    RewardStatistics,
    entropy_rewards,
    fixed_score_gradient,
    importance_weights,
    leave_one_out_mean,
    rewards_of,
    score_gradient,
)

WORDS, DIM, DRAWS, CENTRES, ROUNDS = 6, 3, 3, 2_000, 100
SHARE = torch.tensor([0.7, 0.3], dtype=torch.float64)
"""Frequency of each of the two centre words."""
NOISE = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.1, 0.05], dtype=torch.float64)


class World:
    """Two centre words, six context words, a known discriminator and a generator."""

    def __init__(self, form: str = "probability", normalise: bool = True) -> None:
        draw = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(2, DIM, generator=draw, dtype=torch.float64)
        self.context = torch.randn(WORDS, DIM, generator=draw, dtype=torch.float64)
        rewards = rewards_of(2 * torch.randn(2, WORDS, generator=draw, dtype=torch.float64), form)  # type: ignore[arg-type]
        if normalise:
            rewards = RewardStatistics.of(rewards, SHARE[:, None] * self.generator()).normalise(rewards, 0.5)
        self.rewards = rewards

    def generator(self) -> Tensor:
        return (self.inputs @ self.context.T).softmax(1)

    def exact(self, entropy_weight: float = 0.0, words: int = 1) -> Tensor:
        """Gradient of the loss with respect to both tables: a literal sum over the vocabulary, by autograd."""
        inputs, context = self.inputs.clone().requires_grad_(), self.context.clone().requires_grad_()
        log_g = (inputs @ context.T).log_softmax(1)
        loss = torch.zeros((), dtype=torch.float64)
        for x in range(2):
            entropy = torch.zeros((), dtype=torch.float64)
            for y in range(WORDS):
                loss = loss - SHARE[x] * log_g[x, y].exp() * self.rewards[x, y]
                entropy = entropy - log_g[x, y].exp() * log_g[x, y]
            loss = loss + SHARE[x] * entropy_weight * torch.relu(math.log(words) - entropy)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, (inputs, context))])

    def tables_gradient(self, centre: Tensor, words: Tensor, gradient: Tensor) -> Tensor:
        """From the gradients of scores, of ``words [rounds n m]`` of ``centre [rounds n]``, to those of the tables."""
        scores = torch.zeros(ROUNDS, 2 * WORDS, dtype=torch.float64)
        scores.scatter_add_(1, (centre[..., None] * WORDS + words).flatten(1), gradient.flatten(1))
        scores = scores.view(ROUNDS, 2, WORDS)
        return torch.cat([(scores @ self.context).flatten(1), (scores.mT @ self.inputs).flatten(1)], 1)

    @staticmethod
    @functools.cache
    def draws() -> tuple[Tensor, Tensor]:
        """Centres [rounds n] and words [rounds n m] of the generator, which is the same in every world."""
        draw = torch.Generator().manual_seed(3)
        centre = (torch.rand(ROUNDS, CENTRES, generator=draw) > SHARE[0]).long()
        words = torch.multinomial(World().generator(), ROUNDS * CENTRES * DRAWS, replacement=True, generator=draw)
        return centre, words.view(2, ROUNDS, CENTRES, DRAWS).gather(
            0, centre[None, ..., None].expand(1, -1, -1, DRAWS)
        )[0]

    def estimates(self, coefficients: Callable[[World, Tensor, Tensor], Tensor]) -> Tensor:
        """An estimate [parameters] of each round of draws from the generator."""
        centre, words = self.draws()
        parts = zip(centre, words, strict=True)
        gradient = torch.stack([score_gradient(coefficients(self, c, w) / w.numel()) for c, w in parts])
        return self.tables_gradient(centre, words, gradient)


def _agrees(estimates: Tensor, exact: Tensor) -> bool:
    """Return whether the mean of the estimates is within 3 standard errors of ``exact``, in every parameter."""
    errors = estimates.std(0) / math.sqrt(len(estimates))
    return bool(((estimates.mean(0) - exact).abs() < 3 * errors).all())


def _batch_mean(world: World, centre: Tensor, words: Tensor) -> Tensor:
    rewards = world.rewards[centre[:, None], words]
    return rewards - leave_one_out_mean(rewards, torch.ones_like(rewards))


BASELINES: dict[str, Callable[[World, Tensor, Tensor], Tensor]] = {
    "none": lambda world, centre, words: world.rewards[centre[:, None], words],
    "constant": lambda world, centre, words: world.rewards[centre[:, None], words] - 0.5,
    "batch_mean": _batch_mean,
    "self_critical": lambda world, centre, words: (
        world.rewards[centre[:, None], words] - world.rewards[centre, world.generator().argmax(1)[centre]][:, None]
    ),
}


@pytest.mark.parametrize("form", ["probability", "softplus"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("baseline", BASELINES)
def test_estimate_is_the_exact_sum_over_the_vocabulary(baseline: str, normalise: bool, form: str) -> None:
    world = World(form, normalise)
    assert _agrees(world.estimates(BASELINES[baseline]), world.exact())


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_flipped_sign_is_noticed(baseline: str) -> None:
    world = World()
    assert not _agrees(world.estimates(lambda *draws: -BASELINES[baseline](*draws)), world.exact())


def test_the_mean_of_all_draws_would_be_noticed_as_biased() -> None:
    """With two draws of a centre, as an expectation that holds the draw itself, half of the gradient is lost."""
    world = World()

    def with_itself(world: World, centre: Tensor, words: Tensor) -> Tensor:
        return world.rewards[centre[:, None], words] * (DRAWS - 1) / DRAWS

    assert not _agrees(world.estimates(with_itself), world.exact())


def test_draws_that_earn_the_same_have_no_gradient_at_all() -> None:
    """Rounding leaves none either, of which Adam would make a full step."""
    coefficients = torch.rand(500, 1).expand(-1, 5)
    assert not score_gradient(coefficients).any()


def test_a_step_along_it_earns_more() -> None:
    """Descending the gradient raises the mean reward: the generator moves to words that fool the discriminator."""
    world = World()
    before = float((SHARE[:, None] * world.generator() * world.rewards).sum())
    gradient = world.estimates(BASELINES["batch_mean"]).mean(0)
    world.inputs -= 0.5 * gradient[: 2 * DIM].view(2, DIM)
    world.context -= 0.5 * gradient[2 * DIM :].view(WORDS, DIM)
    assert float((SHARE[:, None] * world.generator() * world.rewards).sum()) > before


def _reweighted(world: World, clip: float, *, weighted: bool = True) -> Tensor:
    p, draw = world.generator(), torch.Generator().manual_seed(6)
    centre, drawn = world.draws()
    noise = torch.multinomial(NOISE, ROUNDS * CENTRES * 4, replacement=True, generator=draw).view(ROUNDS, CENTRES, 4)
    rewards = world.rewards[centre[..., None], noise]
    if weighted:
        rewards = rewards * importance_weights(p[centre[..., None], noise].log(), NOISE[noise].log(), clip)
    parts = [fixed_score_gradient(r / r.numel(), DRAWS) for r in rewards]
    of_noise, of_draws = (torch.stack(gradients) for gradients in zip(*parts, strict=True))
    return world.tables_gradient(centre, noise, of_noise) + world.tables_gradient(centre, drawn, of_draws)


def test_samples_of_the_noise_estimate_the_same_gradient_when_reweighted() -> None:
    world = World()
    assert _agrees(_reweighted(world, 1e9), world.exact())
    assert not _agrees(_reweighted(world, 1e9, weighted=False), world.exact())
    assert not _agrees(_reweighted(world, 0.5), world.exact())


def test_importance_weights_are_clipped() -> None:
    got = importance_weights(torch.tensor([0.5, 0.01]).log(), torch.tensor([0.01, 0.5]).log(), 10.0)
    assert got.tolist() == pytest.approx([10.0, 0.02])


@pytest.mark.parametrize("words", [1, 3, 1000])
def test_entropy_regulariser_is_the_exact_one(words: int) -> None:
    """With ``words`` 1 no row has too little entropy, with 3 one of the two has, with 1000 both have."""
    world = World()

    def coefficients(world: World, centre: Tensor, drawn: Tensor) -> Tensor:
        p = world.generator()
        entropy = -(p * p.log()).sum(1)
        return _batch_mean(world, centre, drawn) + entropy_rewards(
            p[centre[:, None], drawn].log(), entropy[centre], 0.3, words
        )

    assert _agrees(world.estimates(coefficients), world.exact(0.3, words))
    if words > 1:
        assert not _agrees(world.estimates(coefficients), world.exact(0.0))
