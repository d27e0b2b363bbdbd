"""Temperature schedules, called with the index of the optimizer update (the same for all its micro-batches)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from capt.pretrain.base.errors import ConfigError


def inverted_triangle(step: int, total_steps: int, minimum: float = 0.05) -> float:
    r"""Eq. 6 of the CAPT paper, :math:`\tau(t) = \frac1T |t - \frac T2| + 0.05`: from 0.55 down to 0.05 and up again.

    Args:
        step: optimizer updates done, ``t``; clamped to 0 .. T.
        total_steps: ``T``.
        minimum: the temperature at ``T / 2``.

    Raises:
        ConfigError: no steps at all, or a minimum that is not positive.
    """
    if total_steps < 1:
        raise ConfigError(f"a temperature schedule needs 1 step or more, got {total_steps}")
    _check_positive("minimum", minimum)
    t = min(max(step, 0), total_steps)
    return abs(t - total_steps / 2) / total_steps + minimum


@dataclass(frozen=True)
class InvertedTriangle:
    """The schedule :func:`inverted_triangle` with its constants."""

    total_steps: int
    minimum: float = 0.05

    def __post_init__(self) -> None:
        inverted_triangle(0, self.total_steps, self.minimum)

    def __call__(self, step: int) -> float:
        """The temperature of optimizer update ``step``."""
        return inverted_triangle(step, self.total_steps, self.minimum)


@dataclass(frozen=True)
class Constant:
    """A temperature that stays the same for the whole run."""

    value: float = 0.05

    def __post_init__(self) -> None:
        _check_positive("value", self.value)

    def __call__(self, step: int) -> float:
        """The temperature, which does not depend on ``step``."""
        return self.value


@dataclass(frozen=True)
class Linear:
    """A linear change from ``start`` at step 0 to ``end`` at step ``total_steps``, and ``end`` from there on."""

    total_steps: int
    start: float = 0.5
    end: float = 0.05

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ConfigError(f"a temperature schedule needs 1 step or more, got {self.total_steps}")
        _check_positive("start", self.start)
        _check_positive("end", self.end)

    def __call__(self, step: int) -> float:
        """The temperature of optimizer update ``step``."""
        done = min(max(step, 0), self.total_steps) / self.total_steps
        return self.start + (self.end - self.start) * done


class Learned(nn.Module):
    r"""A trained temperature :math:`\tau = e^\theta` kept within ``minimum .. maximum``.

    The bound is applied to the value and not to the gradient, so that a parameter that has run past it can come back.
    """

    def __init__(self, start: float = 0.07, minimum: float = 0.01, maximum: float = 1.0) -> None:
        super().__init__()
        _check_positive("minimum", minimum)
        if not minimum <= start <= maximum:
            raise ConfigError(f"a learned temperature must start within {minimum} .. {maximum}, got {start}")
        self.minimum, self.maximum = minimum, maximum
        # one element, not a scalar: DeepSpeed cannot broadcast parameters without dimensions
        self.log_temperature = nn.Parameter(torch.tensor([math.log(start)]))

    def forward(self, step: int) -> Float[Tensor, ""]:
        """The temperature in float32, which does not depend on ``step``."""
        unbounded = self.log_temperature.float().squeeze()
        bounded = unbounded.detach().clamp(math.log(self.minimum), math.log(self.maximum))
        return torch.exp(bounded + (unbounded - unbounded.detach()))


Schedule = Callable[[int], float | Tensor]

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "inverted_triangle": InvertedTriangle,
    "constant": Constant,
    "linear": Linear,
    "learned": Learned,
}


def build_temperature(type: str, parameters: Mapping[str, Any]) -> Schedule:
    """The schedule called ``type``, made with ``parameters``.

    Raises:
        ConfigError: an unknown type, or parameters that it does not take.
    """
    if type not in SCHEDULES:
        raise ConfigError(f"unknown temperature schedule {type!r}; known are {', '.join(sorted(SCHEDULES))}")
    try:
        return SCHEDULES[type](**parameters)
    except TypeError as error:
        raise ConfigError(f"temperature schedule {type}: {error}") from None


def _check_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"temperature {name} must be a positive number, got {value}")
