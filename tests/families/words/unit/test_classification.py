"""Negative sampling and NCE against literal float64 loops over the equations, and what their minima are."""

from __future__ import annotations

import math

import pytest
import torch

from capt.pretrain.embeddings.objectives import classification_loss, mixture_log_density, nce_logits


def _literal(
    positive: list[float],
    negative: list[list[float]],
    weights: list[list[float]],
    log_noise: list[float] | None,
    k: int,
) -> float:
    """Eq. 4 term by term; with ``log_noise`` (per pair, the same for its negatives) true NCE."""
    total = 0.0
    for i, score in enumerate(positive):
        shift = 0.0 if log_noise is None else math.log(k) + log_noise[i]
        total -= math.log(1 / (1 + math.exp(-(score - shift))))
        for j, other in enumerate(negative[i]):
            total -= weights[i][j] * math.log(1 - 1 / (1 + math.exp(-(other - shift))))
    return total


@pytest.mark.parametrize("nce", [False, True])
@pytest.mark.parametrize(("pairs", "k"), [(1, 1), (3, 2), (5, 7)])
def test_loss_is_the_literal_sum(pairs: int, k: int, nce: bool) -> None:
    draw = torch.Generator().manual_seed(pairs)
    positive, negative = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((pairs,), (pairs, k)))
    weights = torch.rand(pairs, k, generator=draw, dtype=torch.float64)
    noise = torch.randn(pairs, generator=draw, dtype=torch.float64) - 2
    want = _literal(positive.tolist(), negative.tolist(), weights.tolist(), noise.tolist() if nce else None, k)
    if nce:
        positive, negative = nce_logits(positive, noise, k), nce_logits(negative, noise[:, None], k)
    assert float(classification_loss(positive, negative, None, weights)) == pytest.approx(want, rel=1e-12)


def test_gradients_are_sigmoids_and_survive_saturation() -> None:
    positive = torch.tensor([-200.0, 0.0, 200.0], requires_grad=True)
    negative = torch.tensor([-200.0, 0.0, 200.0], requires_grad=True)
    loss = classification_loss(positive, negative, None, torch.tensor([1.0, 3.0, 1.0]))
    assert loss.item() == pytest.approx(400 + 4 * math.log(2))
    loss.backward()
    torch.testing.assert_close(positive.grad, torch.tensor([-1.0, -0.5, 0.0]))
    torch.testing.assert_close(negative.grad, torch.tensor([0.0, 1.5, 1.0]))


def test_what_has_weight_zero_may_be_infinite() -> None:
    negative = torch.tensor([torch.inf, 0.0], requires_grad=True)
    loss = classification_loss(torch.zeros(1), negative, None, torch.tensor([0.0, 1.0]))
    loss.backward()
    assert loss.item() == pytest.approx(2 * math.log(2))
    assert negative.grad is not None
    assert negative.grad.tolist() == [0.0, 0.5]


@pytest.mark.parametrize("mixture", [0.0, 0.3, 1.0])
def test_mixture_density(mixture: float) -> None:
    noise, generator = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.1, 0.0, 0.9]).double()
    density = mixture_log_density(noise.log(), generator.log(), mixture).exp()
    torch.testing.assert_close(density, mixture * noise + (1 - mixture) * generator)


@pytest.mark.parametrize("mixture", [1.0, 0.4])
def test_minimum_of_nce_is_the_log_probability(mixture: float) -> None:
    """With exact expectations in place of draws. Without the density in the logits the minimum would be the PMI."""
    k = 3
    truth = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
    noise, generator = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), torch.tensor([0.7, 0.1, 0.1, 0.1]).double()
    log_density = mixture_log_density(noise.log(), generator.log(), mixture)
    scores = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([scores], max_iter=200, tolerance_grad=0, tolerance_change=0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        logits = nce_logits(scores, log_density, k)
        loss = classification_loss(logits, logits, truth, k * log_density.exp())
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(scores.detach(), truth.log(), atol=1e-4, rtol=0)
