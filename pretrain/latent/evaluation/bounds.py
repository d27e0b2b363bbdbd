r"""Divergences and likelihood bounds of latent-variable models: which number bounds what, and how.

With :math:`q = q(z|x)`, prior :math:`p = N(0, I)`:

* exact KL of a Gaussian :math:`q`; then :math:`-\mathrm{ELBO} = \mathrm{rec} + \mathrm{KL} \ge -\log p(x)`;
* the Fenchel dual :math:`E_q f - E_p e^f + 1 \le \mathrm{KL}` for *any* f, with equality at :math:`f = \log q/p`
  (the conjugate of :math:`u \log u - u + 1`). So :math:`\mathrm{rec} + \mathrm{dual} \le -\mathrm{ELBO}`: it bounds
  :math:`-\log p(x)` on no side;
* importance weighting: :math:`-\log \frac1k \sum_j p(x|z_j) p(z_j) / q(z_j)` is above :math:`-\log p(x)` on average for
  any proposal q, and falls to it as k grows (Burda et al. 2016).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from pretrain.latent.models.normal import Normal

_BLOCK = 1 << 22
"""Numbers in one block of the pairwise densities."""


def dual(f_q: Float[Tensor, "s n"], f_p: Float[Tensor, "t n"]) -> Float[Tensor, " n"]:
    r"""The Fenchel dual :math:`\bar f(z_q) - \overline{\exp f(z_p)} + 1` of each column; in float64.

    Args:
        f_q: values of f at draws of each posterior.
        f_p: values of f at draws of the prior.
    """
    return f_q.double().mean(0) - f_p.double().exp().mean(0) + 1


def importance_weighted_nll(
    log_likelihood: Float[Tensor, "k n"], log_prior: Float[Tensor, "k n"], log_q: Float[Tensor, "k n"]
) -> Float[Tensor, " n"]:
    r""":math:`-\log \frac1k \sum_j p(x|z_j) p(z_j) / q(z_j)` of each column, for draws :math:`z_j` of any density q."""
    weights = (log_likelihood + log_prior - log_q).double()
    return math.log(len(weights)) - torch.logsumexp(weights, 0)


def fitted_normal(z: Float[Tensor, "s n d"], inflate: float = 1.2) -> Normal:
    """A Gaussian proposal for each posterior that has no density: the draws' mean and inflated variance.

    Any proposal makes :func:`importance_weighted_nll` a valid bound; a wider one keeps its weights bounded.
    """
    variance, mean = torch.var_mean(z, 0)
    return Normal(mean, log_variance=(variance * inflate).clamp_min(1e-8).log())


def perplexity(nll_a_sentence: float, scored_a_sentence: float) -> float:
    """``exp`` of the nats a scored token (words and one ``</s>`` a sentence, as the tables count)."""
    return math.exp(nll_a_sentence / scored_a_sentence)


def aggregate_information(z: Float[Tensor, "n d"], posteriors: Normal, log_q: Float[Tensor, " n"]) -> float:
    r"""The mutual information :math:`E_{x, z \sim q(z|x)}[\log q(z|x) - \log \frac1m \sum_j q(z|x_j)]` in nats.

    ``z[i]`` is a draw of the i-th of the ``m`` posteriors. At most :math:`\log m`, whatever the true value.
    """
    total = 0.0
    m = len(posteriors.mean)
    block = max(1, _BLOCK // (m * z.shape[1]))
    for first in range(0, len(z), block):
        rows = z[first : first + block]
        log_mixture = torch.logsumexp(posteriors.log_prob(rows[:, None].expand(-1, m, -1)).double(), 1) - math.log(m)
        total += float((log_q[first : first + block].double() - log_mixture).sum())
    return total / len(z)


def active_units(first: Float[Tensor, " d"], second: Float[Tensor, " d"], threshold: float = 0.01) -> int:
    """Dimensions whose posterior mean varies over x by more than ``threshold`` (variance; Burda et al. 2016).

    Args:
        first: averages over x of the posterior means.
        second: averages over x of their squares.
    """
    return int((second - first.square() > threshold).sum())
