"""Losses of a teacher's vectors: value and gradients are literal float64 loops, on 1, 2 and 4 ragged ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast.teacher import cosine_distance_loss, listwise_loss, squared_distance_loss
from tests.support import run_ranks
from tests.unit.contrast.support import relative

N, WIDTH, TEACHER, TAU, ABOVE = 9, 6, 8, 0.3, 0.2
RANKS = {1: [0, N], 2: [0, 7, N], 4: [0, 4, 4, 5, N]}
"""The first row of each rank; one of four has none."""
CUT = {"matryoshka": (WIDTH, 3), "matryoshka_weights": (1.0, 0.5)}
LOSSES = ("cosine", "mse", "listwise")


def _rows() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, narrow, wide = (
        torch.randn(N, width, generator=generator, dtype=torch.float64) for width in (WIDTH, WIDTH, TEACHER)
    )
    wide[3] = wide[5]  # two texts that the teacher cannot tell apart
    return student, narrow, wide


def _by_terms(name: str, student: Tensor, widths: dict[int, float]) -> Tensor:
    """The mean over the texts, one number at a time."""
    _, narrow, wide = _rows()
    total = torch.zeros((), dtype=torch.float64)
    for width, weight in widths.items():
        s = student[:, :width]
        for i in range(N):
            t = narrow[i, :width]
            if name == "cosine":
                total = total + weight * (1 - (s[i] @ t) / (s[i].norm() * t.norm()))
            elif name == "mse":
                total = total + weight * sum((s[i, k] - t[k]) ** 2 for k in range(width)) / width
            else:
                others = [j for j in range(N) if j != i]
                theirs = {
                    j: math.exp(float(normalize(wide[i], dim=0) @ normalize(wide[j], dim=0)) / ABOVE) for j in others
                }
                ours = {j: ((s[i] @ s[j]) / (s[i].norm() * s[j].norm()) / TAU).exp() for j in others}
                for j in others:
                    p, r = theirs[j] / sum(theirs.values()), ours[j] / sum(ours.values())
                    total = total + weight * p * (math.log(p) - r.log())
    return total / N


def _rank_solves(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[float, Any]]:
    rank, world = distributed.rank(), distributed.world_size()
    mine = slice(*RANKS[world][rank : rank + 2])
    student, narrow, wide = (rows[mine] for rows in _rows())
    found = []
    for name, options in cases:
        rows = student.clone().requires_grad_()
        if name == "listwise":
            loss = listwise_loss(rows, wide, temperature=TAU, teacher_temperature=ABOVE, **options)
        else:
            loss = {"cosine": cosine_distance_loss, "mse": squared_distance_loss}[name](rows, narrow, **options)
        loss.backward()
        assert rows.grad is not None
        found.append((loss.item() / world, rows.grad.numpy() / world))
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_loss_and_gradients_are_the_literal_loop(world: int) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [(name, options) for name in LOSSES for options in ({}, CUT)]
    ranks = run_ranks(_rank_solves, world, cases) if world > 1 else [_rank_solves(cases)]
    for number, (name, options) in enumerate(cases):
        student = _rows()[0].requires_grad_()
        expected = _by_terms(name, student, {WIDTH: 1.0, 3: 0.5} if options else {WIDTH: 1.0})
        expected.backward()
        assert student.grad is not None
        assert sum(each[number][0] for each in ranks) == pytest.approx(expected.item(), rel=1e-12), name
        actual = torch.cat([torch.from_numpy(each[number][1]) for each in ranks])
        assert relative(actual, student.grad) < 1e-11, (name, options)


def test_what_blocks_and_scales_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    student, narrow, wide = _rows()
    whole = listwise_loss(student, wide, temperature=TAU)
    monkeypatch.setattr("capt.pretrain.contrast.teacher._BLOCK", 2 * N)
    assert listwise_loss(3 * student, 2 * wide, temperature=TAU).item() == pytest.approx(whole.item(), rel=1e-12)
    assert listwise_loss(wide, wide, temperature=TAU).item() == pytest.approx(0, abs=1e-14)
    assert listwise_loss(student[:1], wide[:1], temperature=TAU).item() == 0
    with torch.autocast("cpu", torch.bfloat16):
        inside = listwise_loss(student.float(), wide.float(), temperature=0.02)
    assert inside.item() == pytest.approx(listwise_loss(student, wide, temperature=0.02).item(), rel=1e-5)
    # A cosine is learnt whatever the lengths are, a distance is not.
    assert cosine_distance_loss(2 * narrow, narrow).item() == pytest.approx(0, abs=1e-14)
    assert squared_distance_loss(2 * narrow, narrow).item() == pytest.approx(narrow.square().mean().item())
    with pytest.raises(ConfigError, match=r"vectors of \(9, 6\) and a teacher's of \(9, 8\): one of each"):
        cosine_distance_loss(student, wide)
