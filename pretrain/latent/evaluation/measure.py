r"""Likelihood bounds, divergences and active units of a set of sentences, the paper's way and the valid way.

Per sentence, with S draws of its posterior and as many of the prior: reconstruction, exact KL (where the posterior has
a density), the dual with f and with g, and the importance-weighted likelihood. All sums are in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pretrain.engine import distributed
from pretrain.latent.config import LatentJob
from pretrain.latent.data.batches import Batch
from pretrain.latent.data.noise import StepNoise
from pretrain.latent.data.sampled_batch import sample_batch
from pretrain.latent.evaluation.bounds import (
    active_units,
    aggregate_information,
    fitted_normal,
    importance_weighted_nll,
    perplexity,
)
from pretrain.latent.models.critics import Critics
from pretrain.latent.models.normal import Normal, standard_log_prob
from pretrain.latent.models.posterior import EncoderOutput
from pretrain.latent.models.text import TextDecoder, TextEncoder
from pretrain.latent.training.semi_amortized import refined_density

ROWS_AT_ONCE = 512
"""Sequences in one pass of the decoder."""

_TO_FIT = 32
"""Draws, at least, of a posterior without a density, to fit the proposal of the importance weighting."""


@dataclass(frozen=True)
class Modules:
    """A model in evaluation mode; a language model has no encoder, and only an implicit posterior has critics."""

    encoder: TextEncoder | None
    decoder: TextDecoder
    critics: Critics | None

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> Modules:
        """Of a job's modules by name."""
        encoder, decoder, critics = (modules.get(name) for name in ("encoder", "decoder", "critics"))
        assert encoder is None or isinstance(encoder, TextEncoder)
        assert isinstance(decoder, TextDecoder)
        assert critics is None or isinstance(critics, Critics)
        return cls(encoder, decoder, critics)


@dataclass
class Sums:
    """Totals over sentences of one rank."""

    values: dict[str, float] = field(default_factory=dict)
    moments: Tensor | None = None
    sampled_moments: Tensor | None = None
    kept: list[tuple[Tensor, Normal, Tensor]] = field(default_factory=list)
    """For the aggregate posterior: a draw, its density and log q of each sentence."""

    def add(self, **values: int | float | Tensor) -> None:
        """Add to named totals."""
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + float(value)


def log_likelihoods(decoder: TextDecoder, z: Tensor, tokens: Tensor) -> Tensor:
    """log p(x_i | z_si) for ``z`` of shape (S, n, d): ``(S, n)``, many draws in one pass of the decoder."""
    at_once = max(1, ROWS_AT_ONCE // len(tokens))
    parts = [
        decoder.log_likelihood(part.flatten(0, 1), tokens.repeat(len(part), 1)).view(len(part), -1)
        for part in z.split(at_once)
    ]
    return torch.cat(parts)


@torch.no_grad()
def measure(
    job: LatentJob, modules: Modules, batches: Iterator[tuple[int, Batch]], samples: int, weighted: int, aggregate: int,
    device: torch.device,
) -> dict[str, float]:  # fmt: skip
    """The figures of the sentences in ``batches``.

    Args:
        job: what the model was trained as.
        modules: the model.
        batches: whole batches of this rank, with their numbers (which choose the draws).
        samples: draws of each posterior for reconstruction and dual.
        weighted: draws for the importance-weighted likelihood; 0 = none.
        aggregate: sentences for the mutual information with the aggregate posterior; 0 = none (one rank only).
        device: of the modules.
    """
    sums = Sums()
    for number, batch in batches:
        batch = batch.to(device)
        sums.add(sentences=batch.total, scored=batch.scored)
        if modules.encoder is None:
            z = torch.zeros(batch.total, job.model.latent, device=device)
            sums.add(rec=-modules.decoder.log_likelihood(z, batch.tokens).double().sum())
            continue
        noise = StepNoise(0, ("measure", number), None, batch.total, device)
        _measure_batch(job, modules, batch, noise, samples, weighted, aggregate, sums)
    return _figures(job, sums, weighted)


@torch.no_grad()
def draws(
    job: LatentJob, modules: Modules, batch: Batch, noise: StepNoise, number: int
) -> tuple[Tensor, Tensor, Normal | None]:
    """h, ``number`` draws of each posterior ``(S, n, d)``, and the density where there is one; SaVAE's are refined."""
    assert modules.encoder is not None
    head = modules.encoder.head
    h = modules.encoder.represent(batch.tokens)
    eps = noise.normal(number, head.noise)
    encoded: EncoderOutput = head(h.repeat(number, 1), eps)
    z, density = encoded.z.view(number, batch.total, -1), head(h, eps[: len(h)]).density
    if job.objective.svi_steps:
        still = job.model_copy(update={"model": job.model.model_copy(update={"dropout": 0.0, "encoder_dropout": 0.0})})
        sampled = sample_batch(still, batch, noise)
        first = head(h, sampled.eps)
        density = refined_density(modules.decoder, first, sampled, job.objective.beta_end, job.objective)
        assert density.log_variance is not None
        z = density.mean + (0.5 * density.log_variance).exp() * eps.view_as(z)
    return h, z, density


def _measure_batch(
    job: LatentJob, modules: Modules, batch: Batch, noise: StepNoise, samples: int, weighted: int, aggregate: int,
    sums: Sums,
) -> None:  # fmt: skip
    point = job.model.posterior == "point"
    samples = 1 if point else samples
    needed = weighted
    if density_is_missing(job):
        needed = _TO_FIT if weighted and not point else 0
    h, z, density = draws(job, modules, batch, noise, max(samples, needed))
    of_use = samples if density is None else len(z)
    log_p = log_likelihoods(modules.decoder, z[:of_use], batch.tokens)
    sums.add(rec=-log_p[:samples].double().mean(0).sum())
    means = density.mean if density is not None else z[:samples].mean(0)
    sums.moments = _moments(means, sums.moments)
    sums.sampled_moments = _moments(z[:samples].mean(0), sums.sampled_moments)
    if density is not None:
        kl = density.kl()
        log_q = density.log_prob(z)
        sums.add(kl=kl.double().sum(), mi_batch=aggregate_information(z[0], density, log_q[0]) * batch.total)
        if sum(len(draw) for draw, _, _ in sums.kept) < aggregate:
            sums.kept.append((z[0], density, log_q[0]))
    if modules.critics is not None:
        _critic_values(modules.critics, h, z[:samples], noise, sums)
    if weighted and not point:
        if density is None:
            proposal = fitted_normal(z)
            z = proposal.sample(weighted, noise.generator)
            log_p, log_q = log_likelihoods(modules.decoder, z, batch.tokens), proposal.log_prob(z)
        nll = importance_weighted_nll(log_p[:weighted], standard_log_prob(z[:weighted]), log_q[:weighted])
        sums.add(nll_iw=nll.sum())


def density_is_missing(job: LatentJob) -> bool:
    """Whether draws are all that is known of the posterior."""
    return job.model.posterior in ("mlp", "point")


def _critic_values(critics: Critics, h: Tensor, z: Tensor, noise: StepNoise, sums: Sums) -> None:
    samples = len(z)
    prior = noise.normal(samples, z.shape[2])
    for part, other in zip(z.split(64), prior.view_as(z).split(64), strict=True):
        values = critics(part.flatten(0, 1), h.repeat(len(part), 1), other.flatten(0, 1))
        sums.add(f_q=values.f_q.double().sum() / samples, exp_f_p=values.f_p.double().exp().sum() / samples)
        if values.g_q is not None and values.g_p is not None:
            sums.add(g_q=values.g_q.double().sum() / samples, exp_g_p=values.g_p.double().exp().sum() / samples)


def _moments(means: Tensor, before: Tensor | None) -> Tensor:
    moments = torch.stack([means.double().sum(0), means.double().square().sum(0)])
    return moments if before is None else before + moments


def _figures(job: LatentJob, sums: Sums, weighted: int) -> dict[str, float]:
    gathered = distributed.gather_objects((sums.values, sums.moments, sums.sampled_moments))
    names = {name for values, _, _ in gathered for name in values}
    total = {name: sum(values.get(name, 0.0) for values, _, _ in gathered) for name in names}
    sentences = total.pop("sentences")
    scored = total.pop("scored") / sentences
    mean = {name: value / sentences for name, value in total.items()}
    figures = {"sentences": sentences, "scored_a_sentence": scored, "rec": mean["rec"]}
    figures["ppl_rec"] = perplexity(mean["rec"], scored)
    if "kl" in mean:
        nelbo = mean["rec"] + mean["kl"]
        figures |= {"kl_exact": mean["kl"], "nelbo_exact": nelbo, "ppl_exact": perplexity(nelbo, scored)}
        figures["mi_batch"] = mean["mi_batch"]
    if "f_q" in mean:
        kl = mean["f_q"] - mean["exp_f_p"] + 1
        figures |= {"kl_dual": kl, "kl_dual_clamped": max(0.0, kl)}
        figures |= {"nelbo_dual": mean["rec"] + kl, "ppl_dual": perplexity(mean["rec"] + kl, scored)}
        if "g_q" in mean:
            aggregate = mean["g_q"] - mean["exp_g_p"] + 1
            figures |= {"kl_aggregate_dual": aggregate, "mi_dual": kl - aggregate}
    if "nll_iw" in mean:
        figures |= {f"nll_iw{weighted}": mean["nll_iw"], f"ppl_iw{weighted}": perplexity(mean["nll_iw"], scored)}
    for name, parts in (("au", [row[1] for row in gathered]), ("au_sampled", [row[2] for row in gathered])):
        moments = [part.cpu() for part in parts if part is not None]
        if moments:
            first, second = torch.stack(moments).sum(0) / sentences
            figures[name] = float(active_units(first, second))
    if sums.kept:
        figures["mi_aggregate"] = _aggregate(sums)
    return figures


def _aggregate(sums: Sums) -> float:
    z, densities, log_q = zip(*sums.kept, strict=True)
    variances = [density.log_variance for density in densities]
    whole = Normal(
        torch.cat([density.mean for density in densities]),
        log_variance=None if variances[0] is None else torch.cat([v for v in variances if v is not None]),
        factor=densities[0].factor,
    )
    return aggregate_information(torch.cat(z), whole, torch.cat(log_q))
