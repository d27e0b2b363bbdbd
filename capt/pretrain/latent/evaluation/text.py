"""Metrics of a set of sentences, the paper's way and the valid way; and the sentences that a model writes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError, DataError, shown
from capt.pretrain.latent.batches import LatentBatch, StepNoise
from capt.pretrain.latent.config import LatentJob
from capt.pretrain.latent.corpus import Sentences
from capt.pretrain.latent.evaluation.bounds import (
    Mixture,
    active_units,
    aggregate_information,
    dual_kl,
    fitted_normal,
    perplexity,
    prior,
)
from capt.pretrain.latent.evaluation.likelihood import FIT_DRAWS, LikelihoodBounds, likelihoods, weighted_nlls
from capt.pretrain.latent.evaluation.model import sample_posterior
from capt.pretrain.latent.models import LatentTextModel, LoadedLatentModel
from capt.pretrain.latent.posterior import Critics, Normal

# Sentences that a trained model writes: from the prior, from another sentence, and between two sentences.


logger = logging.getLogger(__name__)

MAX_WORDS = 78
"""The words of a generated sentence, at most: as released, decoding stops at 80 tokens with ``<s>`` and a last one."""


def sample(
    model: LoadedLatentModel,
    number: int,
    seed: int = 1,
    max_words: int = MAX_WORDS,
    *,
    top_p: float | None = None,
    unknown: bool = True,
) -> list[str]:
    """Decode ``number`` draws of the prior, greedily or by nucleus sampling.

    Args:
        model: a trained model.
        number: sentences.
        seed: of the draws of codes and words.
        max_words: words of a sentence, at most.
        top_p: probability of the words that each word is drawn from; None = the most probable word.
        unknown: whether the word for unknown ones may be written.

    Raises:
        ConfigError: a language model, which has no z; or ``top_p`` outside of 0 to 1.
    """
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p is a probability above 0, at most 1, got {top_p:g}")
    text_model, _ = model.text
    if text_model.encoder is None:
        raise ConfigError(f"{model.checkpoint}: a language model has no z to draw")
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(number, model.job.model.latent, generator=generator)
    return _decode(model, z, max_words, unknown=unknown, top_p=top_p, generator=generator)


def mean_codes(
    model: LoadedLatentModel, sentences: Sequence[str], samples: int = 128, seed: int = 1
) -> Float[Tensor, "n d"]:
    """Average ``samples`` draws of each sentence's posterior.

    Raises:
        DataError: a sentence without a known word, or over the job's limit.
        ConfigError: a language model, which has no encoder.
    """
    text_model, vocabulary = model.text
    if text_model.encoder is None:
        raise ConfigError(f"{model.checkpoint}: a language model has no encoder")
    means: list[Tensor] = []
    unknown: list[str] = []
    for sentence in sentences:
        words = vocabulary.encode(sentence.split())
        found = zip(sentence.split(), words, strict=True)
        # The word that a text itself writes for unknown ones needs no warning.
        unknown += [word for word, i in found if i == vocabulary.unknown_id and word != vocabulary.unknown]
        if len(words) == 0 or (words == vocabulary.unknown_id).all():
            raise DataError(f"{sentence!r}: no word of it is among the {len(vocabulary)} known ones")
        if len(words) > model.job.data.max_words:
            raise DataError(f"{sentence[:40]!r}...: {len(words)} words, data.max_words is {model.job.data.max_words}")
        # One sentence a batch and the same noise for each: a code does not depend on the other sentences.
        tokens = torch.from_numpy(Sentences.of([words]).rows(np.zeros(1, dtype=np.int64)))
        batch = LatentBatch(tokens, torch.zeros(1, dtype=torch.int64), 1, 1)
        noise = StepNoise(seed, ("codes",), None, 1, tokens.device)
        means.append(sample_posterior(model.job, text_model, batch, noise, samples).z.mean((0, 1)))
    if unknown:
        logger.warning(
            "unknown words, read as %s: %s; write words as the training text does (case, blanks before punctuation)",
            vocabulary.unknown,
            shown(" ".join(dict.fromkeys(unknown))),
        )
    return torch.stack(means)


def reconstruct(
    model: LoadedLatentModel, sentences: Sequence[str], max_words: int = MAX_WORDS, *, unknown: bool = True
) -> list[str]:
    """Decode the mean code of each sentence greedily; without ``unknown`` the word for unknown ones is not written."""
    return _decode(model, mean_codes(model, sentences), max_words, unknown=unknown)


def interpolate(
    model: LoadedLatentModel,
    first: str,
    second: str,
    steps: int = 11,
    max_words: int = MAX_WORDS,
    *,
    unknown: bool = True,
) -> list[tuple[float, str]]:
    """Decode ``(1 - t) z1 + t z2`` greedily for ``t`` from 0 (``first``) to 1 (``second``), as in the released code."""
    start, end = mean_codes(model, [first, second])
    t = torch.linspace(0, 1, steps)
    sentences = _decode(model, torch.lerp(start, end, t[:, None]), max_words, unknown=unknown)
    return list(zip([round(x, 3) for x in t.tolist()], sentences, strict=True))


def _decode(model: LoadedLatentModel, z: Tensor, max_words: int, *, unknown: bool, **draws: Any) -> list[str]:
    text_model, vocabulary = model.text
    never = () if unknown else (vocabulary.unknown_id,)
    rows = text_model.decoder.generate(z.to(text_model.device), max_words, never=never, **draws)
    return [" ".join(vocabulary.decode(row)) for row in rows]


_CRITIC_DRAWS = 64
"""The draws of each posterior in one pass of the critics."""


@dataclass(frozen=True)
class DrawCounts:
    """Numbers of draws for the metrics.

    Attributes:
        samples: draws of each posterior for the reconstruction and the dual.
        aggregate: sentences whose mixture is the aggregate posterior, on one rank only; 0 leaves that information out.
        mixture: draws for ``nelbo_iw``, half of the posterior and half of the prior; 0 leaves it out. A language model
            draws nothing, and ``nelbo_iw`` is its -log p(x).
    """

    samples: int
    aggregate: int = 0
    mixture: int = 0


@dataclass
class _Totals:
    """Sums over the sentences of one rank, in float64."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    draws: list[tuple[Tensor, Normal]] = field(default_factory=list)
    """Draw and density of each sentence of the aggregate posterior, batch by batch."""

    def add(self, **values: int | float | Tensor) -> None:
        """Add each value to the sum of its name."""
        for name, value in values.items():
            number = torch.as_tensor(value).cpu().double()
            self.sums[name] = self.sums[name] + number if name in self.sums else number


@torch.no_grad()
def text_metrics(
    job: LatentJob, model: LatentTextModel, batches: Iterable[tuple[int, LatentBatch]], counts: DrawCounts,
    unknown: int, bounds: LikelihoodBounds | None = None,
) -> dict[str, float]:  # fmt: skip
    """Compute the metrics of the sentences in ``batches``, averaged over the sentences of all ranks.

    Args:
        job: what the model was trained as.
        model: the model in evaluation mode.
        batches: whole batches of this rank, with their numbers (which choose the draws).
        counts: how much is drawn.
        unknown: the number of the unknown word.
        bounds: collects the bounds of each of this rank's sentences as well.
    """
    if job.model.posterior == "point":  # all draws are the same, and propose nothing
        counts = replace(counts, samples=1, mixture=0)
    totals = _Totals()
    for number, batch in batches:
        batch = batch.to(model.device)
        totals.add(sentences=batch.total, scored=batch.scored, unknown=(batch.tokens == unknown).sum())
        # A language model has no z to draw, and its likelihood is exact.
        if model.encoder is None:
            z = torch.zeros(batch.total, job.model.latent, device=model.device)
            found = likelihoods(model.decoder, z[None], batch.tokens, unknown)
            words = -found.words.double().sum()
            totals.add(rec=words)
            if counts.mixture:
                totals.add(nelbo_iw=words, nelbo_known=-found.known.double().sum())
            if bounds is not None:
                bounds.add_language_model(number, batch, found)
        else:
            _add_batch(job, model, number, batch, counts, unknown, totals, bounds)
    sums = distributed.gather_objects({name: value.numpy() for name, value in totals.sums.items()})
    metrics = _mean_metrics([{name: torch.from_numpy(value) for name, value in each.items()} for each in sums])
    if totals.draws:
        metrics["mi_aggregate"] = aggregate_information(*_joined(totals.draws))
    return metrics


def _add_batch(
    job: LatentJob, model: LatentTextModel, number: int, batch: LatentBatch, counts: DrawCounts, unknown: int,
    totals: _Totals, bounds: LikelihoodBounds | None,
) -> None:  # fmt: skip
    noise = StepNoise(0, ("measure", number), None, batch.total, model.device)
    # One set of draws serves everything below: the number that the largest part needs.
    proposed = bounds.posterior_draws(number, job.model.posterior) if bounds is not None else 0
    if counts.mixture and job.model.posterior == "mlp":
        proposed = max(proposed, FIT_DRAWS)
    posterior = sample_posterior(job, model, batch, noise, max(counts.samples, proposed))
    z, density = posterior.z[: counts.samples], posterior.density
    # The bounds take over the likelihoods of draws with a density; of other draws only the mean is needed.
    found = likelihoods(model.decoder, posterior.z if density is not None else z, batch.tokens, unknown)
    means = density.mean if density is not None else z.mean(0)
    rec = -found.words[: counts.samples].double().mean(0).sum()
    totals.add(rec=rec, au=_moments(means), au_sampled=_moments(z.mean(0)))
    if density is not None:
        information = aggregate_information(z[0], density)
        totals.add(kl_exact=density.kl().double().sum(), mi_batch=information * batch.total)
        if sum(len(drawn) for drawn, _ in totals.draws) < counts.aggregate:
            totals.draws.append((z[0], density))
    if model.critics is not None:
        _add_duals(model.critics, posterior.h, z, noise, totals)
    if counts.mixture:
        own = density if density is not None else fitted_normal(posterior.z)
        proposal = Mixture([own, prior(batch.total, z.shape[2], z.device)])
        words, known = weighted_nlls(model, batch, proposal, counts.mixture, noise.generator, unknown)
        totals.add(nelbo_iw=words.sum(), nelbo_known=known.sum())
    if bounds is not None:
        bounds.add(number, model, batch, posterior, found, counts.samples, is_point=job.model.posterior == "point")


def _moments(means: Tensor) -> Tensor:
    return torch.stack([means.double().sum(0), means.double().square().sum(0)])


def _add_duals(critics: Critics, h: Tensor, z: Tensor, noise: StepNoise, totals: _Totals) -> None:
    """Add the dual of KL(q(z|x) || p) with f, and that of KL(q(z) || p) with g where g is trained."""
    from_prior = noise.normal(len(z), z.shape[2]).view_as(z)
    passes = [
        critics(part.flatten(0, 1), h.repeat(len(part), 1), prior_part.flatten(0, 1))
        for part, prior_part in zip(z.split(_CRITIC_DRAWS), from_prior.split(_CRITIC_DRAWS), strict=True)
    ]

    def values(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in passes]).view(len(z), -1)

    totals.add(kl_dual=dual_kl(values("f_q"), values("f_p")).sum())
    if critics.g is not None:
        totals.add(kl_aggregate_dual=dual_kl(values("g_q"), values("g_p")).sum())


def _mean_metrics(ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Turn the sums of all ranks into the metrics."""
    names = {name for sums in ranks for name in sums}
    total = {name: torch.stack([sums[name] for sums in ranks if name in sums]).sum(0) for name in names}
    # Ranks hold different numbers of sentences: sums are added first, and divided once.
    sentences = float(total["sentences"])
    scored = float(total["scored"]) / sentences
    # Popped: what remains in ``total`` is divided by the number of sentences.
    unknown_share = float(total.pop("unknown") / total["scored"])
    units = {name: active_units(*(total.pop(name) / sentences)) for name in ("au", "au_sampled") if name in total}
    mean = {name: float(value) / sentences for name, value in total.items()}
    rec = mean["rec"]
    metrics = {"sentences": sentences, "scored_a_sentence": scored, "unknown_share": unknown_share}
    metrics |= {"rec": rec, "ppl_rec": perplexity(rec, scored)}
    if "nelbo_iw" in mean:
        metrics |= {"nelbo_iw": mean["nelbo_iw"], "ppl_iw": perplexity(mean["nelbo_iw"], scored)}
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
        # I(x; z) = E KL(q(z|x) || p) - KL(q(z) || p).
        metrics |= {"kl_aggregate_dual": kl_aggregate, "mi_dual": mean["kl_dual"] - kl_aggregate}
    return metrics | {name: float(count) for name, count in units.items()}


def _joined(draws: Sequence[tuple[Tensor, Normal]]) -> tuple[Tensor, Normal]:
    """Join the draws and the densities of all batches."""
    z, densities = zip(*draws, strict=True)
    variances = [density.log_variance for density in densities if density.log_variance is not None]
    log_variance = torch.cat(variances) if variances else None
    mean = torch.cat([density.mean for density in densities])
    return torch.cat(z), Normal(mean, log_variance=log_variance, factor=densities[0].factor)
