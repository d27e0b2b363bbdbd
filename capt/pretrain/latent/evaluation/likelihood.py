"""The perplexity of a text by every valid bound: exact KL, and importance weighting by four proposals."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from capt.pretrain.base.randomness import derive
from capt.pretrain.latent.batches import LatentBatch
from capt.pretrain.latent.corpus import predicted
from capt.pretrain.latent.evaluation.bounds import (
    STEPS,
    Bounds,
    Mixture,
    Proposal,
    estimate,
    fitted_normal,
    importance_weighted_nll,
    log_weights,
    missing,
    prior,
    refitted_proposal,
    weighted_bounds,
)
from capt.pretrain.latent.evaluation.model import PosteriorSamples, passes
from capt.pretrain.latent.models import LatentTextModel, TextDecoder
from capt.pretrain.latent.posterior import Normal

# The likelihood of a text with and without its unknown words.
#
# Let U be the positions of a sentence whose word is unknown and K all others, ``</s>`` among them. The decoder gives
#
# .. math::
#     \log p(x|z) = \sum_t \log p(w_t | w_{<t}, z), \qquad \log p_K(x|z) = \sum_{t \in K} \log p(w_t | w_{<t}, z)
#
# The known words are predicted by a model that is told for nothing where unknown words are: every position is read,
# also as ``<unk>``, but only those of K are scored. With :math:`p_K(x) = \int p(z)\, p_K(x|z)\, dz` the perplexity of
# a known word is, over all sentences,
#
# .. math::
#     \mathrm{PPL}_K = \exp \frac{-\sum_x \log p_K(x)}{\sum_x |K|}
#
# ``<unk>`` represents thousands of words and is far easier to predict than any of them, or, where training never met
# it, far harder. A perplexity in which it counts as one word says little between texts whose share of it differs.


@dataclass(frozen=True)
class Likelihoods:
    """log p(x | z) and log p_K(x | z) of ``s`` draws of each of ``n`` sentences."""

    words: Float[Tensor, "s n"]
    known: Float[Tensor, "s n"]

    def first(self, draws: int) -> Likelihoods:
        """Likelihoods of the first ``draws`` draws."""
        return Likelihoods(self.words[:draws], self.known[:draws])


def likelihoods(
    decoder: TextDecoder, z: Float[Tensor, "s n d"], tokens: Int[Tensor, "n length"], unknown: int
) -> Likelihoods:
    """Compute both likelihoods of each draw, many sentences and draws in one pass of the decoder.

    Args:
        decoder: the decoder.
        z: the draws.
        tokens: the sentences.
        unknown: the number of the unknown word.
    """
    words, known = [], []
    for part, own in passes(z, tokens):
        scores = decoder.token_log_likelihoods(part, own)
        words.append(scores.sum(0))
        known.append((scores * (own[:, 1:] != unknown).t()).sum(0))
    return Likelihoods(torch.cat(words).view(z.shape[:2]), torch.cat(known).view(z.shape[:2]))


@torch.no_grad()
def weighted_nlls(
    model: LatentTextModel, batch: LatentBatch, proposal: Proposal, draws: int, generator: torch.Generator, unknown: int
) -> tuple[Float64[Tensor, " n"], Float64[Tensor, " n"]]:
    r"""Estimate :math:`-\log p(x)` and :math:`-\log p_K(x)` of each sentence by importance weighting.

    The draws are the same for both, and both are, on average, not below the truth
    (:func:`~capt.pretrain.latent.evaluation.bounds.importance_weighted_nll`).

    Args:
        model: the model in evaluation mode.
        batch: the sentences.
        proposal: a density for each sentence, such as :class:`~capt.pretrain.latent.posterior.Normal`,
            :func:`~capt.pretrain.latent.evaluation.bounds.prior`, or that of
            :func:`~capt.pretrain.latent.evaluation.bounds.refitted_proposal`.
        draws: ``k``.
        generator: the source of the draws, on the CPU.
        unknown: as in :func:`likelihoods`.
    """
    z = proposal.sample(draws, generator)
    found = likelihoods(model.decoder, z, batch.tokens, unknown)
    return importance_weighted_nll(z, found.words, proposal), importance_weighted_nll(z, found.known, proposal)


PROPOSALS = ("q", "prior", "mixture", "refitted")
"""The proposals of the importance weighting."""

FIT_DRAWS = 32
"""The draws, at least, of a posterior without a density that a Gaussian proposal is fitted to."""

_POINT_LOG_VARIANCE = -2.0
"""Log variance of the Gaussian around an autoencoder's point, from which a proposal is refitted."""


class _Drawn(NamedTuple):
    """Draws of a proposal for n sentences, and what the decoder makes of them."""

    z: Tensor
    likelihoods: Likelihoods


class WordBounds(NamedTuple):
    """A bound of all words of n sentences, and the same of their known words."""

    words: Bounds
    known: Bounds


@dataclass
class LikelihoodBounds:
    """Collects bounds of :math:`-\\log p(x)`, sentence by sentence, while a text is measured batch by batch.

    The mixture has the draws of q and of the prior, and the refitted proposal, mixed with the prior, those of both.

    Attributes:
        draws: draws of q, of the prior and of the refitted Gaussian; 0 leaves importance weighting out.
        unknown: the number of the unknown word.
        weighted: the numbers of the batches that are weighted; None for all.
        refit_steps: steps of the ascent of the refitted Gaussian.
    """

    draws: int
    unknown: int
    weighted: Collection[int] | None = None
    refit_steps: int = STEPS
    batches: list[tuple[LatentBatch, Normal]] = field(default_factory=list)
    """The weighted batches with their refitted proposals, for the bridge."""
    _found: dict[str, list[WordBounds]] = field(default_factory=dict)
    _draws: dict[str, int] = field(default_factory=dict)
    _words: list[Tensor] = field(default_factory=list)
    _known: list[Tensor] = field(default_factory=list)
    _is_weighted: list[Tensor] = field(default_factory=list)
    _reasons: dict[str, str] = field(default_factory=dict)

    def posterior_draws(self, number: int, posterior: str) -> int:
        """The draws of a posterior of this kind (``model.posterior``) that a batch needs."""
        if not self._weighs(number) or posterior == "point":
            return 0
        return FIT_DRAWS if posterior == "mlp" else self.draws

    def _weighs(self, number: int) -> bool:
        return self.draws > 0 and (self.weighted is None or number in self.weighted)

    def add_language_model(self, number: int, batch: LatentBatch, found: Likelihoods) -> None:
        """Add sentences whose likelihood is known: there is no latent variable, and ``found`` is of one draw.

        ``ppl_best`` is still of the weighted batches, so that other models are compared on the same sentences.
        """
        self._start(batch, weighted=self._weighs(number))
        no_variance = torch.zeros(batch.total, dtype=torch.float64)
        pair = (Bounds(-log_p[0].double().cpu(), no_variance) for log_p in (found.words, found.known))
        self._add("exact", WordBounds(*pair), 0)
        self._reasons |= dict.fromkeys(PROPOSALS, "a language model has no z to draw: ppl_exact is its perplexity")

    def add(
        self, number: int, model: LatentTextModel, batch: LatentBatch, posterior: PosteriorSamples, found: Likelihoods,
        samples: int, *, is_point: bool,
    ) -> None:  # fmt: skip
        """Add the sentences of a batch.

        Args:
            number: the number of the batch, which chooses its draws.
            model: the model in evaluation mode.
            batch: the sentences.
            posterior: the posteriors, their density and draws.
            found: the likelihoods of these draws, of the first ``samples`` at least.
            samples: how many of them the exact bound takes.
            is_point: the posterior is the single point of an autoencoder.
        """
        weighted = self._weighs(number)
        self._start(batch, weighted=weighted)
        if posterior.density is not None:
            kl = posterior.density.kl()
            first = found.first(samples)
            self._add("exact", WordBounds(_exact(first.words, kl), _exact(first.known, kl)), samples)
        else:
            self._reasons["exact"] = (
                "the posterior is a point: its KL is infinite" if is_point else "the posterior has no density"
            )
        if weighted:
            generator = torch.Generator().manual_seed(derive(0, "latent/bounds", number))
            self._weight(model, batch, posterior, found, generator, is_point=is_point)

    def _weight(
        self, model: LatentTextModel, batch: LatentBatch, posterior: PosteriorSamples, found: Likelihoods,
        generator: torch.Generator, *, is_point: bool,
    ) -> None:  # fmt: skip
        def draw(proposal: Proposal) -> _Drawn:
            z = proposal.sample(self.draws, generator)
            return _Drawn(z, likelihoods(model.decoder, z, batch.tokens, self.unknown))

        p = prior(batch.total, posterior.z.shape[2], posterior.z.device)
        from_prior = draw(p)
        self._add_weighted("prior", p, from_prior)
        if is_point:
            # An infinitely narrow density cannot propose; a Gaussian around the point only begins the refit.
            point = posterior.z[0]
            start = Normal(point, log_variance=torch.full_like(point, _POINT_LOG_VARIANCE))
            self._reasons |= dict.fromkeys(("q", "mixture"), "the posterior is a point and proposes nothing")
        else:
            # Draws with a density propose as they are, else a Gaussian fitted to them does.
            if posterior.density is not None:
                start, from_q = posterior.density, _Drawn(posterior.z[: self.draws], found.first(self.draws))
            else:
                start = fitted_normal(posterior.z)
                from_q = draw(start)
            self._add_weighted("q", start, from_q)
            # The draws of both components together are stratified draws of their mixture.
            self._add_weighted("mixture", Mixture([start, p]), from_q, from_prior)
        refitted = refitted_proposal(model, batch, [start, p], generator, steps=self.refit_steps)
        # The prior in the mixture bounds the weights by 2 p(x|z), however badly the refitted Gaussian fits.
        self._add_weighted("refitted", Mixture([refitted, p]), draw(refitted), from_prior)
        self.batches.append((batch, refitted))

    def _add_weighted(self, name: str, proposal: Proposal, *parts: _Drawn) -> None:
        z = torch.cat([part.z for part in parts])
        words = torch.cat([part.likelihoods.words for part in parts])
        known = torch.cat([part.likelihoods.known for part in parts])
        self._add(name, WordBounds(_weighted(z, words, proposal), _weighted(z, known, proposal)), len(z))

    def _start(self, batch: LatentBatch, *, weighted: bool) -> None:
        self._words.append(predicted(batch.tokens).sum(1).double().cpu())
        self._known.append((predicted(batch.tokens) & (batch.tokens[:, 1:] != self.unknown)).sum(1).double().cpu())
        self._is_weighted.append(torch.full((batch.total,), weighted))

    def _add(self, name: str, bounds: WordBounds, draws: int) -> None:
        self._found.setdefault(name, []).append(bounds)
        self._draws[name] = draws

    def bounds(self, name: str, *, known: bool = False) -> Bounds | None:
        """Every sentence's bound by ``exact`` or one of `PROPOSALS`; of weighted sentences alone for the latter.

        With ``known`` it is that of the known words (:mod:`~capt.pretrain.latent.evaluation.likelihood`).
        """
        parts = [pair.known if known else pair.words for pair in self._found.get(name, ())]
        if not parts:
            return None
        return Bounds(torch.cat([part.nats for part in parts]), torch.cat([part.variance for part in parts]))

    @property
    def best(self) -> tuple[str, Bounds] | None:
        """The tightest bound of the weighted sentences as a whole, and which it is; of all where none is weighted."""
        rows = self._compared()
        exact = self.bounds("exact")
        found = {name: bounds for name in PROPOSALS if (bounds := self.bounds(name)) is not None}
        if exact is not None:
            found["exact"] = exact[rows]
        finite = {name: bounds for name, bounds in found.items() if bool(bounds.nats.isfinite().all())}
        if not finite:
            return None
        name = min(finite, key=lambda name: float(finite[name].nats.sum()))
        return name, finite[name]

    def _compared(self) -> Tensor:
        weighted = torch.cat(self._is_weighted)
        return weighted if bool(weighted.any()) else torch.ones_like(weighted)

    @property
    def words(self) -> Tensor:
        """The scored tokens of the sentences that :attr:`best` is of."""
        return torch.cat(self._words)[self._compared()]

    def sentences(self) -> str:
        """Write the bounds of each weighted sentence in nats as CSV, with its scored tokens, shortest sentences first.

        Of one text and one section ``batch`` the order is the same for every model, so models can be compared in pairs.
        """
        rows = self._compared()
        found = {"words": self.words}
        for name in ("exact", *PROPOSALS):
            bounds = self.bounds(name)
            if bounds is not None:
                found[name] = bounds.nats[rows] if name == "exact" else bounds.nats
        table = torch.stack(list(found.values()), 1).tolist()
        return "".join(
            ",".join(map(str, row)) + "\n" for row in [list(found), *([f"{x:.6g}" for x in row] for row in table)]
        )

    def metrics(self) -> dict[str, Any]:
        """Write ``ppl_exact``, ``ppl_iw_*`` and ``ppl_best`` as JSON objects (:func:`estimate`).

        ``ppl_best`` also has ``proposal``, the bound that is the lowest for the text as a whole; ``ppl_known`` is the
        perplexity of the known words by that bound, of the same sentences and draws. Where fewer sentences
        were weighted than measured, ``ppl_exact_there`` is the exact bound of these.
        """
        result: dict[str, Any] = {}
        exact, rows = self.bounds("exact"), self._compared()
        if exact is None:
            result["ppl_exact"] = missing(self._reasons["exact"])
        else:
            result["ppl_exact"] = estimate(exact, torch.cat(self._words), self._draws["exact"])
            if not bool(rows.all()):
                result["ppl_exact_there"] = estimate(exact[rows], self.words, self._draws["exact"])
        for name in PROPOSALS:
            bounds = self.bounds(name)
            if bounds is None:
                result[f"ppl_iw_{name}"] = missing(self._reasons.get(name, "no draws were asked for: --weighted 0"))
            else:
                result[f"ppl_iw_{name}"] = estimate(bounds, self.words, self._draws[name])
        # The known words are scored by the bound that is best for all words: no second choice, which could flatter.
        best = self.best
        if best is None:
            result["ppl_best"] = result["ppl_known"] = missing("no bound is finite")
        else:
            name, bounds = best
            result["ppl_best"] = estimate(bounds, self.words, self._draws[name]) | {"proposal": name}
            known = self.bounds(name, known=True)
            assert known is not None
            known = known[rows] if name == "exact" else known
            words = torch.cat(self._known)[rows]
            result["ppl_known"] = estimate(known, words, self._draws[name]) | {"proposal": name}
        return result


def _exact(log_p: Tensor, kl: Tensor) -> Bounds:
    """-ELBO of each sentence with the exact KL, by ``s`` draws of the reconstruction."""
    rec = -log_p.double()
    variance = rec.var(0) / len(rec) if len(rec) > 1 else torch.full_like(rec[0], torch.nan)
    return Bounds((rec.mean(0) + kl).cpu(), variance.cpu())


def _weighted(z: Tensor, log_p: Tensor, proposal: Proposal) -> Bounds:
    found = weighted_bounds(log_weights(z, log_p, proposal))
    return Bounds(found.nats.cpu(), found.variance.cpu())
