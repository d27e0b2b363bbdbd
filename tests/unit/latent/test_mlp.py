"""The fused network is the layers one after the other: values, gradients, names, autocast, frozen weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pretrain.latent.models.critics import frozen
from pretrain.latent.models.mlp import LeakyMLP

WIDTHS = (5, 7, 6, 2)


def _pair(dtype: torch.dtype = torch.float64) -> tuple[LeakyMLP, nn.Sequential, Tensor]:
    torch.manual_seed(0)
    ours = LeakyMLP(*WIDTHS).to(dtype)
    theirs = nn.Sequential(nn.Linear(5, 7), nn.LeakyReLU(), nn.Linear(7, 6), nn.LeakyReLU(), nn.Linear(6, 2)).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, torch.randn(9, 5, dtype=dtype)


def _gradients(network: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    loss = network(leaf).sin().sum()
    return list(torch.autograd.grad(loss, [leaf, *parameters]))


def test_is_the_sequence_of_layers() -> None:
    ours, theirs, x = _pair()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-14, atol=1e-14)
    for a, b in zip(
        _gradients(ours, list(ours.parameters()), x), _gradients(theirs, list(theirs.parameters()), x), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(ours, x.clone().requires_grad_())


def test_a_second_backward_pass_sees_the_same_activations() -> None:
    ours, _, x = _pair()
    leaf = x.clone().requires_grad_()
    out = ours(leaf)
    first = torch.autograd.grad(out.sum(), leaf, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.sum(), leaf)[0])
    assert not torch.equal(first, torch.zeros_like(first))


def test_autocast_multiplies_in_bf16_and_returns_fp32_gradients() -> None:
    ours, theirs, x = _pair(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == theirs(x).dtype == torch.bfloat16
        found = _gradients(ours, list(ours.parameters()), x)
    expected = _gradients(theirs, list(theirs.parameters()), x)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.03


@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16])
def test_a_closed_form_brings_the_gradients_of_autograd(precision: torch.dtype) -> None:
    """Of a sum of sines, whose gradient is the cosine; in bf16 under autocast, and then at its precision."""
    ours, _, x = _pair(torch.float64 if precision == torch.float64 else torch.float32)
    weights = [parameter.detach().clone() for parameter in ours.parameters()]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        found, out = ours.trained_on(torch.cos, x)
        outputs = ours(x)
        expected = torch.autograd.grad(outputs.to(x.dtype).sin().sum(), list(ours.parameters()))
    torch.testing.assert_close(out, outputs.detach().to(x.dtype))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)
    assert all(torch.equal(a, b) for a, b in zip(weights, ours.parameters(), strict=True))


def test_a_closed_form_brings_the_gradient_of_the_inputs() -> None:
    ours, _, x = _pair()
    found, out = ours.pulled_back(torch.cos, x)
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(ours(leaf).sin().sum(), leaf)[0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(out, ours(x).detach())


@pytest.mark.parametrize("wants", [True, False])
def test_frozen_weights_get_no_gradient_and_inputs_do(wants: bool) -> None:
    ours, theirs, x = _pair()
    leaf = x.clone().requires_grad_()
    network: Callable[[Tensor], Tensor] = (lambda z: frozen(ours, z)) if wants else ours
    network(leaf).sum().backward()
    expected = x.clone().requires_grad_()
    theirs(expected).sum().backward()
    torch.testing.assert_close(leaf.grad, expected.grad)
    assert all((p.grad is None) is wants for p in ours.parameters())
