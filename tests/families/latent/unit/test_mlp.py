"""The multilayer perceptron is its layers one after the other; a frozen one gives gradients to its inputs alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from capt.pretrain.latent.posterior import frozen, mlp, with_gradient

WIDTHS = (5, 7, 6, 2)


def _pair(dtype: torch.dtype = torch.float64, activation: type[nn.Module] = nn.LeakyReLU) -> tuple[nn.Sequential, ...]:
    torch.manual_seed(0)
    ours = mlp(*WIDTHS, activation=activation).to(dtype)
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), activation(), nn.Linear(7, 6), activation(), nn.Linear(6, 2)]
    return ours, nn.Sequential(*layers).to(dtype)


def _inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(9, 5, dtype=dtype, generator=torch.Generator().manual_seed(1))


def _gradients(network: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    loss = network(leaf).sin().sum()
    return list(torch.autograd.grad(loss, [leaf, *parameters]))


@pytest.mark.parametrize("activation", [nn.LeakyReLU, nn.ELU])
def test_names_and_initial_weights_are_those_of_the_sequence_of_layers(activation: type[nn.Module]) -> None:
    """Checkpoints name the parameters, and runs of one seed begin with the same weights."""
    ours, theirs = _pair(activation=activation)
    assert list(ours.state_dict()) == [f"{layer}.{part}" for layer in (0, 2, 4) for part in ("weight", "bias")]
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    x = _inputs()
    assert torch.equal(ours(x), theirs(x))


def test_outputs_and_gradients_are_those_of_the_equation() -> None:
    """In float64, with LeakyReLU (slope 0.01) written out."""
    ours, _ = _pair()

    def literal(x: Tensor) -> Tensor:
        parameters = list(ours.parameters())
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            x = x @ weight.t() + bias
            if weight is not parameters[-2]:
                x = torch.where(x > 0, x, 0.01 * x)
        return x

    x = _inputs()
    torch.testing.assert_close(ours(x), literal(x), rtol=1e-14, atol=1e-14)
    for a, b in zip(
        _gradients(ours, list(ours.parameters()), x), _gradients(literal, list(ours.parameters()), x), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(ours, x.clone().requires_grad_())


def test_a_second_backward_pass_sees_the_same_activations() -> None:
    ours, _ = _pair()
    leaf = _inputs().requires_grad_()
    out = ours(leaf)
    first = torch.autograd.grad(out.sum(), leaf, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.sum(), leaf)[0])
    assert not torch.equal(first, torch.zeros_like(first))


def test_autocast_multiplies_in_bf16_and_returns_fp32_gradients() -> None:
    ours, _ = _pair(torch.float32)
    x = _inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
        halves = _gradients(ours, list(ours.parameters()), x)
    for a, b in zip(halves, _gradients(ours, list(ours.parameters()), x), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.03


@pytest.mark.parametrize("wants", [True, False])
def test_frozen_weights_get_no_gradient_and_inputs_do(wants: bool) -> None:
    ours, theirs = _pair()
    x = _inputs()
    leaf = x.clone().requires_grad_()
    network: Callable[[Tensor], Tensor] = (lambda z: frozen(ours, z)) if wants else ours
    network(leaf).sum().backward()
    expected = x.clone().requires_grad_()
    theirs(expected).sum().backward()
    torch.testing.assert_close(leaf.grad, expected.grad)
    assert all((p.grad is None) is wants for p in ours.parameters())
    assert all(p.requires_grad for p in ours.parameters()), "a frozen pass leaves the weights trainable"


def test_a_known_gradient_is_that_of_the_value() -> None:
    """``with_gradient`` has the value and the gradient of the function that it replaces, and of a sum with it."""
    x = _inputs().requires_grad_()
    leaf = x.detach().requires_grad_()
    value = leaf.sin().sum()
    value.backward()
    assert leaf.grad is not None
    stand_in = with_gradient(value, x, leaf.grad)
    assert float(stand_in.detach()) == float(value.detach())
    ours = torch.autograd.grad(stand_in + x.square().sum(), x)[0]
    torch.testing.assert_close(ours, x.detach().cos() + 2 * x.detach())
