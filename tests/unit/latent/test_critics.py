"""Critic losses against their equations, and what a frozen critic lets through."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pretrain.latent.config import CriticSection
from pretrain.latent.models.critics import Critics, Values, frozen, rows_of
from pretrain.latent.objectives.critic import CriticLoss, squared_difference, squared_slopes

N = 6


def _values(seed: int = 0, scale: float = 1.0) -> Values:
    generator = torch.Generator().manual_seed(seed)
    return Values(*(scale * torch.randn(2 * N, generator=generator, dtype=torch.float64) for _ in range(4)))


def _losses(section: CriticSection, counted: int, total: int) -> tuple[CriticLoss, CriticLoss]:
    return CriticLoss(section, 2, counted, total), CriticLoss(section, 2, counted, total, section.squared)


def _both(values: Values, section: CriticSection, counted: int = N) -> tuple[Tensor, int, list[Tensor]]:
    """Loss, cut values and gradients of f and g together."""
    assert values.g_q is not None
    assert values.g_p is not None
    of_f, of_g = _losses(section, counted, max(counted, 1))
    f, g = torch.cat([values.f_q, values.f_p])[:, None], torch.cat([values.g_q, values.g_p])[:, None]
    value, cut = of_f.value(f) + of_g.value(g), of_f.clamped([f]) + of_g.clamped([g])
    assert of_f.clamped([f, g]) == cut
    return value, int(cut), [*of_f.gradient(f).view(2, -1), *of_g.gradient(g).view(2, -1)]


def _by_the_equation(section: CriticSection, q: Tensor, p: Tensor) -> float:
    qs, ps = q.tolist(), p.tolist()
    if section.loss == "dual":
        return sum(math.exp(v) for v in ps) / len(ps) - sum(qs) / len(qs)
    if section.circle == "code":
        return math.log(1 + sum(math.exp(math.exp(v)) for v in ps)) + math.log(1 + sum(math.exp(-v) for v in qs))
    if section.circle == "single_exp":
        return math.log(1 + sum(math.exp(v) for v in ps)) + math.log(1 + sum(math.exp(-v) for v in qs))
    share = 1 / len(qs) if section.circle == "mean_inside" else 1.0
    return math.log(1 + math.exp(share * sum(math.exp(v) for v in ps))) + math.log(1 + math.exp(-share * sum(qs)))


SECTIONS = [CriticSection(loss="dual")] + [
    CriticSection(loss="circle", circle=form) for form in ("code", "single_exp", "mean_inside", "sum_inside")
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.loss if s.loss == "dual" else s.circle)
@pytest.mark.parametrize("counted", [N, 4])
def test_losses_are_the_equations_summed_over_views_and_critics(section: CriticSection, counted: int) -> None:
    values = _values()
    expected = 0.0
    for q, p in ((values.f_q, values.f_p), (values.g_q, values.g_p)):
        for view in range(2):
            rows = slice(view * N, view * N + counted)
            expected += _by_the_equation(section, q[rows], p[rows])
    loss, clamped, _ = _both(values, section, counted)
    assert float(loss) == pytest.approx(expected, rel=1e-9)
    assert clamped == 0


def _literal(section: CriticSection, q: Tensor, p: Tensor) -> Tensor:
    p = p.clamp(max=section.clamp)
    if section.loss == "dual":
        return p.exp().mean() - q.mean()
    if section.circle == "code":
        return (1 + p.exp().exp().sum()).log() + (1 + (-q).exp().sum()).log()
    if section.circle == "single_exp":
        return (1 + p.exp().sum()).log() + (1 + (-q).exp().sum()).log()
    share = 1 / len(q) if section.circle == "mean_inside" else 1.0
    return (1 + (share * p.exp().sum()).exp()).log() + (1 + (-share * q.sum()).exp()).log()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.loss if s.loss == "dual" else s.circle)
@pytest.mark.parametrize("counted", [N, 4, 0])
def test_gradients_are_those_of_the_equations(section: CriticSection, counted: int) -> None:
    section = section.model_copy(update={"clamp": 1.0})  # some of the values are above
    leaves = [value.requires_grad_() for value in _values(seed=3)]
    with torch.no_grad():
        _, clamped, ours = _both(Values(*leaves), section, counted)
    expected = torch.zeros((), dtype=torch.float64)
    for q, p in (leaves[:2], leaves[2:]):
        for view in range(2):
            rows = slice(view * N, view * N + counted)
            if counted:
                expected = expected + _literal(section, q[rows], p[rows])
    theirs = torch.autograd.grad(expected, leaves) if counted else [torch.zeros_like(leaf) for leaf in leaves]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    above = [(leaf.view(2, N)[:, :counted] > 1.0).sum() for leaf in (leaves[1], leaves[3])]
    assert clamped == int(above[0] + above[1])
    assert counted < N or clamped > 0


@pytest.mark.parametrize("squared", ["all", "posterior"])
def test_the_squared_loss_is_on_g_alone(squared: str) -> None:
    values = Values(*(value.requires_grad_() for value in _values() if value is not None))
    assert values.g_q is not None
    assert values.g_p is not None
    section = CriticSection.model_validate({"squared": squared})
    with torch.no_grad():
        plain, _, without = _both(values, CriticSection())
        loss, _, found = _both(values, section)
    expected = (values.g_q[:N] - values.g_q[N:]).square().sum()
    if squared == "all":
        expected = expected + (values.g_p[:N] - values.g_p[N:]).square().sum()
    assert float(loss - plain) == pytest.approx(float(expected.detach()), rel=1e-9)
    gradients = torch.autograd.grad(expected, list(values), materialize_grads=True)  # type: ignore[arg-type]
    for a, b, c in zip(found, without, gradients, strict=True):
        torch.testing.assert_close(a - b, c)
    few = squared_difference(values.g_q, 3)
    assert float(few.detach()) == pytest.approx(float((values.g_q[:3] - values.g_q[N : N + 3]).detach().square().sum()))
    with torch.no_grad():
        torch.testing.assert_close(squared_slopes(values.g_q, 3), torch.autograd.grad(few, values.g_q)[0])


@pytest.mark.parametrize("section", SECTIONS[:3], ids=["dual", "code", "single_exp"])
@pytest.mark.parametrize("value", [50.0, -50.0, 1e4])
def test_extreme_values_are_cut_and_counted(section: CriticSection, value: float) -> None:
    values = Values(*(torch.full((2 * N,), value) for _ in range(4)))
    loss, clamped, gradients = _both(values, section)
    assert math.isfinite(float(loss))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert clamped == (4 * N if value > 0 else 0)


def test_the_dual_loss_is_least_at_the_log_ratio() -> None:
    """Its gradient vanishes where exp(f) at the prior's draws weighs as much as the posterior's draws."""
    f = torch.zeros(2 * N, dtype=torch.float64)
    _, _, (d_q, d_p, *_) = _both(Values(f, f, f, f), CriticSection())
    torch.testing.assert_close(d_q + d_p, torch.zeros_like(f))


def test_both_critics_in_one_pass_are_each_alone() -> None:
    torch.manual_seed(0)
    critics = Critics(3, 5, CriticSection(hidden=8))
    z, h, prior = torch.randn(4, 3), torch.randn(4, 5), torch.randn(4, 3)
    values = critics.values(z, h, prior)
    torch.testing.assert_close(values.f_q, critics.f(torch.cat([z, h], 1))[:, 0])
    torch.testing.assert_close(values.f_p, critics.f(torch.cat([prior, h], 1))[:, 0])
    assert critics.g is not None
    torch.testing.assert_close(values.g_q, critics.g(z)[:, 0])
    torch.testing.assert_close(values.g_p, critics.g(prior)[:, 0])
    assert sum(isinstance(layer, torch.nn.Linear) for layer in critics.f) == 4


@pytest.mark.parametrize("trained", ["both", "f"])
def test_gradients_of_the_weights_are_those_of_autograd(trained: str) -> None:
    torch.manual_seed(0)
    section = CriticSection.model_validate(
        {"loss": "circle", "trained": trained, "squared": "all" if trained == "both" else "none", "hidden": 8}
    )
    critics = Critics(3, 5, section).double()
    z, h, priors = torch.randn(8, 3).double(), torch.randn(8, 5).double(), torch.randn(16, 3).double()
    prior = priors[8:]  # that of the second update
    _, rows = rows_of(z, h, priors)
    of_f, of_g = _losses(section, 3, 3)  # of each view the fourth row does not count
    found = critics(rows, of_f, of_g)
    f = [critics.f(torch.cat([draws, h], 1))[:, 0] for draws in (z, prior)]
    g = [] if critics.g is None else [critics.g(draws)[:, 0] for draws in (z, prior)]
    expected = torch.stack([squared_difference(values, 3) for values in g]).sum() if g else torch.zeros(())
    for q, p in filter(None, (f, g)):
        expected = expected + sum(_literal(section, q[rows], p[rows]) for rows in (slice(3), slice(4, 7)))
    loss = of_f.value(found.f) + (of_g.value(found.g) if found.g is not None else 0.0)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-12)
    for a, b in zip(found.gradients, torch.autograd.grad(expected, list(critics.parameters())), strict=True):
        torch.testing.assert_close(a, b)
    assert not loss.requires_grad
    torch.testing.assert_close(found.f.view(2, -1)[0], f[0].detach())


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.loss if s.loss == "dual" else s.circle)
def test_the_next_update_sees_nothing_of_the_last(section: CriticSection) -> None:
    """Gradients are written where those of the update before lie."""
    section = section.model_copy(update={"squared": "posterior", "clamp": 1.0})
    first, second = (torch.randn(4 * N, 1, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    used = CriticLoss(section, 2, 4, 4, "posterior")
    used.gradient(first)
    used.value(first)
    assert torch.equal(used.gradient(second), CriticLoss(section, 2, 4, 4, "posterior").gradient(second))


def test_a_frozen_critic_has_no_gradient_of_its_own() -> None:
    torch.manual_seed(0)
    critics = Critics(3, 5, CriticSection(hidden=8))
    z = torch.randn(4, 3, requires_grad=True)
    h, prior = torch.randn(4, 5), torch.randn(4, 3)
    value = frozen(critics.f, torch.cat([z, h], 1)).squeeze(1)
    torch.testing.assert_close(value, critics.values(z, h, prior).f_q)
    value.sum().backward()
    assert z.grad is not None
    assert all(parameter.grad is None for parameter in critics.parameters())
