"""Losses of scored pairs: literal float64 loops on 1, 2 and 4 ranks that hold different numbers, ties included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast import cosent_loss, cosine_regression_loss
from tests.support import run_ranks
from tests.unit.contrast.support import near, relative, unit

N, WIDTH = 13, 8
COUNTS = {1: (13,), 2: (9, 4), 4: (5, 2, 6, 0)}
CASES: list[dict[str, Any]] = [
    {"temperature": 0.05},
    {"temperature": 0.002},
    {"temperature": 0.1, "matryoshka": (WIDTH, 3), "matryoshka_weights": (1.0, 0.5)},
    {"temperature": 0.1, "grad_reduction": "sum"},
    {"temperature": 0.1, "equal_scores": True},
    {"regression": True},
    {"regression": True, "matryoshka": (WIDTH, 3), "reduction": "sum"},
]


def _batch(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    q = unit(N, WIDTH, seed=0)
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(0, 6, (N,), generator=generator).double() / 5  # several of each
    return q, near(q, 0.9, seed=1), torch.zeros_like(scores) if case.get("equal_scores") else scores


def _by_terms(case: dict[str, Any], q: Tensor, d: Tensor, y: Tensor, tau: Tensor) -> Tensor:
    """Every two pairs, one after the other."""
    total = 0 * (q.sum() + d.sum() + tau)
    widths = case.get("matryoshka", (WIDTH,))
    for width, weight in zip(widths, case.get("matryoshka_weights", (1.0,) * len(widths)), strict=True):
        a, b = (rows if width == WIDTH else normalize(rows[:, :width], dim=1) for rows in (q, d))
        cosines = [a[i] @ b[i] for i in range(N)]
        if case.get("regression"):
            errors = sum(((cosine - score) ** 2 for cosine, score in zip(cosines, y, strict=True)), total * 0)
            total = total + weight * errors / (1 if case.get("reduction") == "sum" else N)
            continue
        terms = [(cosines[i] - cosines[j]) / tau for i in range(N) for j in range(N) if y[i] < y[j]]
        total = total + weight * torch.stack([*terms, torch.zeros((), dtype=torch.float64)]).logsumexp(0)
    return total


def _rank_solves(cases: list[dict[str, Any]]) -> list[list[Any]]:
    rank, world = distributed.rank(), distributed.world_size()
    first = sum(COUNTS[world][:rank])
    mine = slice(first, first + COUNTS[world][rank])
    results = []
    for case in cases:
        q, d, y = _batch(case)
        rows = [each[mine].clone().requires_grad_() for each in (q, d)]
        tau = torch.tensor(case.get("temperature", 1.0), dtype=torch.float64, requires_grad=True)
        options = {name: case[name] for name in case if name not in ("temperature", "regression", "equal_scores")}
        if case.get("regression"):
            loss = cosine_regression_loss(*rows, y[mine], **options)
        else:
            loss = cosent_loss(*rows, y[mine], temperature=tau, **options)
        gradients = torch.autograd.grad(loss, [*rows, tau], materialize_grads=True)
        results.append([loss.item(), *(each.numpy() for each in gradients)])
    return results


@pytest.mark.parametrize("world", [1, 2, 4])
def test_loss_and_gradients_are_the_literal_loop(world: int) -> None:
    ranks = run_ranks(_rank_solves, world, CASES)
    for number, case in enumerate(CASES):
        q, d, y = _batch(case)
        rows = [each.clone().requires_grad_() for each in (q, d)]
        tau = torch.tensor(case.get("temperature", 1.0), dtype=torch.float64, requires_grad=True)
        expected = _by_terms(case, *rows, y, tau)
        gradients = torch.autograd.grad(expected, [*rows, tau], materialize_grads=True)
        combine = 1 if case.get("grad_reduction") == "sum" else world
        parts = [rank[number] for rank in ranks]
        assert sum(part[0] for part in parts) / combine == pytest.approx(expected.item(), rel=1e-11, abs=1e-13), case
        for place, gradient in enumerate(gradients[:2], start=1):
            actual = torch.cat([torch.from_numpy(part[place]) for part in parts]) / combine
            assert relative(actual, gradient) < 1e-10 if gradient.any() else not actual.any(), case
        by_tau = sum(float(part[3]) for part in parts) / combine
        assert by_tau == pytest.approx(gradients[2].item(), rel=1e-9, abs=1e-12), case


def test_scores_that_do_not_fit() -> None:
    q, d, _ = _batch({})
    with pytest.raises(ConfigError, match="a score is not finite"):
        cosine_regression_loss(q, d, torch.full((N,), math.nan))
