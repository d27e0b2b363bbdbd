"""The posterior q(z | x) as a head on the encoder's output: Gaussian, implicit, or a single point."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pretrain.latent.config import ModelSection
from pretrain.latent.models.mlp import mlp
from pretrain.latent.models.normal import Normal


class EncoderOutput(NamedTuple):
    """The encoder's output for ``n`` inputs.

    Attributes:
        z: one draw of each posterior.
        h: the representations of the inputs, which the posteriors are made of.
        density: the posteriors' densities, where they are known.
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

    def forward(self, h: Float[Tensor, "n k"], eps: Float[Tensor, "n e"]) -> EncoderOutput:
        """Draw z with the noise ``eps``."""
        mean, log_variance = self.linear(h).chunk(2, dim=-1)
        return EncoderOutput(mean + (0.5 * log_variance).exp() * eps, h, Normal(mean, log_variance=log_variance))


class LinearHead(nn.Module):
    r"""The "implicit" posterior as released, :math:`z = W_h h + W_e \epsilon + b`.

    It is the Gaussian :math:`N(W_h h + b,\, W_e W_e^\top)`, whose covariance is the same for all x.
    """

    def __init__(self, inputs: int, noise: int, latent: int) -> None:
        super().__init__()
        self.noise = noise
        self.linear = nn.Linear(inputs + noise, latent)

    def forward(self, h: Float[Tensor, "n k"], eps: Float[Tensor, "n e"]) -> EncoderOutput:
        """Draw z with the noise ``eps``."""
        weight_h, weight_noise = self.linear.weight.split([h.shape[-1], self.noise], dim=1)
        mean = nn.functional.linear(h, weight_h, self.linear.bias)
        return EncoderOutput(mean + eps @ weight_noise.t(), h, Normal(mean, factor=weight_noise))


class MLPHead(nn.Module):
    r"""The implicit posterior of Eq. 2, :math:`z = \mathrm{MLP}([h; \epsilon])`, whose density is not known."""

    def __init__(self, inputs: int, noise: int, latent: int, hidden: int) -> None:
        super().__init__()
        self.noise = noise
        self.layers = mlp(inputs + noise, hidden, latent)

    def forward(self, h: Float[Tensor, "n k"], eps: Float[Tensor, "n e"]) -> EncoderOutput:
        """Draw z with the noise ``eps``."""
        return EncoderOutput(self.layers(torch.cat([h, eps], dim=-1)), h, None)


class PointHead(nn.Module):
    """The single point z = W h + b of an autoencoder."""

    def __init__(self, inputs: int, latent: int) -> None:
        super().__init__()
        self.noise = 1
        self.linear = nn.Linear(inputs, latent)

    def forward(self, h: Float[Tensor, "n k"], eps: Float[Tensor, "n e"]) -> EncoderOutput:
        """Return the point; the noise is not used."""
        return EncoderOutput(self.linear(h), h, None)


Head = GaussianHead | LinearHead | MLPHead | PointHead


def build_head(section: ModelSection, inputs: int) -> Head:
    """Build the head that ``model.posterior`` names, for encoder outputs of width ``inputs``."""
    if section.posterior == "gaussian":
        return GaussianHead(inputs, section.latent)
    if section.posterior == "linear":
        return LinearHead(inputs, section.noise, section.latent)
    if section.posterior == "mlp":
        return MLPHead(inputs, section.noise, section.latent, section.hidden)
    return PointHead(inputs, section.latent)
