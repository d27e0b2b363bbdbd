"""Posteriors q(z | x) as heads of the encoder (Gaussian, implicit, a single point); the critics f(x, z) and g(z)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from capt.pretrain.latent.config import CriticSection, ModelSection

# Ways to lead a gradient past a module that is not to be trained by it.


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


# Multilayer perceptrons: the critics, and the networks of the synthetic clusters.


def mlp(*widths: int, activation: type[nn.Module] = nn.LeakyReLU) -> nn.Sequential:
    """Linear layers from ``widths[0]`` inputs to ``widths[-1]`` outputs with an activation between each two."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


# Gaussian densities: the posteriors whose density is known, and the prior.


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


# The critics f(x, z) and g(z): small networks that tell draws of the posterior from draws of the prior.


class CriticValues(NamedTuple):
    """Values of the critics, in float32 at least, at n draws of the posteriors (``q``) and of the prior (``p``).

    ``g_q`` and ``g_p`` are None where g is not trained.
    """

    f_q: Float[Tensor, " n"]
    f_p: Float[Tensor, " n"]
    g_q: Float[Tensor, " n"] | None
    g_p: Float[Tensor, " n"] | None


class Critics(nn.Module):
    """f on ``[z; h(x)]`` and g on ``z``."""

    def __init__(self, latent: int, representation: int, section: CriticSection) -> None:
        super().__init__()
        hidden = [section.hidden] * section.layers
        self.f = mlp(latent + representation, *hidden, 1)
        self.g = mlp(latent, *hidden, 1) if section.trained == "both" else None

    def forward(self, z: Float[Tensor, "n d"], h: Float[Tensor, "n k"], prior: Float[Tensor, "n d"]) -> CriticValues:
        """Evaluate both critics at draws of the posteriors and of the prior, each beside the ``h`` of its x."""
        draws = torch.cat([z, prior])
        f_q, f_p = _at_least_fp32(self.f(torch.cat([draws, h.repeat(2, 1)], dim=1))).view(2, -1).unbind()
        if self.g is None:
            return CriticValues(f_q, f_p, None, None)
        g_q, g_p = _at_least_fp32(self.g(draws)).view(2, -1).unbind()
        return CriticValues(f_q, f_p, g_q, g_p)


def _at_least_fp32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


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
