from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capt.pretrain.models import layers
from capt.pretrain.models.layers import SelfAttention, attend
from tests.unit.models.support import small_config

B, HEADS, QUERIES, KEYS, SIZE = 3, 2, 4, 7, 5


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shape = {"dtype": torch.float64, "requires_grad": True}
    return (
        torch.randn(B, HEADS, QUERIES, SIZE, **shape),
        torch.randn(B, HEADS, KEYS, SIZE, **shape),
        torch.randn(B, HEADS, KEYS, SIZE, **shape),
    )


def _mask(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(B, 1, 1 if kind == "keys" else QUERIES, KEYS, generator=generator) > 0.4
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("kind", ["none", "keys", "pairs"])
def test_dropped_attention_is_the_formula(
    qkv: tuple[Tensor, Tensor, Tensor], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = (torch.rand(B * HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(2)) > 0.3).double()
    monkeypatch.setattr(layers, "keep_mask", lambda shape, p, dtype: (keep.view(shape).clone(), 1 / 0.7))
    mask = _mask(kind)

    q, k, v = qkv
    scores = q @ k.transpose(-1, -2) / SIZE**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    reference = (torch.softmax(scores, -1) * keep.view(B, HEADS, QUERIES, KEYS) / 0.7) @ v
    ours = attend(q, k, v, mask, 0.3)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(reference)
    for a, b in zip(torch.autograd.grad(ours, qkv, weight), torch.autograd.grad(reference, qkv, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_dropout_keeps_the_mean(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    torch.manual_seed(3)
    q, k, v = (x.detach()[:1] for x in qkv)
    many = (x.expand(6000, -1, -1, -1) for x in (q, k, v))
    mean = attend(*many, None, 0.2).mean(0)
    assert float((mean - F.scaled_dot_product_attention(q, k, v)[0]).abs().max()) < 0.05


def test_nothing_to_look_at_is_finite(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    mask = torch.zeros(B, 1, 1, KEYS, dtype=torch.bool)
    for p in (0.0, 0.1):
        assert bool(attend(*qkv, mask, p).isfinite().all())


@pytest.mark.parametrize("training", [True, False])
def test_module_under_autocast(training: bool) -> None:
    module = SelfAttention(small_config()).train(training)
    x = torch.randn(2, 6, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, x, None)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert module.key_value.weight.grad is not None
    assert module.key_value.weight.grad.dtype == torch.float32
