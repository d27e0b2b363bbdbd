"""Linear layers with LeakyReLU between them, in one autograd node that works in place.

A critic is small and is updated five times a step. Layer by layer, each activation is written next to the product it
comes from, and each gradient next to both: on a CPU they push one another out of the cache, and LeakyReLU alone takes a
fifth of the step. Here the activation overwrites the product (its sign is that of its input, which is all that the
backward pass asks for), and each gradient overwrites the one behind it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_SLOPE = 0.01
_leaky_relu_backward = torch.ops.aten.leaky_relu_backward.grad_input  # by its overload: to find it costs as much as it


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
        out: Tensor
        parameters = [p for layer in list(self)[::2] for p in (layer.weight, layer.bias)]
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            out = _LeakyMLP.apply(x, *parameters)
            return out
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            out = _LeakyMLP.apply(x.to(dtype), *(p.to(dtype) for p in parameters))
        return out


class _LeakyMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[::2], parameters[1::2]
        inputs = [x]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            inputs.append(F.leaky_relu_(torch.addmm(bias, inputs[-1], weight.t()), _SLOPE))
        ctx.save_for_backward(*inputs, *weights)
        return torch.addmm(biases[-1], inputs[-1], weights[-1].t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        layers = len(ctx.saved_tensors) // 2
        inputs, weights = ctx.saved_tensors[:layers], ctx.saved_tensors[layers:]
        gradient, found = grads[0], [None] * (1 + 2 * layers)
        for layer in reversed(range(layers)):
            if ctx.needs_input_grad[1 + 2 * layer]:
                found[1 + 2 * layer] = gradient.t() @ inputs[layer]
            if ctx.needs_input_grad[2 + 2 * layer]:
                found[2 + 2 * layer] = gradient.sum(0)
            if layer:
                gradient = gradient @ weights[layer]
                _leaky_relu_backward(gradient, inputs[layer], _SLOPE, True, grad_input=gradient)
            elif ctx.needs_input_grad[0]:
                found[0] = gradient @ weights[0]
        return tuple(found)
