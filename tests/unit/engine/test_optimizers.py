"""Optimizers against the equations, parameter groups, and honest refusals."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from pretrain.base.errors import ConfigError
from pretrain.config import load_job
from pretrain.engine.optim import build as optimizers
from pretrain.engine.optim.build import build_optimizer, parameter_groups
from pretrain.engine.optim.fused import apex_available
from pretrain.engine.optim.lamb import Lamb
from pretrain.engine.schedule import learning_rate


def _build(overrides: list[str], module: nn.Module) -> torch.optim.Optimizer:
    job = load_job("capt_tiny", overrides)
    return build_optimizer(job.optimizer, job.engine, module)


def _lamb_literally(w: list[float], gradients: list[list[float]], lr: float, decay: float) -> list[float]:
    """Algorithm 2 of You et al. 2020 with plain floats."""
    b1, b2, eps = 0.9, 0.999, 1e-6
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, g in enumerate(gradients, 1):
        m = [b1 * a + (1 - b1) * b for a, b in zip(m, g, strict=True)]
        v = [b2 * a + (1 - b2) * b * b for a, b in zip(v, g, strict=True)]
        r = [(a / (1 - b1**t)) / ((b / (1 - b2**t)) ** 0.5 + eps) + decay * x for a, b, x in zip(m, v, w, strict=True)]
        ratio = (sum(x * x for x in w) ** 0.5) / (sum(x * x for x in r) ** 0.5) if decay else 1.0
        w = [x - lr * ratio * y for x, y in zip(w, r, strict=True)]
    return w


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_follows_the_equations(decay: float) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, dtype=torch.float64))
    start, gradients = p.detach().tolist(), torch.randn(4, 5, dtype=torch.float64)
    optimizer = Lamb([p], lr=0.01, weight_decay=decay)
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    expected = _lamb_literally(start, gradients.tolist(), 0.01, decay)
    torch.testing.assert_close(p.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_lamb_leaves_the_ratio_at_one_for_zero_weights() -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = Lamb([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), -0.1), rtol=1e-4, atol=0)


def test_the_short_way_to_the_fused_kernel_is_torchs_step() -> None:
    """Bit by bit: two groups, a parameter that is used late, another rate in each step, and on from a loaded state."""
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    ours = torch.optim.AdamW(parameter_groups(modules[0], 0.1), fused=True, lr=0.1)
    theirs = torch.optim.AdamW(parameter_groups(modules[1], 0.1), fused=True, lr=0.1)
    update = FusedUpdate(ours)
    for step in range(6):
        if step == 4:
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        if step == 5:
            ours.load_state_dict(ours.state_dict())  # the same tensors in new groups
        for module, optimizer in zip(modules, (ours, theirs), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + step)
            optimizer.zero_grad()
            layers = module if step >= 2 else module[:1]
            torch.manual_seed(step)
            layers(torch.randn(4, 7)).square().sum().backward()
        update()
        theirs.step()
        for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


def test_vectors_do_not_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    decay, rest = parameter_groups(module, 0.1)
    assert [tuple(p.shape) for p in decay["params"]] == [(4, 3)]
    assert (decay["weight_decay"], rest["weight_decay"], len(rest["params"])) == (0.1, 0.0, 3)


def test_the_log_says_which_optimizer_is_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _build([], nn.Linear(2, 2))
    assert "torch AdamW (fused)" in caplog.text or "apex FusedAdam" in caplog.text


def test_an_offloaded_state_is_not_given_to_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels run on a GPU, and the state lies in host memory."""
    monkeypatch.setattr(optimizers, "apex_available", lambda: True)
    module = nn.Linear(2, 2)
    for offload in (
        "engine.offload_optimizer=true",
        "engine.deepspeed_extra.zero_optimization={offload_optimizer: {device: cpu}}",
    ):
        assert isinstance(_build([offload], module), torch.optim.AdamW)
        with pytest.raises(ConfigError, match="keeps the state in host memory"):
            _build([offload, "optimizer.backend=apex"], module)


@pytest.mark.skipif(apex_available(), reason="NVIDIA apex is here")
def test_apex_is_refused_where_it_is_not() -> None:
    with pytest.raises(ConfigError, match="never `pip install apex`"):
        _build(["optimizer.backend=apex"], nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0]), ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0])],
)
def test_warmup_and_decay(kind: str, expected: list[float]) -> None:
    job = load_job(
        "capt_tiny", ["schedule.max_steps=6", "schedule.warmup_steps=4", f"schedule.type={kind}", "optimizer.lr=1.0"]
    )
    rates = [learning_rate(step, job.schedule, job.optimizer) for step in range(7)]
    assert rates == pytest.approx(expected)


def test_cosine_ends_at_zero() -> None:
    job = load_job(
        "capt_tiny", ["schedule.max_steps=8", "schedule.warmup_steps=0", "schedule.type=cosine", "optimizer.lr=2.0"]
    )
    assert [learning_rate(s, job.schedule, job.optimizer) for s in (0, 4, 8)] == pytest.approx(
        [2.0, 1.0, 0.0], abs=1e-12
    )
