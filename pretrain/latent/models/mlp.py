"""Linear layers with LeakyReLU between them, in place: as one autograd node, or trained without autograd.

A critic is small and is updated five times a step. Layer by layer, each activation is written next to the product it
comes from, and each gradient next to both: on a CPU they push one another out of the cache, and LeakyReLU alone takes a
fifth of the step. Here the activation overwrites the product (its sign is that of its input, which is all that the
backward pass asks for), and each gradient overwrites the one behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

T = TypeVar("T")
_SLOPE = 0.01
_leaky_relu_backward = torch.ops.aten.leaky_relu_backward.grad_input


class LeakyMLP(nn.Sequential):
    """``widths[0]`` inputs through hidden layers to ``widths[-1]`` outputs; LeakyReLU (slope 0.01) between layers.

    Parameters have the names and the initialisation of ``nn.Sequential(nn.Linear(..), nn.LeakyReLU(), ..)``.
    """

    def __init__(self, *widths: int) -> None:
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.LeakyReLU(_SLOPE)]
        super().__init__(*layers[:-1])

    def forward(self, x: Float[Tensor, "n i"]) -> Float[Tensor, "n o"]:
        """The outputs, in the precision of autocast where that is on."""
        out: Tensor = _without_autocast(_LeakyMLP.apply, x, self._in_order())
        return out

    def _in_order(self) -> list[Tensor]:
        """The same as ``parameters()``, which takes as long as a layer to find them."""
        return [
            p
            for layer in self._modules.values()
            if layer is not None
            for p in layer._parameters.values()
            if p is not None
        ]

    def trained_on(
        self, gradient: Callable[[Tensor], Tensor], x: Float[Tensor, "n i"]
    ) -> tuple[list[Tensor], Float[Tensor, "n o"]]:
        """The gradients of a loss of the outputs for ``x``, whose gradient is known in closed form: without a graph.

        Args:
            gradient: of the loss ``(n, o)``, from the float32 (or float64) outputs ``(n, o)``.
            x: the inputs.

        Returns:
            The gradient of each of the ``parameters()``, and the outputs.
        """
        return self._in_closed_form(gradient, x, of_weights=True)

    def pulled_back(
        self, gradient: Callable[[Tensor], Tensor], x: Float[Tensor, "n i"]
    ) -> tuple[Float[Tensor, "n i"], Float[Tensor, "n o"]]:
        """The same, but the gradient of ``x`` instead of those of the weights."""
        (of_x,), values = self._in_closed_form(gradient, x, of_weights=False)
        return of_x, values

    def _in_closed_form(
        self, gradient: Callable[[Tensor], Tensor], x: Tensor, *, of_weights: bool
    ) -> tuple[list[Tensor], Tensor]:
        parameters = self._in_order()

        def both_ways(x: Tensor, *used: Tensor) -> tuple[list[Tensor | None], Tensor]:
            inputs, out = _forward(x, used)
            values = out if out.dtype == torch.float64 else out.float()
            needed = [not of_weights] + [of_weights] * len(used)
            return _backward(gradient(values).to(out.dtype), inputs, used[::2], needed), values

        with torch.no_grad():
            found, values = _without_autocast(both_ways, x, parameters)
            gradients = [g for g in found if g is not None]
            if gradients[0].dtype != parameters[0].dtype:
                gradients = [g.to(parameters[0].dtype) for g in gradients]
            return gradients, values


def _without_autocast(function: Callable[..., T], x: Tensor, parameters: Sequence[Tensor]) -> T:
    """The function of inputs and weights, in the precision of autocast where that is on, and without it inside."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return function(x, *parameters)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return function(*(tensor.to(dtype) for tensor in (x, *parameters)))


def _forward(x: Tensor, parameters: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The input of each layer, and the output of the last."""
    weights, biases = parameters[::2], parameters[1::2]
    inputs = [x]
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        inputs.append(F.leaky_relu_(torch.addmm(bias, inputs[-1], weight.t()), _SLOPE))
    return inputs, torch.addmm(biases[-1], inputs[-1], weights[-1].t())


def _backward(
    gradient: Tensor, inputs: Sequence[Tensor], weights: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of x and of each weight and bias, those that are ``needed``, from that of the output."""
    layers = len(inputs)
    found: list[Tensor | None] = [None] * (1 + 2 * layers)
    for layer in reversed(range(layers)):
        if needed[1 + 2 * layer]:
            found[1 + 2 * layer] = gradient.t() @ inputs[layer]
        if needed[2 + 2 * layer]:
            found[2 + 2 * layer] = gradient.sum(0)
        if layer:
            gradient = gradient @ weights[layer]
            _leaky_relu_backward(gradient, inputs[layer], _SLOPE, True, grad_input=gradient)
        elif needed[0]:
            found[0] = gradient @ weights[0]
    return found


class _LeakyMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        inputs, out = _forward(x, parameters)
        ctx.save_for_backward(*inputs, *parameters[::2])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        layers = len(ctx.saved_tensors) // 2
        return tuple(_backward(grads[0], ctx.saved_tensors[:layers], ctx.saved_tensors[layers:], ctx.needs_input_grad))
