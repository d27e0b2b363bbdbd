"""An engine inside a compiled step: the same calls on tensors alone, so that one graph holds passes and updates.

Where modules are as small as a critic, Python and torch's dispatch of each operator take more time than the operators.
A step that is written on :class:`Trainable` can be traced with these in the place of its engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pretrain.engine.optim.build import Moments


@runtime_checkable
class Trainable(Protocol):
    """The calls of an engine that a step is written on; ``pretrain.engine.engines.deepspeed.Engine`` describes them."""

    @property
    def module(self) -> nn.Module:
        """For reading."""

    def __call__(self, *args: Any) -> Any:
        """The module's forward pass."""

    def backward(self, loss: Tensor, leaf: Tensor | None = None) -> Tensor | None:
        """Gradients of the parameters; returns that of ``leaf``, an input of the pass, where one is named."""

    def take_gradients(self, gradients: Sequence[Tensor]) -> None:
        """The same where the gradients are known."""

    def step(self) -> None:
        """Update the parameters."""

    def set_learning_rate(self, value: float) -> None:
        """Of the next update."""

    def gradient_norm(self) -> Tensor | float:
        """Of the last update."""


class TracedEngine:
    """Of one module on one rank in fp32, under Adam without decay or clipping; made inside the compiled function.

    Args:
        module: its parameters are changed in place.
        moments: of its optimizer, changed in place.
        learning_rate: a scalar tensor, as a number would be a constant of the graph.
    """

    def __init__(self, module: nn.Module, moments: Moments, learning_rate: Tensor | float) -> None:
        self.module = module
        self._moments = moments
        self._rate = learning_rate
        self._gradients: list[Tensor] = []

    def __call__(self, *args: Any) -> Any:
        """The module's forward pass."""
        return self.module(*args)

    def backward(self, loss: Tensor, leaf: Tensor | None = None) -> Tensor | None:
        """The gradient of ``loss`` for the coming update; returns that by ``leaf``, where one is named."""
        inputs = [*self.module.parameters(), *([] if leaf is None else [leaf])]
        found = list(torch.autograd.grad(loss, inputs))
        of_leaf = None if leaf is None else found.pop()
        self.take_gradients(found)
        return of_leaf

    def take_gradients(self, gradients: Sequence[Tensor]) -> None:
        """One for each of the ``parameters()``."""
        self._gradients = list(gradients)

    def step(self) -> None:
        """Update the parameters and the moments."""
        with torch.no_grad():
            _adam(self._moments, self._gradients, self._rate)

    def set_learning_rate(self, value: float) -> None:
        """Learning rate of the next update."""
        self._rate = value

    def gradient_norm(self) -> Tensor:
        """Of all parameters, of the last update."""
        norms = [torch.linalg.vector_norm(gradient) for gradient in self._gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm


def _adam(moments: Moments, gradients: Sequence[Tensor], rate: Tensor | float) -> None:
    r"""Adam (Kingma & Ba 2015, arXiv 1412.6980, Algorithm 1) in place, as torch has it.

    .. math::
        m = \beta_1 m + (1-\beta_1) g, \quad v = \beta_2 v + (1-\beta_2) g^2, \quad
        w \leftarrow w - \frac{\eta}{1-\beta_1^t} \, m \Big/ \Big(\sqrt{\frac{v}{1-\beta_2^t}} + \epsilon\Big)
    """
    beta1, beta2 = moments.options["betas"]
    updates = moments.count.add_(1)[0]
    bias1, bias2 = (  # 1 - beta^t, with all its digits
        -torch.expm1(updates * (math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2)
    )
    size, root = rate / bias1, bias2.sqrt()
    of_each = zip(moments.parameters, gradients, moments.averages, moments.squares, strict=True)
    for parameter, gradient, average, square in of_each:
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        parameter.sub_(size * average / (square.sqrt() / root + moments.options["eps"]))
