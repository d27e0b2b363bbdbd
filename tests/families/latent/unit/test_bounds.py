"""Bounds: exact values against Monte Carlo and against a model whose likelihood is known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from capt.pretrain.latent.config import ModelSection
from capt.pretrain.latent.evaluation import bounds
from capt.pretrain.latent.posterior import Normal, build_head, standard_log_prob

DRAWS = 40_000


@pytest.fixture(params=["diagonal", "factor", "wide_factor"])
def normal(request: pytest.FixtureRequest) -> Normal:
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(5, 3, generator=generator)
    if request.param == "diagonal":
        return Normal(mean, log_variance=0.7 * torch.randn(5, 3, generator=generator))
    return Normal(mean, factor=torch.randn(3, 3 if request.param == "factor" else 6, generator=generator))


def _mean_and_error(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.mean(0), values.std(0) / math.sqrt(len(values))


def _within(values: Tensor, exact: Tensor) -> None:
    mean, error = _mean_and_error(values.double())
    assert ((mean - exact).abs() < 3 * error).all(), (mean, exact, error)


def _log_ratio(normal: Normal, z: Tensor) -> Tensor:
    return normal.log_prob(z) - standard_log_prob(z)


def test_log_prob_is_that_of_torch(normal: Normal) -> None:
    covariance = (
        torch.diag_embed(normal.log_variance.exp())
        if normal.log_variance is not None
        else (normal.factor @ normal.factor.t()).expand(5, 3, 3)
    )
    reference = torch.distributions.MultivariateNormal(normal.mean, covariance)
    z = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(normal.log_prob(z), reference.log_prob(z), rtol=1e-4, atol=1e-4)


def test_exact_kl_is_the_monte_carlo_one(normal: Normal) -> None:
    z = normal.sample(DRAWS, torch.Generator().manual_seed(0))
    _within(_log_ratio(normal, z), normal.kl())


def test_a_posterior_that_is_almost_flat_in_one_direction_keeps_its_digits() -> None:
    """Widths 1 and 1e-9: the covariance alone would be singular in float64, its log determinant NaN or wrong."""
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)).Q
    widths = torch.tensor([1.0, 0.5, 1e-9], dtype=torch.float64)
    normal = Normal(torch.zeros(1, 3, dtype=torch.float64), factor=turn @ torch.diag(widths))
    expected = 0.5 * float(widths.square().sum() - 3 - 2 * widths.log().sum())
    assert float(normal.kl()) == pytest.approx(expected, rel=1e-9)
    z = normal.sample(200_000, torch.Generator().manual_seed(0))
    _within(_log_ratio(normal, z), normal.kl())


def test_the_linear_head_has_the_density_that_it_draws_from() -> None:
    torch.manual_seed(0)
    head = build_head(ModelSection(posterior="linear", latent=4, noise=6, hidden=5), 5)
    h = torch.randn(2, 5)
    eps = torch.randn(DRAWS, 2, 6, generator=torch.Generator().manual_seed(2))
    z = head(h.repeat(DRAWS, 1), eps.flatten(0, 1)).z.view(DRAWS, 2, 4).detach()
    density = head(h, eps[0]).density
    assert density is not None
    _within(_log_ratio(density, z).detach(), density.kl().detach())
    assert density.kl().min() > 0


def test_the_dual_of_any_critic_is_below_the_kl(normal: Normal) -> None:
    generator = torch.Generator().manual_seed(4)
    z_q, z_p = normal.sample(DRAWS, generator), torch.randn(DRAWS, 5, 3, generator=generator)
    for seed in range(6):
        torch.manual_seed(seed)
        critic = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        with torch.no_grad():
            f_q, f_p = critic(z_q).squeeze(-1), critic(z_p).squeeze(-1)
        error = (f_q.var(0) / DRAWS + f_p.exp().var(0) / DRAWS).sqrt()
        assert (bounds.dual_kl(f_q, f_p) <= normal.kl() + 3 * error).all()


def test_the_dual_of_the_log_ratio_is_the_kl() -> None:
    normal = Normal(torch.tensor([[0.5, -0.3]]), log_variance=torch.tensor([[-0.4, -0.2]]))
    generator = torch.Generator().manual_seed(5)
    z_q, z_p = normal.sample(DRAWS, generator), torch.randn(DRAWS, 1, 2, generator=generator)
    f_q, f_p = _log_ratio(normal, z_q), _log_ratio(normal, z_p)
    error = (f_q.var(0) / DRAWS + f_p.exp().var(0) / DRAWS).sqrt()
    assert ((bounds.dual_kl(f_q, f_p) - normal.kl()).abs() < 3 * error).all()
    assert (bounds.dual_kl(torch.zeros(1, 1), torch.zeros(1, 1)) == 0).all(), "f = 0 gives 0"


class _LinearGaussian:
    """x = W z + noise of variance s: log p(x) = log N(x; 0, W W' + s I)."""

    weight = torch.tensor([[1.0, 0.3], [-0.5, 0.8], [0.2, 0.2]], dtype=torch.float64)
    variance = 0.5

    def __init__(self) -> None:
        self.x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))

    def log_likelihood(self, z: Tensor) -> Tensor:
        difference = self.x - z @ self.weight.t()
        return -0.5 * (difference.square() / self.variance + math.log(2 * math.pi * self.variance)).sum(-1)

    def nll(self) -> Tensor:
        covariance = self.weight @ self.weight.t() + self.variance * torch.eye(3, dtype=torch.float64)
        zero = torch.zeros(3, dtype=torch.float64)
        return -torch.distributions.MultivariateNormal(zero, covariance).log_prob(self.x)

    def posterior(self) -> Normal:
        precision = torch.eye(2, dtype=torch.float64) + self.weight.t() @ self.weight / self.variance
        covariance = torch.linalg.inv(precision)
        return Normal(self.x @ self.weight @ covariance / self.variance, factor=torch.linalg.cholesky(covariance))

    def weighted(self, proposal: bounds.Proposal, k: int, seed: int) -> Tensor:
        z = proposal.sample(k, torch.Generator().manual_seed(seed))
        return bounds.importance_weighted_nll(z, self.log_likelihood(z), proposal)


def test_the_true_posterior_as_proposal_gives_the_likelihood_at_once() -> None:
    toy = _LinearGaussian()
    torch.testing.assert_close(toy.weighted(toy.posterior(), 1, 0), toy.nll(), rtol=1e-9, atol=1e-9)


def test_importance_weighted_nll_falls_to_the_likelihood() -> None:
    toy = _LinearGaussian()
    rough = Normal(0.5 * toy.posterior().mean, log_variance=torch.zeros(4, 2, dtype=torch.float64))
    means = [torch.stack([toy.weighted(rough, k, seed) for seed in range(400)]).mean(0) for k in (1, 8, 64)]
    for fewer, more in itertools.pairwise(means):
        assert (more < fewer).all()
    assert (means[-1] > toy.nll() - 0.02).all()
    many = torch.stack([toy.weighted(rough, 20_000, seed) for seed in range(10)])
    _within(many, toy.nll())


def test_the_prior_is_a_proposal_too() -> None:
    toy = _LinearGaussian()
    prior = Normal(torch.zeros(4, 2, dtype=torch.float64), log_variance=torch.zeros(4, 2, dtype=torch.float64))
    z = prior.sample(5, torch.Generator().manual_seed(0))
    torch.testing.assert_close(prior.log_prob(z), standard_log_prob(z))
    direct = math.log(5) - torch.logsumexp(toy.log_likelihood(z), 0)
    torch.testing.assert_close(toy.weighted(prior, 5, 0), direct)  # the weights are the likelihoods alone
    _within(torch.stack([toy.weighted(prior, 20_000, seed) for seed in range(10)]), toy.nll())


class _Mixture:
    """Half of the draws from each of two proposals, in turn."""

    def __init__(self, one: Normal, other: Normal) -> None:
        self.parts = (one, other)

    def sample(self, number: int, generator: torch.Generator | None = None) -> Tensor:
        one, other = (part.sample(number, generator) for part in self.parts)
        choice = torch.rand(one.shape[:2], generator=generator)[..., None] < 0.5
        return torch.where(choice, one, other)

    def log_prob(self, z: Tensor) -> Tensor:
        return torch.logsumexp(torch.stack([part.log_prob(z) for part in self.parts]), 0) - math.log(2)


def test_any_density_that_can_be_drawn_from_is_a_proposal() -> None:
    toy = _LinearGaussian()
    zeros = torch.zeros(4, 2, dtype=torch.float64)
    mixture = _Mixture(toy.posterior(), Normal(zeros, log_variance=zeros))
    nll = torch.stack([toy.weighted(mixture, 2_000, seed) for seed in range(20)])
    _within(nll, toy.nll())


def test_elbo_is_above_it() -> None:
    toy = _LinearGaussian()
    rough = Normal(0.5 * toy.posterior().mean, log_variance=torch.zeros(4, 2, dtype=torch.float64))
    z = rough.sample(DRAWS, torch.Generator().manual_seed(1))
    nelbo = -toy.log_likelihood(z).mean(0) + rough.kl()
    gap = (rough.log_prob(z) - toy.posterior().log_prob(z)).mean(0)
    torch.testing.assert_close(nelbo - gap, toy.nll(), rtol=0.01, atol=0.01)
    assert (nelbo > toy.nll()).all()


def test_a_proposal_fitted_to_draws_bounds_the_likelihood() -> None:
    toy = _LinearGaussian()
    proposal = bounds.fitted_normal(toy.posterior().sample(500, torch.Generator().manual_seed(0)))
    nll = torch.stack([toy.weighted(proposal, 50, seed) for seed in range(200)])
    mean, error = _mean_and_error(nll)
    assert (mean > toy.nll() - 3 * error).all()
    assert (mean < toy.nll() + 0.05).all()


def test_information_of_separate_posteriors_is_log_of_their_number() -> None:
    apart = Normal(100.0 * torch.arange(8.0)[:, None], log_variance=torch.zeros(8, 1))
    z = apart.sample(1, torch.Generator().manual_seed(0))[0]
    assert bounds.aggregate_information(z, apart) == pytest.approx(math.log(8), abs=1e-6)
    same = Normal(torch.zeros(8, 1), log_variance=torch.zeros(8, 1))
    z = same.sample(1, torch.Generator().manual_seed(0))[0]
    assert bounds.aggregate_information(z, same) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("normal", ["diagonal", "factor"], indirect=True)
def test_information_does_not_depend_on_the_blocks(normal: Normal, monkeypatch: pytest.MonkeyPatch) -> None:
    z = normal.sample(1, torch.Generator().manual_seed(0))[0]
    whole = bounds.aggregate_information(z, normal)
    monkeypatch.setattr(bounds, "_BLOCK_ELEMENTS", 1)
    assert bounds.aggregate_information(z, normal) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(("nelbo", "published"), [(77.7, 34.65), (87.6, 54.43), (102.6, 107.9)])
def test_the_tables_divide_by_words_and_ends(nelbo: float, published: float) -> None:
    assert bounds.perplexity(nelbo, 82_430 / 3_761) == pytest.approx(published, rel=1e-3)


def _units(means: Tensor) -> int:
    return bounds.active_units(means.double().mean(0), means.double().square().mean(0))


def test_units_of_a_collapsed_posterior_are_not_active() -> None:
    means = torch.zeros(100, 4)
    assert _units(means) == 0
    means[:, 1] = torch.linspace(-1, 1, 100)
    assert _units(means) == 1
    sampled = math.sqrt(2.0) * torch.randn(2000, 128, 4, generator=torch.Generator().manual_seed(0)).mean(1)
    assert _units(sampled) == 4, "why the mean is not estimated by draws"
