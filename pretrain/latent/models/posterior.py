"""q(z | x) as a head on the encoder's output: Gaussian, implicit, a point, or nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pretrain.latent.config import ModelSection
from pretrain.latent.evaluation.bounds import Normal


class Encoded(NamedTuple):
    """What the encoder says of ``n`` inputs.

    ``z``: one draw each. ``h``: the representation under it. ``density``: of the posterior, where it has one: the mean
    and either the log variance of each dimension, or a factor ``A`` of one covariance ``A A'`` for all inputs.
    """

    z: Float[Tensor, "n d"]
    h: Float[Tensor, "n k"]
    density: Normal | None


class GaussianHead(nn.Module):
    r""":math:`q(z|x) = N(\mu(h), \mathrm{diag}\, \sigma^2(h))`, drawn as :math:`\mu + \sigma \epsilon`."""

    def __init__(self, inputs: int, latent: int) -> None:
        super().__init__()
        self.noise = latent
        self.linear = nn.Linear(inputs, 2 * latent)

    def forward(self, h: Float[Tensor, "n k"], eps: Float[Tensor, "n e"]) -> Encoded:
        """Draw z with the noise ``eps``."""
        mean, log_variance = self.linear(h).chunk(2, dim=-1)
        return Encoded(mean + (0.5 * log_variance).exp() * eps, h, Normal(mean, log_variance=log_variance))


class LinearHead(nn.Module):
    r""":math:`z = W_h h + W_e \epsilon + b`: the "implicit" posterior as released, in fact
    :math:`N(W_h h + b,\, W_e W_e^\top)` with one covariance for all x."""

    def __init__(self, inputs: int, noise: int, latent: int) -> None:
        super().__init__()
        self.noise = noise
        self.linear = nn.Linear(inputs + noise, latent)

    def forward(self, h: Float[Tensor, "n k"], eps: Float[Tensor, "n e"]) -> Encoded:
        """Draw z with the noise ``eps``."""
        of_h, of_noise = self.linear.weight.split([h.shape[-1], self.noise], dim=1)
        mean = nn.functional.linear(h, of_h, self.linear.bias)
        return Encoded(mean + eps @ of_noise.t(), h, Normal(mean, factor=of_noise))


class MLPHead(nn.Module):
    r""":math:`z = \mathrm{MLP}([h; \epsilon])`, Eq. 2 as written: a posterior without a density."""

    def __init__(self, inputs: int, noise: int, latent: int, hidden: int) -> None:
        super().__init__()
        self.noise = noise
        self.layers = nn.Sequential(nn.Linear(inputs + noise, hidden), nn.LeakyReLU(), nn.Linear(hidden, latent))

    def forward(self, h: Float[Tensor, "n k"], eps: Float[Tensor, "n e"]) -> Encoded:
        """Draw z with the noise ``eps``."""
        return Encoded(self.layers(torch.cat([h, eps], dim=-1)), h, None)


class PointHead(nn.Module):
    """z = W h + b: the autoencoder."""

    def __init__(self, inputs: int, latent: int) -> None:
        super().__init__()
        self.noise = 1
        self.linear = nn.Linear(inputs, latent)

    def forward(self, h: Float[Tensor, "n k"], eps: Float[Tensor, "n e"]) -> Encoded:
        """The point; the noise is not looked at."""
        return Encoded(self.linear(h), h, None)


Head = GaussianHead | LinearHead | MLPHead | PointHead


def build_head(section: ModelSection, inputs: int) -> Head:
    """The head that ``model.posterior`` names."""
    if section.posterior == "gaussian":
        return GaussianHead(inputs, section.latent)
    if section.posterior == "linear":
        return LinearHead(inputs, section.noise, section.latent)
    if section.posterior == "mlp":
        return MLPHead(inputs, section.noise, section.latent, section.hidden)
    return PointHead(inputs, section.latent)
