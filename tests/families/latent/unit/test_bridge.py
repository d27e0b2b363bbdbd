"""Annealed importance sampling on a decoder whose likelihood is known by quadrature, and on a posterior that is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from capt.pretrain.latent.batches import LatentBatch
from capt.pretrain.latent.corpus import UNK
from capt.pretrain.latent.evaluation import bridge as bridging
from capt.pretrain.latent.evaluation.bounds import Bounds, weighted_bounds
from capt.pretrain.latent.evaluation.bridge import Bridged, bridge, bridge_check
from capt.pretrain.latent.evaluation.likelihood import LikelihoodBounds, Likelihoods, WordBounds
from capt.pretrain.latent.evaluation.model import log_likelihood_gradients, log_likelihoods
from capt.pretrain.latent.posterior import Normal
from tests.families.latent.unit.known import KnownDecoder, N, seeded


@pytest.fixture(scope="module", params=[1, 2])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KnownDecoder:
    return KnownDecoder(request.param, tmp_path_factory.mktemp("known"))


def _bridged(known: KnownDecoder, chains: int, temperatures: int, guide: Normal | None = None) -> Bridged:
    guide = guide if guide is not None else known.refitted()
    return bridge(known.model, known.batch, guide, seeded(7), chains=chains, temperatures=temperatures)


def test_gradients_are_those_of_differences(known: KnownDecoder) -> None:
    z = torch.randn(3, N, known.bad.mean.shape[1], generator=seeded())
    gradients = log_likelihood_gradients(known.model.decoder, z, known.batch.tokens)
    for i in range(z.shape[2]):
        step = torch.zeros(z.shape[2])
        step[i] = 1e-2
        up, down = (log_likelihoods(known.model.decoder, z + sign * step, known.batch.tokens) for sign in (1, -1))
        torch.testing.assert_close(gradients[..., i], (up - down) / 2e-2, rtol=2e-2, atol=5e-3)
    assert all(parameter.grad is None for parameter in known.model.decoder.parameters())
    assert not known.model.decoder.training


def test_the_mean_weight_is_the_likelihood(known: KnownDecoder) -> None:
    """Few temperatures and a guide that does not fit: whatever the chains do, the weights average to p(x)."""
    for guide in (known.refitted(), known.bad):
        found = _bridged(known, 1_000, 4, guide)
        weights = (found.log_weights - known.log_p).exp()
        error = weights.std(0) / math.sqrt(len(weights))
        assert ((weights.mean(0) - 1).abs() < 4 * error).all()
        assert float(error.max()) < 0.3


def test_it_bounds_the_likelihood_and_more_temperatures_come_closer(known: KnownDecoder) -> None:
    means = []
    for temperatures in (1, 4, 16):
        log_weights = _bridged(known, 200, temperatures).log_weights
        error = log_weights.std(0) / math.sqrt(len(log_weights))
        assert (log_weights.mean(0) < known.log_p + 3 * error).all()
        means.append(float((known.log_p - log_weights.mean(0)).mean()))
    assert means[1] < 0.6 * means[0]
    assert means[2] < 0.5 * means[1]


def test_steps_are_accepted(known: KnownDecoder) -> None:
    assert 0.8 < _bridged(known, 50, 10).acceptance <= 1


def test_the_check_compares_the_same_sentences(known: KnownDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridging, "CHAINS", 100)
    monkeypatch.setattr(bridging, "TEMPERATURES", 8)
    collected = LikelihoodBounds(2, UNK)
    two = LatentBatch(known.batch.tokens[:2], torch.arange(2), 2, 2)
    three = LatentBatch(known.batch.tokens[2:], torch.arange(3), 3, 3)
    fitted = known.refitted()
    assert fitted.log_variance is not None
    loose = torch.arange(1.0, 6.0, dtype=torch.float64)
    for batch, rows in ((two, slice(0, 2)), (three, slice(2, 5))):
        collected._start(batch, weighted=True)
        bounds = Bounds(loose[rows] - known.log_p[rows], torch.zeros(batch.total).double())
        collected._add("prior", WordBounds(bounds, bounds), 4)
        collected.batches.append((batch, Normal(fitted.mean[rows], log_variance=fitted.log_variance[rows])))
    checked = bridge_check(known.model, collected, 2)
    assert (checked["sentences"], checked["draws"]) == (2, 100)
    assert checked["tightest_minus_bridge"] == pytest.approx((2 + 4) / 2, abs=0.1), "sentences 1 and 3 of 5"
    assert checked["nats"] == pytest.approx(-float(known.log_p[[1, 3]].mean()), abs=0.1)
    assert bridge_check(known.model, collected, 99)["sentences"] == N


def test_the_variance_over_draws_is_that_of_repetitions(known: KnownDecoder) -> None:
    draws = 100
    found = []
    for seed in range(200):
        z = known.prior.sample(draws, seeded(seed))
        found.append(weighted_bounds(log_likelihoods(known.model.decoder, z, known.batch.tokens).double()))
    spread = torch.stack([bounds.nats for bounds in found]).var(0)
    said = torch.stack([bounds.variance for bounds in found]).mean(0)
    torch.testing.assert_close(said, spread, rtol=0.5, atol=0)
    torch.testing.assert_close(found[0].nats, -known.bound(known.prior, draws, 0), rtol=1e-6, atol=1e-5)


def test_nothing_to_check_is_said(known: KnownDecoder, tmp_path: Path) -> None:
    collected = LikelihoodBounds(2, UNK)
    collected.add_language_model(0, known.batch, Likelihoods(known.log_p[None], known.log_p[None]))
    assert bridge_check(known.model, collected, 3)["value"] is None
