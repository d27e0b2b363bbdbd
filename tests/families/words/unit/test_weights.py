"""Self-adversarial weights against a literal loop."""

from __future__ import annotations

import math

import pytest
import torch

from capt.pretrain.embeddings.objectives import self_adversarial_weights


@pytest.mark.parametrize("alpha", [0.5, 1.0, 4.0])
def test_weights_are_a_softmax_of_the_scores_times_the_total_weight(alpha: float) -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 4, generator=draw, dtype=torch.float64)
    weights = torch.rand(3, 4, generator=draw, dtype=torch.float64)
    weights[0, 1] = 0.0
    got = self_adversarial_weights(scores, alpha, weights)
    for i in range(3):
        parts = [float(weights[i, j]) * math.exp(alpha * float(scores[i, j])) for j in range(4)]
        want = [float(weights[i].sum()) * part / sum(parts) for part in parts]
        assert got[i].tolist() == pytest.approx(want, rel=1e-12)


def test_without_temperature_they_are_the_plain_weights() -> None:
    weights = torch.tensor([[5 / 32] * 32])
    torch.testing.assert_close(self_adversarial_weights(torch.randn(1, 32), 1e-9, weights), weights)


def test_a_row_that_is_masked_stays_so_and_no_gradient_flows() -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    weights = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    got = self_adversarial_weights(scores, 1.0, weights)
    assert got[0].tolist() == [0.0, 0.0, 0.0]
    assert float(got[1].sum()) == pytest.approx(3.0)
    assert not got.requires_grad
