from __future__ import annotations

import pytest
import torch

from capt.pretrain.models.layers import dropout, keep_mask


@pytest.mark.parametrize("p", [0.1, 0.5, 0.013])
def test_frequency(p: float) -> None:
    torch.manual_seed(0)
    n = 400_003  # not a multiple of the four masks of a draw
    mask, scale = keep_mask(torch.Size([n]), p, torch.float64)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert float(mask.mean()) == pytest.approx(1 - p, abs=5 * (p * (1 - p) / n) ** 0.5)
    assert scale == pytest.approx(1 / (1 - p), rel=2e-5)


def test_masks_of_one_draw_are_independent() -> None:
    torch.manual_seed(1)
    mask, _ = keep_mask(torch.Size([100_000, 4]), 0.3, torch.float64)
    correlation = torch.corrcoef(mask.T) - torch.eye(4)
    assert float(correlation.abs().max()) < 5 / 100_000**0.5


def test_gradient_uses_the_same_mask_and_keeps_the_scale() -> None:
    torch.manual_seed(2)
    x = torch.full((51, 7), 3.0, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.25, training=True)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert set(y.detach().unique().tolist()) == {0.0, 4.0}
    assert torch.equal(gradient, y.detach() / 3)


def test_replays_from_the_generator() -> None:
    x = torch.ones(1000)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = dropout(x, 0.1, training=True)
    assert not torch.equal(first, dropout(x, 0.1, training=True))
    torch.set_rng_state(state)
    assert torch.equal(first, dropout(x, 0.1, training=True))


def test_off() -> None:
    x = torch.ones(10)
    assert dropout(x, 0.1, training=False) is x
    assert dropout(x, 0.0, training=True) is x


def test_bf16_is_unbiased() -> None:
    """1 / 0.9 is not a bf16 number; a mask that held it would lose 0.16 %."""
    torch.manual_seed(4)
    x = torch.rand(200_000).bfloat16()
    kept = dropout(x, 0.1, training=True)
    expected = x[kept != 0].double().sum() / 0.9
    assert float(kept.double().sum() / expected) == pytest.approx(1, abs=3e-4)
