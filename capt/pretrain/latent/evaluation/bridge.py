r"""A check of the tightest bound: annealed importance sampling from the prior to the posterior (Neal 2001).

Chains begin at draws of the prior and pass the densities :math:`\pi_t(z) \propto p(z)\, p(x|z)^{\beta_t}`,
:math:`0 = \beta_0 < \dots < \beta_T = 1`. At each of them a step of Hamiltonian Monte Carlo keeps :math:`\pi_t`. With

.. math:: \log w = \sum_{t=1}^T (\beta_t - \beta_{t-1}) \log p(x|z_{t-1})

the mean of w over the chains is an unbiased estimate of p(x), hence its log is on average not above :math:`\log p(x)`
(Grosse et al. 2015): a bound that needs neither the encoder nor a Gaussian that fits the posterior.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from capt.pretrain.base.randomness import derive
from capt.pretrain.latent.batches import LatentBatch
from capt.pretrain.latent.evaluation.bounds import estimate, missing, weighted_bounds
from capt.pretrain.latent.evaluation.likelihood import LikelihoodBounds
from capt.pretrain.latent.evaluation.model import log_likelihood_gradients, log_likelihoods
from capt.pretrain.latent.models import LatentTextModel
from capt.pretrain.latent.posterior import Normal

CHAINS, TEMPERATURES = 16, 50
"""The chains of each sentence, and the densities that each chain passes."""

_POWER = 3.0
"""``beta_t = (t / T) ** 3``: near the prior the likelihood of a draw varies most."""

_LEAPFROG, _STEP = 4, 0.35
"""Leapfrog steps of one Hamiltonian step, and their size in units of the guide's deviations."""


class Bridged(NamedTuple):
    """Results of the chains of n sentences.

    Attributes:
        log_weights: log w of each chain and sentence.
        acceptance: the share of Hamiltonian steps that were accepted.
    """

    log_weights: Float64[Tensor, "c n"]
    acceptance: float


class _State(NamedTuple):
    """Chains at z, with log p(x|z) and its gradient there."""

    z: Tensor
    log_p: Tensor
    gradient: Tensor

    @classmethod
    def at(cls, model: LatentTextModel, batch: LatentBatch, z: Tensor) -> _State:
        gradient = log_likelihood_gradients(model.decoder, z, batch.tokens)
        return cls(z, log_likelihoods(model.decoder, z, batch.tokens).double(), gradient)


@torch.no_grad()
def bridge(
    model: LatentTextModel, batch: LatentBatch, guide: Normal, generator: torch.Generator, *,
    chains: int = CHAINS, temperatures: int = TEMPERATURES,
) -> Bridged:  # fmt: skip
    """Run the chains of all sentences of a batch together.

    Args:
        model: the model in evaluation mode.
        batch: the sentences.
        guide: a diagonal Gaussian near each posterior. Its variances, tempered, are the scales of the steps; they
            decide how well the chains move and bias nothing.
        generator: the source of all random numbers, on the CPU.
        chains: the number of chains of each sentence.
        temperatures: T, the number of densities after the prior; the last one is the posterior.
    """
    assert guide.log_variance is not None
    excess = ((-guide.log_variance).exp() - 1).clamp_min(0)  # the precision that the sentence adds to the prior's
    state = _State.at(model, batch, torch.randn(chains, *guide.mean.shape, generator=generator).to(guide.mean))
    log_weights, accepted = torch.zeros_like(state.log_p), 0.0
    betas = [(t / temperatures) ** _POWER for t in range(temperatures + 1)]
    for before, beta in itertools.pairwise(betas):
        log_weights += (beta - before) * state.log_p
        # Behind the last density there is nothing to move for.
        if beta < 1:
            state, share = _move(model, batch, state, beta, (1 + beta * excess).rsqrt(), generator)
            accepted += share / (temperatures - 1)
    return Bridged(log_weights, accepted)


def _move(
    model: LatentTextModel,
    batch: LatentBatch,
    state: _State,
    beta: float,
    scale: Float[Tensor, "n d"],
    generator: torch.Generator,
) -> tuple[_State, float]:
    """Take one Hamiltonian step that keeps ``p(z) p(x|z) ** beta``; returns the share of accepted steps as well."""

    def slope(at: _State) -> Tensor:
        return scale * (beta * at.gradient - at.z)

    def energy(at: _State, momentum: Tensor) -> Tensor:
        return 0.5 * (at.z.double().square() + momentum.double().square()).sum(-1) - beta * at.log_p

    # Momenta are standard normal: ``scale`` takes the part of a mass matrix.
    start = torch.randn(state.z.shape, generator=generator).to(state.z)
    size = _STEP * (0.8 + 0.4 * float(torch.rand((), generator=generator)))  # no trajectory comes back to its start
    momentum, z, slope_there = start, state.z, slope(state)
    for step in range(_LEAPFROG):
        momentum = momentum + 0.5 * size * slope_there
        z = z + size * scale * momentum
        # Only the end of the trajectory needs log p, for the energy; a point within it needs the gradient alone.
        if step + 1 == _LEAPFROG:
            proposed = _State.at(model, batch, z)
        else:
            gradient = log_likelihood_gradients(model.decoder, z, batch.tokens)
            proposed = _State(z, state.log_p, gradient)
        slope_there = slope(proposed)
        momentum = momentum + 0.5 * size * slope_there
    # Metropolis: to accept by the change of energy corrects the error of the leapfrog exactly.
    log_ratio = energy(state, start) - energy(proposed, momentum)
    uniform = torch.rand(log_ratio.shape, generator=generator, dtype=torch.float64).to(log_ratio.device)
    accept = uniform.log() < log_ratio
    kept = _State(
        torch.where(accept[..., None], proposed.z, state.z),
        torch.where(accept, proposed.log_p, state.log_p),
        torch.where(accept[..., None], proposed.gradient, state.gradient),
    )
    return kept, float(accept.double().mean())


def bridge_check(model: LatentTextModel, collected: LikelihoodBounds, number: int) -> dict[str, Any]:
    """Bridge ``number`` of the weighted sentences, evenly over all lengths, and compare them with the tightest bound.

    Returns:
        The perplexity by the bridge as a JSON object (:func:`estimate`), with ``temperatures``, ``acceptance``,
        ``ppl_best_there`` (the tightest bound on the same sentences), and ``tightest_minus_bridge``: nats a sentence,
        with its standard error over sentences. Above 0 the bridge is tighter.
    """
    best = collected.best
    if best is None or not collected.batches:
        return missing("there are no importance-weighted bounds to check")
    total = sum(batch.total for batch, _ in collected.batches)
    number = min(number, total)
    chosen = ((torch.arange(number) + 0.5) * total / number).long()
    # ``chosen`` counts over all batches, and each batch bridges those that fall into it.
    parts, shares, first = [], [], 0
    for batch, guide in collected.batches:
        rows = chosen[(chosen >= first) & (chosen < first + batch.total)] - first
        if len(rows):
            assert guide.log_variance is not None
            own = LatentBatch(batch.tokens[rows], torch.arange(len(rows)), len(rows), len(rows))
            guide = Normal(guide.mean[rows], log_variance=guide.log_variance[rows])
            # A seed of its own: the chains of a batch do not depend on how many sentences others bridge.
            generator = torch.Generator().manual_seed(derive(0, "latent/bridge", first))
            found = bridge(model, own, guide, generator, chains=CHAINS, temperatures=TEMPERATURES)
            parts.append(found.log_weights.cpu())
            shares.append(found.acceptance * len(rows))
        first += batch.total
    bounds, words = weighted_bounds(torch.cat(parts, dim=1)), collected.words[chosen]
    there = best[1][chosen]
    gap = there.nats - bounds.nats
    return estimate(bounds, words, CHAINS) | {
        "temperatures": TEMPERATURES, "acceptance": sum(shares) / number,
        "ppl_best_there": estimate(there, words, 0)["value"],
        "tightest_minus_bridge": float(gap.mean()),
        "tightest_minus_bridge_standard_error": float(gap.std() / number**0.5) if number > 1 else None,
    }  # fmt: skip
