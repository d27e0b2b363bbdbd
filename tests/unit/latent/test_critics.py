"""Critic losses against their equations, and what a frozen critic lets through."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pretrain.latent.config import CriticSection
from pretrain.latent.critics import Critics, Values, critic_loss, frozen, squared_difference

N = 6


def _values(seed: int = 0, scale: float = 1.0) -> Values:
    generator = torch.Generator().manual_seed(seed)
    return Values(*(scale * torch.randn(2 * N, generator=generator, dtype=torch.float64) for _ in range(4)))


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
    loss, clamped = critic_loss(values, 2, counted, counted, section)
    assert float(loss) == pytest.approx(expected, rel=1e-9)
    assert int(clamped) == 0


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
    loss, clamped = critic_loss(Values(*leaves), 2, counted, max(counted, 1), section)
    ours = torch.autograd.grad(3.0 * loss, leaves)
    expected = torch.zeros((), dtype=torch.float64)
    for q, p in (leaves[:2], leaves[2:]):
        for view in range(2):
            rows = slice(view * N, view * N + counted)
            if counted:
                expected = expected + 3.0 * _literal(section, q[rows], p[rows])
    theirs = torch.autograd.grad(expected, leaves) if counted else [torch.zeros_like(leaf) for leaf in leaves]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    above = [(leaf.view(2, N)[:, :counted] > 1.0).sum() for leaf in (leaves[1], leaves[3])]
    assert int(clamped) == int(above[0] + above[1])
    assert counted < N or int(clamped) > 0


@pytest.mark.parametrize("squared", ["all", "posterior"])
def test_the_squared_loss_is_on_g_alone(squared: str) -> None:
    values = _values()
    plain, _ = critic_loss(values, 2, N, N, CriticSection())
    loss, _ = critic_loss(values, 2, N, N, CriticSection.model_validate({"squared": squared}))
    expected = (values.g_q[:N] - values.g_q[N:]).square().sum()
    if squared == "all":
        expected = expected + (values.g_p[:N] - values.g_p[N:]).square().sum()
    assert float(loss - plain) == pytest.approx(float(expected), rel=1e-9)
    assert float(squared_difference(values.g_q, 3)) == pytest.approx(
        float((values.g_q[:3] - values.g_q[N : N + 3]).square().sum())
    )


@pytest.mark.parametrize("section", SECTIONS[:3], ids=["dual", "code", "single_exp"])
@pytest.mark.parametrize("value", [50.0, -50.0, 1e4])
def test_extreme_values_are_cut_and_counted(section: CriticSection, value: float) -> None:
    leaves = [torch.full((2 * N,), value, requires_grad=True) for _ in range(4)]
    loss, clamped = critic_loss(Values(*leaves), 2, N, N, section)
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert all(bool(leaf.grad.isfinite().all()) for leaf in leaves if leaf.grad is not None)
    assert int(clamped) == (4 * N if value > 0 else 0)


def test_the_dual_loss_is_least_at_the_log_ratio() -> None:
    """Its gradient vanishes where exp(f) at the prior's draws weighs as much as the posterior's draws."""
    f = torch.zeros(2 * N, dtype=torch.float64, requires_grad=True)
    loss, _ = critic_loss(Values(f, f, None, None), 2, N, N, CriticSection())
    (gradient,) = torch.autograd.grad(loss, f)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_both_critics_in_one_pass_are_each_alone() -> None:
    torch.manual_seed(0)
    critics = Critics(3, 5, CriticSection(hidden=8))
    z, h, prior = torch.randn(4, 3), torch.randn(4, 5), torch.randn(4, 3)
    values = critics(z, h, prior)
    torch.testing.assert_close(values.f_q, critics.f(torch.cat([z, h], 1))[:, 0])
    torch.testing.assert_close(values.f_p, critics.f(torch.cat([prior, h], 1))[:, 0])
    assert critics.g is not None
    torch.testing.assert_close(values.g_q, critics.g(z)[:, 0])
    torch.testing.assert_close(values.g_p, critics.g(prior)[:, 0])
    assert sum(isinstance(layer, torch.nn.Linear) for layer in critics.f) == 4


def test_a_frozen_critic_has_no_gradient_of_its_own() -> None:
    torch.manual_seed(0)
    critics = Critics(3, 5, CriticSection(hidden=8))
    z = torch.randn(4, 3, requires_grad=True)
    h, prior = torch.randn(4, 5), torch.randn(4, 3)
    value = frozen(critics.f, torch.cat([z, h], 1)).squeeze(1)
    torch.testing.assert_close(value, critics(z, h, prior).f_q)
    value.sum().backward()
    assert z.grad is not None
    assert all(parameter.grad is None for parameter in critics.parameters())
