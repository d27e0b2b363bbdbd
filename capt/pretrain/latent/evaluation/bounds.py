r"""Divergences and likelihood bounds of latent-variable models: one function for each, with what it bounds.

With :math:`q = q(z|x)`, prior :math:`p = N(0, I)` and :math:`\mathrm{rec} = -E_q \log p(x|z)`:

* the exact KL of a Gaussian :math:`q` (:meth:`Normal.kl <capt.pretrain.latent.posterior.Normal.kl>`); then
  :math:`-\mathrm{ELBO} = \mathrm{rec} + \mathrm{KL} \ge -\log p(x)`;
* :func:`dual_kl`: a lower bound on the KL, so that :math:`\mathrm{rec} + \mathrm{dual}` bounds :math:`-\log p(x)` on
  no side;
* :func:`importance_weighted_nll`: an upper bound on :math:`-\log p(x)`, on average, for any proposal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.latent.batches import LatentBatch
from capt.pretrain.latent.evaluation.model import log_likelihood_gradients, log_likelihoods
from capt.pretrain.latent.models import LatentTextModel
from capt.pretrain.latent.posterior import Normal, standard_log_prob

# Perplexities with their errors, from a bound of each sentence.
#
# Let :math:`b_i` be a bound of :math:`-\log p(x_i)` in nats and :math:`w_i` the scored tokens of sentence i. The text
# has :math:`R = \sum b_i / \sum w_i` nats a token and the perplexity :math:`e^R`. Its errors are by the delta method:
#
# .. math::
#     \mathrm{se}(e^R) = \frac{e^R}{\sum w_i} \sqrt{\frac{n}{n-1} \sum_i (b_i - R w_i)^2}, \qquad
#     \mathrm{se_{draws}}(e^R) = \frac{e^R}{\sum w_i} \sqrt{\sum_i v_i}
#
# The first says how far another sample of such sentences would lead (the draws' noise is in it); the second, with
# :math:`v_i` the variance of :math:`b_i` over draws, how far other draws for these sentences would. Two models on the
# same sentences differ by far less than the first. Neither says how far a bound is from what it bounds.


METHOD = "delta method over sentences"


@dataclass(frozen=True)
class Bounds:
    """A bound of :math:`-\\log p(x)` of each of n sentences in nats, and its variance over draws."""

    nats: Float64[Tensor, " n"]
    variance: Float64[Tensor, " n"]

    def __getitem__(self, rows: Tensor) -> Bounds:
        return Bounds(self.nats[rows], self.variance[rows])


def weighted_bounds(log_weights: Float64[Tensor, "k n"]) -> Bounds:
    r"""Compute :math:`-\log \bar w` of each sentence, and its variance :math:`\mathrm{var}(w) / (k \bar w^2)`.

    The variance is a delta method too, and too small where rare draws hold the weight: it is NaN for one draw.
    """
    k = len(log_weights)
    total = torch.logsumexp(log_weights, 0)
    inverse_sample_size = torch.exp(torch.logsumexp(2 * log_weights, 0) - 2 * total)
    variance = (inverse_sample_size - 1 / k) * (k / (k - 1)) if k > 1 else torch.full_like(total, math.nan)
    return Bounds(math.log(k) - total, variance.clamp_min(0))


def estimate(bounds: Bounds, words: Float64[Tensor, " n"], draws: int) -> dict[str, Any]:
    """Write the perplexity of the text as a JSON object, whose numbers are all finite.

    Returns:
        ``value`` (the perplexity), ``nats`` (the bound, a mean over sentences), ``standard_error`` and ``draw_error``
        of the perplexity (None where there is one sentence or one draw), ``standard_error_by``, ``draws`` and
        ``sentences``. Where a bound is not finite, or its perplexity is more than a float holds: :func:`missing`.
    """
    n = len(words)
    nats = float(bounds.nats.mean())
    value = perplexity(nats, float(words.mean()))
    if not math.isfinite(value):
        count = int((~bounds.nats.isfinite()).sum())
        # A bound can be finite whose exponential is not.
        reason = f"the bound of {count} sentences is not finite" if count else "more than a float holds"
        return missing(reason, draws=draws, sentences=n) | ({} if count else {"nats": nats})
    # Delta method: the perplexity is exp(sum of nats / sum of words), whose error is that of the residuals.
    residuals = bounds.nats - bounds.nats.sum() / words.sum() * words
    scale = value / float(words.sum())
    over_sentences = scale * math.sqrt(n / (n - 1) * float(residuals.square().sum())) if n > 1 else None
    over_draws = scale * math.sqrt(float(bounds.variance.sum()))
    return {
        "value": value, "nats": nats, "standard_error": _finite(over_sentences), "standard_error_by": METHOD,
        "draw_error": _finite(over_draws), "draws": draws, "sentences": n,
    }  # fmt: skip


def missing(reason: str, **known: int) -> dict[str, Any]:
    """Write a perplexity that does not exist as a JSON object with the reason."""
    return {"value": None, "reason": reason, **known}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


_BLOCK_ELEMENTS = 1 << 22
"""The number of elements in one block of the pairwise densities."""


@runtime_checkable
class Proposal(Protocol):
    """A density over z for each of ``n`` sentences, such as :class:`~capt.pretrain.latent.posterior.Normal`."""

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
    # All n x n pairs together would not fit into memory.
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


# Importance-weighted bounds of :math:`\log p(x)` by any proposal: encoder, prior, a mixture, one refitted.
#
# For a proposal :math:`r` and :math:`k` draws (Burda et al. 2016)
#
# .. math::
#     \hat\ell_k(x) = \log \frac1k \sum_{j=1}^k \frac{p(x|z_j)\, p(z_j)}{r(z_j)}, \qquad E\, \hat\ell_k(x) \le \log
#       p(x)
#
# This holds for every model and every proposal whose support is the whole space. How close the bound comes depends on
# the proposal: a bound that is loose says that the proposal fits the decoder badly, and nothing about the model.


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
            ConfigError: ``number`` is not a multiple of the number of parts.
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


# A proposal that is refitted to the decoder, sentence by sentence: stochastic variational inference.
#
# The encoder's Gaussian may be far from the decoder's posterior :math:`p(z|x)`, and then every bound that it proposes
# for is loose. Here the ELBO of a frozen decoder is ascended over the mean and the log variances of a diagonal
# Gaussian of each sentence. The result is a proposal like any other: the bound is valid wherever the ascent ends.


STEPS = 30
"""The steps of the ascent by default."""

_LEARNING_RATE = 0.1
_BETAS = (0.9, 0.99)
_START_DRAWS = 8
"""The draws that choose the start of each sentence."""


def diagonal(normal: Normal) -> Normal:
    """The Gaussians with the same means and the same variances of each dimension, without correlations."""
    if normal.log_variance is not None:
        return normal
    assert normal.factor is not None
    log_variance = normal.factor.square().sum(1).clamp_min(1e-12).log()
    return Normal(normal.mean, log_variance=log_variance.expand_as(normal.mean))


@torch.no_grad()
def negative_elbo(
    model: LatentTextModel, batch: LatentBatch, density: Normal, draws: int, generator: torch.Generator
) -> Float[Tensor, " n"]:
    r"""Estimate :math:`-E_q \log p(x|z) + \mathrm{KL}(q \| p)` of each sentence with ``draws`` draws."""
    z = density.sample(draws, generator)
    return density.kl() - log_likelihoods(model.decoder, z, batch.tokens).mean(0)


def best_start(
    model: LatentTextModel, batch: LatentBatch, starts: Sequence[Normal], generator: torch.Generator
) -> Normal:
    """Choose for each sentence the diagonal Gaussian of the highest ELBO, by draws that are used for nothing else."""
    starts = [diagonal(start) for start in starts]
    losses = torch.stack([negative_elbo(model, batch, start, _START_DRAWS, generator) for start in starts])
    # argmin would choose NaN.
    losses = losses.where(losses.isfinite(), losses.new_tensor(math.inf))
    chosen, rows = losses.argmin(0), torch.arange(batch.total, device=losses.device)
    means, log_variances = (
        torch.stack([getattr(start, name) for start in starts])[chosen, rows] for name in ("mean", "log_variance")
    )
    return Normal(means, log_variance=log_variances)


def refitted_proposal(
    model: LatentTextModel,
    batch: LatentBatch,
    starts: Sequence[Normal],
    generator: torch.Generator,
    *,
    steps: int = STEPS,
) -> Normal:
    r"""Ascend the ELBO of each sentence from the best of ``starts``, with Adam and a rate that falls to 0.

    With :math:`z = \mu + \sigma \epsilon`, a fresh :math:`\epsilon` in every step and :math:`g = \nabla_z \log p(x|z)`

    .. math::
        \nabla_\mu = \mu - g, \qquad \nabla_{\log \sigma^2} = \tfrac12 (\sigma^2 - 1 - g\, \sigma \epsilon)

    are the gradients of -ELBO. The sentences of a batch are moved together, each by its own gradient alone: Adam works
    elementwise, and nothing is averaged or clipped over the batch.

    Args:
        model: the model, whose parameters are not changed.
        batch: the sentences.
        starts: where the ascent may begin, such as the encoder's Gaussian and the prior.
        generator: the source of the draws, on the CPU.
        steps: the number of steps.
    """
    start = best_start(model, batch, starts, generator)
    assert start.log_variance is not None
    mean, log_variance = start.mean.detach().clone(), start.log_variance.detach().clone()
    optimizer = torch.optim.Adam([mean, log_variance], betas=_BETAS)
    for step in range(steps):
        # Drawn on the CPU, so that every device has the same numbers.
        eps = torch.randn(mean.shape, generator=generator).to(mean)
        deviation = (0.5 * log_variance).exp()
        gradient = log_likelihood_gradients(model.decoder, (mean + deviation * eps)[None], batch.tokens)[0]
        mean.grad = mean - gradient
        log_variance.grad = 0.5 * (deviation.square() - 1 - gradient * deviation * eps)
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.step()
    return Normal(mean, log_variance=log_variance)
