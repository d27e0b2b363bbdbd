"""Critic losses and their gradients against the equations in float64, and what a frozen critic lets through."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from capt.pretrain.latent.batches import SampledBatch, StepNoise
from capt.pretrain.latent.config import CriticSection
from capt.pretrain.latent.objectives import (
    circle_loss,
    clamped,
    critics_loss,
    dual_loss,
    squared_difference,
    valid_rows,
)
from capt.pretrain.latent.posterior import Critics, CriticValues, frozen

N = 6


def _values(seed: int = 0, scale: float = 1.0) -> CriticValues:
    generator = torch.Generator().manual_seed(seed)
    return CriticValues(*(scale * torch.randn(2 * N, generator=generator, dtype=torch.float64) for _ in range(4)))


def _batch(valid: int = N, rows: int = N) -> SampledBatch:
    """Two views of ``rows`` rows, of which the first ``valid`` have weight."""
    tokens = torch.zeros(2 * rows, 1, dtype=torch.int64)
    mask = (torch.arange(rows) < valid).repeat(2)
    noise = StepNoise(0, ("test",), None, rows, torch.device("cpu"))
    return SampledBatch(
        tokens, tokens, 2, mask, valid, max(valid, 1), 0, torch.zeros(2 * rows, 1), None, (None, None), None, None,
        None, noise,
    )  # fmt: skip


def _both(values: CriticValues, section: CriticSection, valid: int = N) -> tuple[Tensor, int, list[Tensor]]:
    """Loss, number of cut values, and gradients of f and g together."""
    leaves = CriticValues(*(value.detach().requires_grad_() for value in values if value is not None))
    loss = critics_loss(leaves, _batch(valid), section)
    gradients = torch.autograd.grad(loss, list(leaves), materialize_grads=True)  # type: ignore[arg-type]
    return loss.detach(), int(clamped(values, _batch(valid), section)), list(gradients)


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


def _name(section: CriticSection) -> str:
    return section.loss if section.loss == "dual" else section.circle


@pytest.mark.parametrize("section", SECTIONS, ids=_name)
@pytest.mark.parametrize("valid", [N, 4])
def test_losses_are_the_equations_summed_over_views_and_critics(section: CriticSection, valid: int) -> None:
    values = _values()
    expected = 0.0
    for q, p in ((values.f_q, values.f_p), (values.g_q, values.g_p)):
        assert q is not None
        assert p is not None
        for view in range(2):
            rows = slice(view * N, view * N + valid)
            expected += _by_the_equation(section, q[rows], p[rows])
    loss, number, _ = _both(values, section, valid)
    assert float(loss) == pytest.approx(expected, rel=1e-9)
    assert number == 0


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


@pytest.mark.parametrize("section", SECTIONS, ids=_name)
@pytest.mark.parametrize("valid", [N, 4, 0])
def test_gradients_are_those_of_the_equations(section: CriticSection, valid: int) -> None:
    section = section.model_copy(update={"clamp": 1.0})  # some of the values are above
    leaves = [value.requires_grad_() for value in _values(seed=3) if value is not None]
    _, number, ours = _both(CriticValues(*leaves), section, valid)
    expected = torch.zeros((), dtype=torch.float64)
    for q, p in (leaves[:2], leaves[2:]):
        for view in range(2):
            rows = slice(view * N, view * N + valid)
            if valid:
                expected = expected + _literal(section, q[rows], p[rows])
    theirs = torch.autograd.grad(expected, leaves) if valid else [torch.zeros_like(leaf) for leaf in leaves]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    above = [(leaf.view(2, N)[:, :valid] > 1.0).sum() for leaf in (leaves[1], leaves[3])]
    assert number == int(above[0] + above[1])
    assert valid < N or number > 0


@pytest.mark.parametrize("section", SECTIONS, ids=_name)
def test_each_loss_is_the_function_of_its_equation(section: CriticSection) -> None:
    """The plain functions take a row per view, and a gradient check finds no term without its derivative."""
    values = _values(seed=2)
    q, p = (value.view(2, N).requires_grad_() for value in values[:2] if value is not None)

    def ours(q: Tensor, p: Tensor) -> Tensor:
        return dual_loss(q, p, N) if section.loss == "dual" else circle_loss(q, p, N, section.circle)

    expected = sum(_by_the_equation(section, q[view], p[view]) for view in range(2))
    assert float(ours(q, p).detach()) == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(ours, (q, p))


@pytest.mark.parametrize(("squared", "critic"), [("all", "g"), ("posterior", "g"), ("posterior", "f")])
def test_the_squared_loss_is_on_one_critic_alone(squared: str, critic: str) -> None:
    values = CriticValues(*(value.requires_grad_() for value in _values() if value is not None))
    assert values.g_q is not None
    assert values.g_p is not None
    section = CriticSection.model_validate({"squared": squared, "squared_on": critic})
    plain, _, without = _both(values, CriticSection())
    loss, _, gradients = _both(values, section)
    q, p = (values.f_q, values.f_p) if critic == "f" else (values.g_q, values.g_p)
    expected = (q[:N] - q[N:]).square().sum()
    if squared == "all":
        expected = expected + (p[:N] - p[N:]).square().sum()
    assert float(loss - plain) == pytest.approx(float(expected.detach()), rel=1e-9)
    theirs = torch.autograd.grad(expected, list(values), materialize_grads=True)  # type: ignore[arg-type]
    for a, b, c in zip(gradients, without, theirs, strict=True):
        torch.testing.assert_close(a - b, c)
    few = squared_difference(*valid_rows(values.g_q, _batch(3)))
    assert float(few.detach()) == pytest.approx(float((values.g_q[:3] - values.g_q[N : N + 3]).detach().square().sum()))
    slopes = torch.zeros(2 * N, dtype=torch.float64)
    slopes[:3] = 2 * (values.g_q[:3] - values.g_q[N : N + 3]).detach()
    slopes[N : N + 3] = -slopes[:3]
    torch.testing.assert_close(torch.autograd.grad(few, values.g_q)[0], slopes)


@pytest.mark.parametrize("section", SECTIONS[:3], ids=["dual", "code", "single_exp"])
@pytest.mark.parametrize("value", [50.0, -50.0, 1e4])
def test_extreme_values_are_cut_and_counted(section: CriticSection, value: float) -> None:
    values = CriticValues(*(torch.full((2 * N,), value) for _ in range(4)))
    loss, number, gradients = _both(values, section)
    assert math.isfinite(float(loss))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert number == (4 * N if value > 0 else 0)


def test_the_dual_loss_is_least_at_the_log_ratio() -> None:
    """Its gradient vanishes where exp(f) at the prior's draws weighs as much as the posterior's draws."""
    f = torch.zeros(2 * N, dtype=torch.float64)
    _, _, (d_q, d_p, *_) = _both(CriticValues(f, f, f, f), CriticSection())
    torch.testing.assert_close(d_q + d_p, torch.zeros_like(f))


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


@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16])
def test_values_have_at_least_the_precision_of_float32(precision: torch.dtype) -> None:
    """Losses take exponentials of them: also under bf16 autocast, whose products are in bf16."""
    torch.manual_seed(0)
    critics = Critics(3, 5, CriticSection(hidden=8)).to(torch.float64 if precision == torch.float64 else torch.float32)
    z, h, prior = (torch.randn(4, width).to(next(critics.parameters()).dtype) for width in (3, 5, 3))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        values = critics(z, h, prior)
        alone = critics.f(torch.cat([z, h], 1))[:, 0]
    assert alone.dtype == precision
    expected = torch.float64 if precision == torch.float64 else torch.float32
    assert all(value.dtype == expected for value in values)
    torch.testing.assert_close(values.f_q, alone.to(expected), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("trained", ["both", "f"])
def test_gradients_of_the_weights_are_those_of_the_equations(trained: str) -> None:
    torch.manual_seed(0)
    section = CriticSection.model_validate(
        {"loss": "circle", "trained": trained, "squared": "all" if trained == "both" else "none", "hidden": 8}
    )
    critics = Critics(3, 5, section).double()
    z, h, prior = torch.randn(8, 3).double(), torch.randn(8, 5).double(), torch.randn(8, 3).double()
    values = critics(z, h, prior)
    loss = critics_loss(values, _batch(3, rows=4), section)  # the fourth row of each view has no weight
    f = [critics.f(torch.cat([draws, h], 1))[:, 0] for draws in (z, prior)]
    g = [] if critics.g is None else [critics.g(draws)[:, 0] for draws in (z, prior)]
    expected = torch.zeros((), dtype=torch.float64)
    for g_values in g:
        expected = expected + (g_values[:3] - g_values[4:7]).square().sum()
    for q, p in filter(None, (f, g)):
        expected = expected + sum(_literal(section, q[rows], p[rows]) for rows in (slice(3), slice(4, 7)))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    parameters = list(critics.parameters())
    for a, b in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(a, b)
    assert (values.g_q is None) == (trained == "f")
    torch.testing.assert_close(values.f_q, f[0])


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
