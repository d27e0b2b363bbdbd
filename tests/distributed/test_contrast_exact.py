"""The loss on 2 and 4 real processes equals the oracle on the joined batch: value, gradients, scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from capt.pretrain.base import distributed
from capt.pretrain.contrast import ContrastStats, ShardedQueue, capt_loss, info_nce
from tests.support import run_ranks
from tests.unit.contrast.support import TEMPERATURES, Problem, near, relative, unit

D, K = 123, 507


@dataclass(frozen=True)
class Case:
    """A call on every rank; ``counts[r]`` samples live on rank ``r``."""

    counts: tuple[int, ...]
    temperature: float = 0.05
    pushed: int = 0
    noise: float = 10.0
    dtype: torch.dtype = torch.float64
    in_batch: str = "global"
    reduction: str = "mean"
    grad_reduction: str = "mean"
    with_ids: bool = False
    learned: bool = False
    stats: bool = False
    impl: str = "chunked"
    hardness: float = 0.0

    @property
    def world(self) -> int:
        return len(self.counts)

    def owner(self) -> torch.Tensor:
        """Samples are dealt out in turn, as a data-parallel sampler does, until a rank has its count."""
        places = [(i, rank) for rank, count in enumerate(self.counts) for i in range(count)]
        return torch.tensor([rank for _, rank in sorted(places)], dtype=torch.int64)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        s = unit(sum(self.counts), D, seed=0, dtype=self.dtype)
        return s, near(s, self.noise, seed=1)

    def queued(self) -> torch.Tensor:
        """Rows pushed so far, in the global order."""
        return unit(self.pushed, D, seed=2, dtype=self.dtype)

    def ids(self) -> torch.Tensor | None:
        return torch.arange(sum(self.counts)) // 2 % 5 if self.with_ids else None


def _cases(world: int) -> list[Case]:
    even, ragged = (5,) * world, (5, 2, 7, 1)[:world]
    cases = [
        Case(ragged, temperature, pushed, noise)
        for temperature in TEMPERATURES
        for pushed in (60 * world, 400 * world)
        for noise in (10.0, 0.05)
    ]
    cases += [Case(even, pushed=pushed, noise=noise) for pushed in (60 * world, 400 * world) for noise in (10.0, 0.05)]
    cases += [Case(ragged, t, 400 * world, 0.05, torch.float32) for t in TEMPERATURES]
    for in_batch in ("local", "none"):
        cases += [Case(counts, pushed=60 * world, in_batch=in_batch) for counts in (even, ragged)]
    cases += [
        Case(ragged),
        Case(ragged, in_batch="local"),
        Case(ragged, pushed=600 * world, impl="dense"),
        Case(ragged, pushed=600 * world, temperature=0.001),
        Case(ragged, pushed=600 * world, stats=True),
        Case(ragged, pushed=60 * world, stats=True, with_ids=True, temperature=0.01),
        Case((0, *ragged[1:]), stats=True),
        Case(ragged, pushed=600 * world, learned=True),
        Case(ragged, pushed=600 * world, reduction="sum"),
        Case(ragged, pushed=600 * world, grad_reduction="sum"),
        Case(ragged, pushed=600 * world, grad_reduction="sum", reduction="sum"),
        Case(ragged, pushed=600 * world, with_ids=True),
        Case(ragged, pushed=600 * world, with_ids=True, in_batch="local"),
        Case(ragged, with_ids=True, temperature=0.3),
        Case((0, *ragged[1:]), pushed=60 * world),
    ]
    cases += [Case(ragged, t, 600 * world, hardness=hardness) for t in (0.5, 0.05) for hardness in (2.0, 30.0, 1000.0)]
    cases += [
        Case(even, pushed=60 * world, noise=0.05, hardness=20.0),
        Case(ragged, pushed=600 * world, noise=0.05, dtype=torch.float32, hardness=20.0),
        Case(ragged, pushed=60 * world, in_batch="none", hardness=20.0),
        Case(ragged, pushed=60 * world, in_batch="local", hardness=20.0),
        Case(ragged, pushed=600 * world, impl="dense", hardness=20.0),
        Case(ragged, pushed=600 * world, learned=True, hardness=20.0),
        Case(ragged, pushed=600 * world, stats=True, hardness=20.0),
        Case(ragged, pushed=60 * world, stats=True, with_ids=True, temperature=0.01, hardness=200.0),
        Case((0, *ragged[1:]), pushed=60 * world, with_ids=True, hardness=20.0),
        Case(ragged, pushed=600 * world, with_ids=True, hardness=20.0),
        Case(ragged, pushed=1, with_ids=True, hardness=20.0),  # a queued row on one rank, for some anchors not even it
        Case(ragged, pushed=1, with_ids=True, stats=True, hardness=1000.0),
    ]
    return cases


def _rank_solves(cases: list[Case]) -> list[dict[str, Any]]:
    rank, world = distributed.rank(), distributed.world_size()
    results = []
    for case in cases:
        mine = case.owner() == rank
        s, s_hat = (rows[mine].requires_grad_() for rows in case.rows())
        ids = case.ids()
        queue = None
        if case.pushed:
            queue = ShardedQueue(K, D, dtype=case.dtype)
            queued, queued_ids = case.queued(), torch.arange(case.pushed) % 7
            for start in range(0, case.pushed, 40 * world):
                step = slice(start + rank, start + 40 * world, world)
                queue.enqueue(queued[step], ids=queued_ids[step] if case.with_ids else None)
        tau = torch.tensor(case.temperature, dtype=case.dtype, requires_grad=True)
        stats = ContrastStats() if case.stats else None
        loss = capt_loss(
            s,
            s_hat,
            queue,
            temperature=tau if case.learned else case.temperature,
            in_batch=case.in_batch,  # type: ignore[arg-type]
            reduction=case.reduction,  # type: ignore[arg-type]
            grad_reduction=case.grad_reduction,  # type: ignore[arg-type]
            ids=None if ids is None else ids[mine],
            impl=case.impl,
            hardness=case.hardness,
            stats=stats,
        )
        loss.backward()
        whole = None if stats is None else stats.over_ranks()
        results.append(
            {
                "loss": loss.item(),
                "s": s.grad.numpy(),  # type: ignore[union-attr]
                "s_hat": s_hat.grad.numpy(),  # type: ignore[union-attr]
                "tau": 0.0 if tau.grad is None else tau.grad.item(),
                "rows": 0 if queue is None else len(queue),
                "anchors": None if stats is None else stats.anchors,
                "stats": None
                if whole is None
                else (whole.anchors, whole.top1, whole.margin, whole.effective_negatives),
            }
        )
    return results


def _check(case: Case, ranks: list[dict[str, Any]]) -> None:
    s, s_hat = case.rows()
    ids = torch.arange(case.pushed)[-K:] % 7
    problem = Problem(
        s, s_hat, case.owner(), case.queued()[-K:], case.temperature, case.in_batch, case.ids(), ids, case.hardness
    )  # fmt: skip
    loss, d_s, d_s_hat, d_tau = problem.solve(case.reduction)
    share = 1 / case.world if case.grad_reduction == "mean" else 1.0
    fp64 = case.dtype == torch.float64
    assert abs(sum(r["loss"] for r in ranks) * share - loss) <= (1e-12 if fp64 else 1e-5) * max(loss, 1.0)
    for name, expected in (("s", d_s), ("s_hat", d_s_hat)):
        actual = torch.empty_like(expected)
        for rank, result in enumerate(ranks):
            actual[case.owner() == rank] = torch.from_numpy(np.asarray(result[name])).double() * share
        assert relative(actual, expected) < (1e-10 if fp64 else 1e-5), name
    if case.learned:
        assert sum(r["tau"] for r in ranks) * share == pytest.approx(d_tau, rel=1e-10)
    assert max(r["rows"] for r in ranks) <= -(-K // case.world)
    if case.stats:
        assert [r["anchors"] for r in ranks] == [2 * n for n in case.counts]
        rows, partners = torch.cat([s, s_hat]).detach(), torch.cat([s_hat, s]).detach()
        cosines = (rows @ torch.cat([rows, problem.queue]).T).masked_fill(~problem.is_negative(), -torch.inf)
        margin = (rows * partners).sum(1) - cosines.amax(1)
        expected = (len(rows), (margin > 0).double().mean(), margin.mean(), problem.effective_negatives())
        for result in ranks:
            assert result["stats"] == pytest.approx([float(value) for value in expected], rel=1e-10)


@pytest.mark.parametrize("world", [2, 4])
def test_equals_the_oracle_on_the_joined_batch(world: int) -> None:
    cases = _cases(world)
    results = run_ranks(_rank_solves, world, cases)
    for index, case in enumerate(cases):
        try:
            _check(case, [rank[index] for rank in results])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def _one_direction(symmetric: bool) -> tuple[float, Any, Any]:
    rank, world = distributed.rank(), distributed.world_size()
    a, p = (unit(9, D, seed=seed)[rank::world].requires_grad_() for seed in (0, 1))
    loss = info_nce(a, p, temperature=0.1, symmetric=symmetric, negatives=unit(3 + rank, D, seed=5 + rank))
    loss.backward()
    return loss.item(), a.grad.numpy(), p.grad.numpy()  # type: ignore[union-attr]


@pytest.mark.parametrize("symmetric", [False, True])
def test_one_directional_and_clip_form_with_extra_negatives(symmetric: bool) -> None:
    """Two ranks with 5 and 4 anchors, and 3 and 4 extra negatives, against plain cross entropy."""
    ranks = run_ranks(_one_direction, 2, symmetric)
    a, p = (unit(9, D, seed=seed).requires_grad_() for seed in (0, 1))
    extra = torch.cat([unit(3, D, seed=5), unit(4, D, seed=6)])
    directions = [(a, p), (p, a)] if symmetric else [(a, p)]
    losses = [
        torch.nn.functional.cross_entropy(q @ torch.cat([k, extra]).T / 0.1, torch.arange(9)) for q, k in directions
    ]
    expected = torch.stack(losses).mean()
    expected.backward()
    assert sum(r[0] for r in ranks) / 2 == pytest.approx(expected.item(), rel=1e-12)
    for rows, index in ((a, 1), (p, 2)):
        actual = torch.empty_like(rows)
        for rank, result in enumerate(ranks):
            actual.data[rank::2] = torch.from_numpy(result[index]) / 2
        assert rows.grad is not None
        assert relative(actual, rows.grad) < 1e-10
