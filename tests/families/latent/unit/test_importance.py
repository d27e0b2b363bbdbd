"""Importance-weighted bounds of a decoder whose likelihood is known by quadrature over a z of 1 or 2 dimensions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.latent.batches import LatentBatch
from capt.pretrain.latent.evaluation import model as evaluation_model
from capt.pretrain.latent.evaluation.bounds import Mixture, diagonal, negative_elbo, refitted_proposal
from capt.pretrain.latent.evaluation.model import log_likelihoods
from capt.pretrain.latent.posterior import Normal
from tests.families.latent.unit.known import LENGTH, KnownDecoder, N, seeded


@pytest.fixture(scope="module", params=[1, 2])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KnownDecoder:
    return KnownDecoder(request.param, tmp_path_factory.mktemp("known"))


def test_the_decoder_listens_to_z(known: KnownDecoder) -> None:
    """z matters, and the bad Gaussian is bad: else every proposal would pass."""
    z = known.prior.sample(200, seeded())
    assert float(log_likelihoods(known.model.decoder, z, known.batch.tokens).var(0).min()) > 0.1
    assert float((known.bound(known.bad, 1) - known.log_p).abs().max()) > 0.3


@pytest.mark.parametrize("name", ["q", "prior", "mixture", "refitted"])
def test_every_proposal_bounds_the_likelihood_and_comes_to_it(name: str, known: KnownDecoder) -> None:
    proposal = known.proposals()[name]
    few = known.bounds(proposal, 4, 400)
    error = few.std(0) / math.sqrt(len(few))
    assert (few.mean(0) < known.log_p + 3 * error).all()
    many = known.bound(proposal, 20_000)
    assert many.dtype == torch.float64
    torch.testing.assert_close(many, known.log_p, rtol=0, atol=0.5 if name == "q" else 0.03)
    assert (known.log_p - many < 0.5 * (known.log_p - few.mean(0)) + 3 * error).all(), "more draws are tighter"


def test_the_estimate_of_p_is_unbiased(known: KnownDecoder) -> None:
    for name, proposal in known.proposals().items():
        if name == "q":  # its weights vary too much for a test of their mean
            continue
        p = known.bounds(proposal, 8, 500).exp()
        error = p.std(0) / math.sqrt(len(p))
        assert ((p.mean(0) - known.log_p.exp()).abs() < 4 * error).all(), name


@pytest.mark.parametrize("name", ["q", "prior", "mixture", "refitted"])
def test_batched_is_the_literal_loop(name: str, known: KnownDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    proposal, draws = known.proposals()[name], 6
    batched = known.bound(proposal, draws, seed=5)
    z = proposal.sample(draws, seeded(5))
    for i in range(N):
        total = 0.0
        for j in range(draws):
            log_p = float(known.model.decoder.log_likelihood(z[j, i : i + 1], known.batch.tokens[i : i + 1]))
            parts = [known.bad, known.prior] if name == "mixture" else [proposal]
            densities = [_density(part, z[j, i], i) for part in parts if isinstance(part, Normal)]
            total += math.exp(log_p) * _density(known.prior, z[j, i], i) / (sum(densities) / len(densities))
        assert float(batched[i]) == pytest.approx(math.log(total / draws), rel=1e-4)
    for at_once in (1, 4, 7):
        monkeypatch.setattr(evaluation_model, "ROWS_PER_PASS", at_once)
        torch.testing.assert_close(known.bound(proposal, draws, seed=5), batched, rtol=1e-6, atol=1e-6)
    monkeypatch.undo()
    monkeypatch.setattr(evaluation_model, "_TOKENS_PER_PASS", 3 * LENGTH)
    torch.testing.assert_close(known.bound(proposal, draws, seed=5), batched, rtol=1e-6, atol=1e-6)


def _density(normal: Normal, z: Tensor, row: int) -> float:
    assert normal.log_variance is not None
    scale = (0.5 * normal.log_variance[row].double()).exp()
    return float(torch.distributions.Normal(normal.mean[row].double(), scale).log_prob(z.double()).sum().exp())


def test_half_of_a_mixtures_draws_come_from_each_part(known: KnownDecoder) -> None:
    far = Normal(known.bad.mean + 100, log_variance=known.bad.log_variance)
    z = Mixture([far, known.prior]).sample(10, seeded())
    assert (z[:5] > 50).all()
    assert (z[5:] < 50).all()
    with pytest.raises(ConfigError, match="multiple"):
        Mixture([far, known.prior]).sample(9, seeded())


def test_a_mixture_saves_a_proposal_that_never_meets_the_posterior(known: KnownDecoder) -> None:
    far = Normal(known.bad.mean + 20, log_variance=known.bad.log_variance)
    draws = 2_000
    assert (known.bound(far, draws) < known.log_p - 50).all()
    mixed = known.bound(Mixture([far, known.prior]), draws)
    torch.testing.assert_close(mixed, known.log_p, rtol=0, atol=0.2)


def test_refitting_a_bad_gaussian_tightens_elbo_and_bound(known: KnownDecoder) -> None:
    fitted = known.refitted()
    draws = 2_000
    before, after = (negative_elbo(known.model, known.batch, q, draws, seeded(1)) for q in (known.bad, fitted))
    assert (after < before).all()
    assert (after > -known.log_p - 0.05).all()
    gaps = [(known.log_p - known.bounds(q, 8, 60)).mean(0) for q in (known.bad, fitted)]
    assert (gaps[1] < gaps[0]).all()
    assert float(gaps[1].mean()) < 0.3 * float(gaps[0].mean())


def test_refitting_starts_where_the_elbo_is_highest(known: KnownDecoder) -> None:
    far = Normal(known.bad.mean + 20, log_variance=known.bad.log_variance)
    started = refitted_proposal(known.model, known.batch, [far, known.prior], seeded(), steps=0)
    torch.testing.assert_close(started.mean, known.prior.mean)
    assert (refitted_proposal(known.model, known.batch, [far], seeded(), steps=0).mean > 15).all()


def test_refitting_one_sentence_does_not_depend_on_the_others(known: KnownDecoder) -> None:
    tokens = known.batch.tokens.clone()
    tokens[1:] = tokens[1:].flip(0)
    others = LatentBatch(tokens, torch.arange(N), N, N)
    one = refitted_proposal(known.model, known.batch, [known.bad], seeded(2), steps=10)
    same = refitted_proposal(known.model, others, [known.bad], seeded(2), steps=10)
    torch.testing.assert_close(one.mean[0], same.mean[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(one.mean[1], same.mean[1], rtol=1e-3)


def test_the_diagonal_of_a_full_gaussian_has_its_variances() -> None:
    factor = torch.randn(3, 5, generator=seeded())
    fitted = diagonal(Normal(torch.ones(2, 3), factor=factor))
    assert fitted.log_variance is not None
    torch.testing.assert_close(fitted.log_variance.exp()[1], (factor @ factor.t()).diagonal())
    assert diagonal(fitted) is fitted
