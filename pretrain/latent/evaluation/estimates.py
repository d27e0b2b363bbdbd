r"""Perplexities with their errors, from a bound of each sentence.

Let :math:`b_i` be a bound of :math:`-\log p(x_i)` in nats and :math:`w_i` the scored tokens of sentence i. The text has
:math:`R = \sum b_i / \sum w_i` nats a token and the perplexity :math:`e^R`. Its errors are by the delta method:

.. math::
    \mathrm{se}(e^R) = \frac{e^R}{\sum w_i} \sqrt{\frac{n}{n-1} \sum_i (b_i - R w_i)^2}, \qquad
    \mathrm{se_{draws}}(e^R) = \frac{e^R}{\sum w_i} \sqrt{\sum_i v_i}

The first says how far another sample of such sentences would lead (the draws' noise is in it); the second, with
:math:`v_i` the variance of :math:`b_i` over draws, how far other draws for these sentences would. Two models on the
same sentences differ by far less than the first. Neither says how far a bound is from what it bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from pretrain.latent.evaluation.bounds import perplexity

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
        reason = f"the bound of {count} sentences is not finite" if count else "more than a float holds"
        return missing(reason, draws=draws, sentences=n) | ({} if count else {"nats": nats})
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
