"""Bounds, divergences and active units of a set of sentences, computed the paper's way and the valid way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pretrain.engine import distributed
from pretrain.latent.config import LatentJob
from pretrain.latent.data.batches import Batch
from pretrain.latent.data.noise import StepNoise
from pretrain.latent.evaluation.bounds import (
    active_units,
    aggregate_information,
    dual_kl,
    fitted_normal,
    importance_weighted_nll,
    perplexity,
)
from pretrain.latent.evaluation.importance import Mixture, prior
from pretrain.latent.evaluation.known import likelihoods, weighted_nlls
from pretrain.latent.evaluation.model import PosteriorSamples, log_likelihoods, sample_posterior
from pretrain.latent.models.build import TextModel
from pretrain.latent.models.critics import Critics
from pretrain.latent.models.normal import Normal

_FIT_DRAWS = 32
"""The draws, at least, of a posterior without a density that a Gaussian proposal is fitted to."""

_CRITIC_DRAWS = 64
"""The draws of each posterior in one pass of the critics."""


@dataclass(frozen=True)
class DrawCounts:
    """How much is drawn to compute the metrics.

    Attributes:
        samples: draws of each posterior for the reconstruction and the dual.
        mixture: draws for ``nelbo_iw``, half of the posterior and half of the prior; 0 leaves it out.
        weighted: draws for the importance-weighted likelihood; 0 leaves it out.
        aggregate: sentences whose mixture is the aggregate posterior, on one rank only; 0 leaves that information out.
    """

    samples: int
    mixture: int = 0
    weighted: int = 0
    aggregate: int = 0


@dataclass
class _Totals:
    """Sums over the sentences of one rank, in float64."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    draws: list[tuple[Tensor, Normal]] = field(default_factory=list)
    """One draw and the density of each sentence of the aggregate posterior, batch by batch."""

    def add(self, **values: int | float | Tensor) -> None:
        """Add each value to the sum of its name."""
        for name, value in values.items():
            number = torch.as_tensor(value).cpu().double()
            self.sums[name] = self.sums[name] + number if name in self.sums else number


@torch.no_grad()
def text_metrics(
    job: LatentJob, model: TextModel, batches: Iterable[tuple[int, Batch]], counts: DrawCounts, unknown: int
) -> dict[str, float]:
    """Compute the metrics of the sentences in ``batches``, averaged over the sentences of all ranks.

    Args:
        job: what the model was trained as.
        model: the model in evaluation mode.
        batches: whole batches of this rank, with their numbers (which choose the draws).
        counts: how much is drawn.
        unknown: the number of the unknown word.
    """
    if job.model.posterior == "point":  # all draws are the same, and there is nothing to weight
        counts = replace(counts, samples=1, mixture=0, weighted=0)
    totals = _Totals()
    for number, batch in batches:
        batch = batch.to(model.device)
        totals.add(sentences=batch.total, scored=batch.scored, unknown=(batch.tokens == unknown).sum())
        if model.encoder is None:
            z = torch.zeros(batch.total, job.model.latent, device=model.device)
            words, known = likelihoods(model.decoder, z[None], batch, unknown)
            totals.add(rec=-words.double().sum(), nelbo_iw=-words.double().sum(), nelbo_known=-known.double().sum())
        else:
            noise = StepNoise(0, ("measure", number), None, batch.total, model.device)
            posterior = _add_batch(job, model, batch, noise, counts, totals)
            if counts.mixture:
                nelbo, known = _mixture_nlls(model, batch, posterior, noise.generator, counts.mixture, unknown)
                totals.add(nelbo_iw=nelbo.sum(), nelbo_known=known.sum())
    metrics = _mean_metrics(distributed.gather_objects(totals.sums), counts.weighted)
    if totals.draws:
        metrics["mi_aggregate"] = aggregate_information(*_joined(totals.draws))
    return metrics


def _add_batch(
    job: LatentJob, model: TextModel, batch: Batch, noise: StepNoise, counts: DrawCounts, totals: _Totals
) -> PosteriorSamples:
    has_density = job.model.posterior != "mlp"
    proposed = counts.weighted if has_density else min(counts.weighted + counts.mixture, 1) * _FIT_DRAWS
    posterior = sample_posterior(job, model, batch, noise, max(counts.samples, proposed))
    z, density = posterior.z[: counts.samples], posterior.density
    decoded = posterior.z if density is not None else z
    log_p = log_likelihoods(model.decoder, decoded, batch.tokens)
    means = density.mean if density is not None else z.mean(0)
    totals.add(rec=-log_p[: counts.samples].double().mean(0).sum(), au=_moments(means), au_sampled=_moments(z.mean(0)))
    if density is not None:
        information = aggregate_information(z[0], density)
        totals.add(kl_exact=density.kl().double().sum(), mi_batch=information * batch.total)
        if sum(len(drawn) for drawn, _ in totals.draws) < counts.aggregate:
            totals.draws.append((z[0], density))
    if model.critics is not None:
        _add_duals(model.critics, posterior.h, z, noise, totals)
    if counts.weighted:
        totals.add(nll_iw=_weighted_nll(model, batch, posterior, log_p, counts.weighted, noise).sum())
    return posterior


def _moments(means: Tensor) -> Tensor:
    return torch.stack([means.double().sum(0), means.double().square().sum(0)])


def _add_duals(critics: Critics, h: Tensor, z: Tensor, noise: StepNoise, totals: _Totals) -> None:
    """Add the dual of KL(q(z|x) || p) with f, and that of KL(q(z) || p) with g where g is trained."""
    prior = noise.normal(len(z), z.shape[2]).view_as(z)
    passes = [
        critics(part.flatten(0, 1), h.repeat(len(part), 1), prior_part.flatten(0, 1))
        for part, prior_part in zip(z.split(_CRITIC_DRAWS), prior.split(_CRITIC_DRAWS), strict=True)
    ]

    def values(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in passes]).view(len(z), -1)

    totals.add(kl_dual=dual_kl(values("f_q"), values("f_p")).sum())
    if critics.g is not None:
        totals.add(kl_aggregate_dual=dual_kl(values("g_q"), values("g_p")).sum())


def _weighted_nll(
    model: TextModel, batch: Batch, posterior: PosteriorSamples, log_p: Tensor, number: int, noise: StepNoise
) -> Tensor:
    """Compute the importance-weighted likelihood with the posterior, or a Gaussian fitted to its draws, as proposal."""
    if posterior.density is not None:
        return importance_weighted_nll(posterior.z[:number], log_p[:number], posterior.density)
    proposal = fitted_normal(posterior.z)
    z = proposal.sample(number, noise.generator)
    return importance_weighted_nll(z, log_likelihoods(model.decoder, z, batch.tokens), proposal)


def _mixture_nlls(
    model: TextModel, batch: Batch, posterior: PosteriorSamples, generator: torch.Generator, draws: int, unknown: int
) -> tuple[Tensor, Tensor]:
    """Bound both likelihoods with draws of the posterior, or of the Gaussian fitted to it, and as many of the prior."""
    own = posterior.density if posterior.density is not None else fitted_normal(posterior.z)
    proposal = Mixture((own, prior(batch.total, posterior.z.shape[2], posterior.z.device)))
    return weighted_nlls(model, batch, proposal, draws, generator, unknown)


def _mean_metrics(ranks: Sequence[Mapping[str, Tensor]], weighted: int) -> dict[str, float]:
    """Turn the sums of all ranks into the metrics."""
    names = {name for sums in ranks for name in sums}
    total = {name: torch.stack([sums[name] for sums in ranks if name in sums]).sum(0) for name in names}
    sentences = float(total["sentences"])
    scored = float(total["scored"]) / sentences
    unknown_share = float(total.pop("unknown") / total["scored"])
    units = {name: active_units(*(total.pop(name) / sentences)) for name in ("au", "au_sampled") if name in total}
    mean = {name: float(value) / sentences for name, value in total.items()}
    rec = mean["rec"]
    metrics = {"sentences": sentences, "scored_a_sentence": scored, "unknown_share": unknown_share}
    metrics |= {"rec": rec, "ppl_rec": perplexity(rec, scored)}
    if "nelbo_iw" in mean:
        metrics |= {"nelbo_iw": mean["nelbo_iw"], "ppl_all": perplexity(mean["nelbo_iw"], scored)}
        metrics["ppl_known"] = perplexity(mean["nelbo_known"], scored * (1 - unknown_share))
    if "kl_exact" in mean:
        nelbo = rec + mean["kl_exact"]
        metrics |= {"kl_exact": mean["kl_exact"], "nelbo_exact": nelbo, "ppl_exact": perplexity(nelbo, scored)}
        metrics["mi_batch"] = mean["mi_batch"]
    if "kl_dual" in mean:
        kl = mean["kl_dual"]
        metrics |= {"kl_dual": kl, "kl_dual_clamped": max(0.0, kl)}
        metrics |= {"nelbo_dual": rec + kl, "ppl_dual": perplexity(rec + kl, scored)}
    if "kl_aggregate_dual" in mean:
        kl_aggregate = mean["kl_aggregate_dual"]
        metrics |= {"kl_aggregate_dual": kl_aggregate, "mi_dual": mean["kl_dual"] - kl_aggregate}
    if "nll_iw" in mean:
        nll = mean["nll_iw"]
        metrics |= {f"nll_iw{weighted}": nll, f"ppl_iw{weighted}": perplexity(nll, scored)}
    return metrics | {name: float(count) for name, count in units.items()}


def _joined(draws: Sequence[tuple[Tensor, Normal]]) -> tuple[Tensor, Normal]:
    """Join the draws and the densities of all batches."""
    z, densities = zip(*draws, strict=True)
    variances = [density.log_variance for density in densities if density.log_variance is not None]
    log_variance = torch.cat(variances) if variances else None
    mean = torch.cat([density.mean for density in densities])
    return torch.cat(z), Normal(mean, log_variance=log_variance, factor=densities[0].factor)
