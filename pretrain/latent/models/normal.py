"""Gaussian densities: the posteriors whose density is known, and the prior."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Normal:
    """``n`` Gaussians in ``d`` dimensions.

    Attributes:
        mean: the mean of each.
        log_variance: the log variance of each dimension of each, if the covariances are diagonal.
        factor: otherwise one matrix ``A`` for all, whose covariance is ``A A'``.
    """

    mean: Float[Tensor, "n d"]
    log_variance: Float[Tensor, "n d"] | None = None
    factor: Float[Tensor, "d e"] | None = None

    def __post_init__(self) -> None:
        assert (self.log_variance is None) != (self.factor is None)

    def kl(self) -> Float[Tensor, " n"]:
        r""":math:`\mathrm{KL}(q \| N(0, I)) = \frac12(\mathrm{tr}\, S + \mu^\top\mu - d - \log\det S)` per Gaussian."""
        squares = self.mean.square().sum(-1)
        if self.log_variance is not None:
            spread = (self.log_variance.exp() - 1 - self.log_variance).sum(-1)
        else:
            assert self.factor is not None
            widths = self._widths()
            spread = (widths.square().sum() - len(widths) - 2 * widths.log().sum()).to(squares.dtype)
        return 0.5 * (squares + spread)

    def log_prob(self, z: Float[Tensor, "*s n d"]) -> Float[Tensor, "*s n"]:
        """log q(z), where the last but one axis of ``z`` runs over the Gaussians."""
        difference = z - self.mean
        if self.log_variance is not None:
            quadratic = (difference.square() * (-self.log_variance).exp() + self.log_variance).sum(-1)
        else:
            assert self.factor is not None
            directions, widths, _ = torch.linalg.svd(self.factor.double(), full_matrices=False)
            whitened = difference.double() @ directions / widths
            quadratic = (whitened.square().sum(-1) + 2 * widths.log().sum()).to(z.dtype)
        return -0.5 * (quadratic + z.shape[-1] * LOG_2PI)

    def _widths(self) -> Float[Tensor, " d"]:
        """Standard deviations along the axes of ``A A'``, from A itself: squaring it would lose half of the digits."""
        assert self.factor is not None
        widths: Tensor = torch.linalg.svdvals(self.factor.double())
        return widths

    def sample(self, number: int, generator: torch.Generator | None = None) -> Float[Tensor, "s n d"]:
        """``number`` draws from each Gaussian."""
        width = self.mean.shape[1] if self.factor is None else self.factor.shape[1]
        eps = torch.randn(number, len(self.mean), width, generator=generator).to(self.mean)
        if self.log_variance is not None:
            return self.mean + (0.5 * self.log_variance).exp() * eps
        assert self.factor is not None
        return self.mean + eps @ self.factor.t()


def standard_log_prob(z: Float[Tensor, "*s d"]) -> Float[Tensor, "*s"]:
    """log N(z; 0, I)."""
    return -0.5 * (z.square().sum(-1) + z.shape[-1] * LOG_2PI)
