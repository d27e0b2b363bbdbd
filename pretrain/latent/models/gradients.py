"""Ways to lead a gradient past a module that is not to be trained by it."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn


def frozen(module: nn.Module, *args: Any) -> Tensor:
    """Call the module while its weights need no gradient; gradients of the output still reach ``args``."""
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in weights:
        parameter.requires_grad_(False)
    try:
        out: Tensor = module(*args)
    finally:
        for parameter in weights:
            parameter.requires_grad_(True)
    return out


def with_gradient(value: Float[Tensor, ""], x: Float[Tensor, "n d"], grad: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Return ``value`` as a function of ``x`` whose gradient at ``x`` is already known to be ``grad``."""
    return value.detach() + ((x - x.detach()) * grad).sum()
