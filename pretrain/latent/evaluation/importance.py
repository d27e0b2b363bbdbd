r"""Importance-weighted bounds of :math:`\log p(x)` by any proposal: encoder, prior, a mixture, one refitted.

For a proposal :math:`r` and :math:`k` draws (Burda et al. 2016)

.. math::
    \hat\ell_k(x) = \log \frac1k \sum_{j=1}^k \frac{p(x|z_j)\, p(z_j)}{r(z_j)}, \qquad E\, \hat\ell_k(x) \le \log p(x)

This holds for every model and every proposal whose support is the whole space. How close the bound comes depends on
the proposal: a bound that is loose says that the proposal fits the decoder badly, and nothing about the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from pretrain.base.errors import ConfigError
from pretrain.latent.data.batches import Batch
from pretrain.latent.evaluation.bounds import Proposal, importance_weighted_nll
from pretrain.latent.evaluation.model import log_likelihoods
from pretrain.latent.models.build import TextModel
from pretrain.latent.models.normal import Normal


@dataclass(frozen=True)
class Mixture:
    r"""The defensive mixture :math:`\frac1m \sum_i r_i` of ``m`` densities, with the same number of draws from each.

    The weights are those of the whole mixture (deterministic mixture sampling; Owen and Zhou 2000), so the estimate of
    :math:`p(x)` stays unbiased. With the prior among the parts no weight exceeds :math:`m\, p(x|z)`.
    """

    parts: Sequence[Proposal]

    def sample(self, number: int, generator: torch.Generator | None = None) -> Float[Tensor, "s n d"]:
        """Draw ``number / m`` times from each part, part after part.

        Raises:
            ConfigError: ``number`` is no multiple of the number of parts.
        """
        if number < 1 or number % len(self.parts):
            raise ConfigError(f"a mixture of {len(self.parts)} proposals needs a multiple of that many draws: {number}")
        return torch.cat([part.sample(number // len(self.parts), generator) for part in self.parts])

    def log_prob(self, z: Float[Tensor, "s n d"]) -> Float[Tensor, "s n"]:
        """Compute the log density of each draw under the mixture of its sentence."""
        return torch.stack([part.log_prob(z) for part in self.parts]).logsumexp(0) - math.log(len(self.parts))


def prior(number: int, width: int, device: torch.device) -> Normal:
    """N(0, I) in ``width`` dimensions as the proposal of ``number`` sentences."""
    zeros = torch.zeros(number, width, device=device)
    return Normal(zeros, log_variance=zeros)


@torch.no_grad()
def log_likelihood_bound(
    model: TextModel, batch: Batch, proposal: Proposal, draws: int, generator: torch.Generator
) -> Float64[Tensor, " n"]:
    r"""Estimate :math:`\hat\ell_k(x)` of each sentence: nats, on average not above :math:`\log p(x)`.

    All sentences and draws are decoded together, in passes of bounded size.

    Args:
        model: the model in evaluation mode.
        batch: the sentences.
        proposal: a density for each sentence, such as :class:`~pretrain.latent.models.normal.Normal`, :func:`prior`,
            :class:`Mixture`, or that of :func:`~pretrain.latent.evaluation.refitted.refitted_proposal`.
        draws: ``k``.
        generator: the source of the draws, on the CPU.
    """
    z = proposal.sample(draws, generator)
    return -importance_weighted_nll(z, log_likelihoods(model.decoder, z, batch.tokens), proposal)
