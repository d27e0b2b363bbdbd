r"""Divergences and likelihood bounds of latent-variable models: one function for each, with what it bounds.

With :math:`q = q(z|x)`, prior :math:`p = N(0, I)` and :math:`\mathrm{rec} = -E_q \log p(x|z)`:

* the exact KL of a Gaussian :math:`q` (:meth:`Normal.kl <pretrain.latent.models.normal.Normal.kl>`); then
  :math:`-\mathrm{ELBO} = \mathrm{rec} + \mathrm{KL} \ge -\log p(x)`;
* :func:`dual_kl`: a lower bound on the KL, so that :math:`\mathrm{rec} + \mathrm{dual}` bounds :math:`-\log p(x)` on
  no side;
* :func:`importance_weighted_nll`: an upper bound on :math:`-\log p(x)`, on average, for any proposal.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from pretrain.latent.models.normal import Normal, standard_log_prob

_BLOCK_ELEMENTS = 1 << 22
"""The number of elements in one block of the pairwise densities."""


@runtime_checkable
class Proposal(Protocol):
    """One density over z for each of ``n`` sentences, such as :class:`~pretrain.latent.models.normal.Normal`."""

    def sample(self, number: int, generator: torch.Generator | None = None) -> Float[Tensor, "s n d"]:
        """Draw ``number`` times from each density."""

    def log_prob(self, z: Float[Tensor, "s n d"]) -> Float[Tensor, "s n"]:
        """Compute the log density of each draw under the density of its sentence."""


def dual_kl(f_q: Float[Tensor, "s n"], f_p: Float[Tensor, "t n"]) -> Float[Tensor, " n"]:
    r"""Estimate the Fenchel dual :math:`E_q f - E_p e^f + 1 \le \mathrm{KL}(q \| p)` of each column in float64.

    It holds for *any* f, with equality at :math:`f = \log q/p` (the conjugate of :math:`u \log u - u + 1`).

    Args:
        f_q: values of f at draws of each posterior.
        f_p: values of f at draws of the prior.
    """
    return f_q.double().mean(0) - f_p.double().exp().mean(0) + 1


def log_weights(
    z: Float[Tensor, "k n d"], log_likelihood: Float[Tensor, "k n"], proposal: Proposal
) -> Float64[Tensor, "k n"]:
    r"""Compute :math:`\log p(x|z_j) p(z_j) / r(z_j)` of each draw in float64.

    Args:
        z: draws of the proposal.
        log_likelihood: :math:`\log p(x|z)` of each draw.
        proposal: the density r that ``z`` was drawn from.
    """
    z = z.double()  # densities of 32 dimensions are large numbers, whose differences matter
    return log_likelihood.double() + standard_log_prob(z) - proposal.log_prob(z)


def importance_weighted_nll(
    z: Float[Tensor, "k n d"], log_likelihood: Float[Tensor, "k n"], proposal: Proposal
) -> Float64[Tensor, " n"]:
    r"""Estimate :math:`-\log \frac1k \sum_j p(x|z_j) p(z_j) / r(z_j)` of each sentence in float64.

    It is above :math:`-\log p(x)` on average for any proposal r, and falls to it as k grows (Burda et al. 2016). The
    arguments are those of :func:`log_weights`.
    """
    return math.log(len(z)) - torch.logsumexp(log_weights(z, log_likelihood, proposal), 0)


def fitted_normal(z: Float[Tensor, "s n d"], inflate: float = 1.2) -> Normal:
    """Fit a Gaussian proposal to draws of each posterior: their mean and ``inflate`` times their variance.

    A posterior without a density needs one; a wider proposal keeps the importance weights bounded.
    """
    variance, mean = torch.var_mean(z, 0)
    return Normal(mean, log_variance=(variance * inflate).clamp_min(1e-8).log())


def perplexity(nll_per_sentence: float, scored_per_sentence: float) -> float:
    """Compute ``exp`` of the nats per scored token (words and one ``</s>`` per sentence, as the tables count).

    It is infinite where a float cannot hold it.
    """
    nats = nll_per_sentence / scored_per_sentence
    return math.exp(nats) if nats < 709 else math.inf


def aggregate_information(z: Float[Tensor, "n d"], posteriors: Normal) -> float:
    r"""Estimate :math:`E_{x, z \sim q(z|x)}[\log q(z|x) - \log \frac1n \sum_j q(z|x_j)]`, the mutual information.

    ``z[i]`` is a draw of the i-th of the ``n`` posteriors. The result, in nats, is at most :math:`\log n`.
    """
    n = len(posteriors.mean)
    log_q = posteriors.log_prob(z).double()
    block = max(1, _BLOCK_ELEMENTS // (n * z.shape[1]))
    total = 0.0
    for rows, log_q_rows in zip(z.split(block), log_q.split(block), strict=True):
        pairwise = posteriors.log_prob(rows[:, None].expand(-1, n, -1)).double()
        total += float((log_q_rows - torch.logsumexp(pairwise, 1) + math.log(n)).sum())
    return total / n


def active_units(first: Float[Tensor, " d"], second: Float[Tensor, " d"], threshold: float = 0.01) -> int:
    """Count the dimensions whose posterior mean has a variance over x above ``threshold`` (Burda et al. 2016).

    Args:
        first: averages over x of the posterior means.
        second: averages over x of their squares.
    """
    return int((second - first.square() > threshold).sum())
