"""Forms, masks, weights and widths of a loss over pairs: value and gradients of every option and of every two of them
equal a literal loop over terms, on 1, 2 and 4 ranks that hold different numbers of rows.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from capt.pretrain.base import distributed
from capt.pretrain.contrast import ContrastStats, ShardedQueue, info_nce
from capt.pretrain.contrast.precisions import precision_rows
from capt.pretrain.contrast.similarity import product, similarity_nce
from tests.support import run_ranks
from tests.unit.contrast.pairs import WIDTH, Pairs, pooled
from tests.unit.contrast.support import relative

OPTIONS: list[dict[str, Any]] = [
    {"directions": "infonce"},
    {"directions": "symmetric"},
    {"directions": "gte"},
    {"directions": "qwen3"},
    {"directions": ("q-d", "d-q")},
    {"directions": ("d-d", "q-d")},
    {"hard": False},
    {"hard_negatives": "own"},
    {"mask_margin": -0.1},
    {"mask_relative": 0.25},
    {"hardness_in_batch": 9.0},
    {"hardness_own": 5.0},
    {"matryoshka": (WIDTH, 3, 5), "matryoshka_weights": (1.0, 0.5, 2.0)},
    {"precisions": ("float", "int8", "binary"), "precision_weights": (1.0, 0.5, 2.0)},
    {"with_ids": True},
    {"with_ids": "known"},
    {"in_batch": "local"},
    {"in_batch": "none"},
    {"queued": True},
    {"queued": True, "hardness": 3.0},
    {"queued": True, "queue_share": 0.3},
    {"impl": "dense"},
    {"temperature": 0.004},
    {"learned": True},
    {"by_row": True},
    {"stats": True},
    {"reduction": "sum"},
    {"similarity": True},
]
ARGUMENTS = ("hard", "with_ids", "queued", "temperature", "learned", "by_row", "stats", "similarity")
"""Arguments beside the options."""

Case = dict[str, Any]

_OF_SIMILARITIES = {
    "similarity", "directions", "hard", "hard_negatives", "with_ids", "in_batch", "temperature", "by_row", "stats",
    "reduction",
}  # fmt: skip
"""The options of a loss by a similarity, which must be those of vectors where it is the product."""


# By a margin and not by a share of the positive: a positive of 0 has negatives of 0 beside it, where rows are bits.
_OF_PRECISIONS = {"matryoshka", "queued", "mask_margin", "by_row", "stats", "learned"}
"""Keys that apply to blocks of rows."""


def _is_meaningful(case: Case) -> bool:
    if "similarity" in case and ({*case} - _OF_SIMILARITIES or case.get("directions", "infonce") != "infonce"):
        return False  # of vectors alone
    if case.get("in_batch") == "none" and (case.get("queue_share") or not (case.get("hard", True) or "queued" in case)):
        return False
    others = {*case} - {"precisions", "precision_weights"}
    if "precisions" in case and others and not others & _OF_PRECISIONS:
        return False  # nothing of theirs depends on the rest
    if case.get("by_row") and ({*case} & {"hardness", "hardness_in_batch", "hardness_own", "temperature", "learned"}):
        return False  # refused, or another temperature
    return "queue_share" not in case or case.get("in_batch") != "local"  # its rows are counted by rank then


def _pairs_of_options() -> list[Case]:
    both = [{**a, **b} for a, b in itertools.combinations(OPTIONS, 2) if not {*a} & {*b} - {"queued"}]
    return [case for case in both if _is_meaningful(case) and not {"mask_margin", "mask_relative"} <= {*case}]


def _rank_solves(cases: list[Case]) -> list[dict[str, Any]]:
    rank, world = distributed.rank(), distributed.world_size()
    batch = Pairs(world)
    mine = torch.tensor([owner == rank for owner in batch.ranks])
    my_hard = torch.tensor([owner == rank for owner in batch.hard_ranks])
    first = batch.ranks.index(rank) if rank in batch.ranks else 0
    results = []
    for case in cases:
        several = case.get("precisions")
        whole = [pooled(each) if several else each.clone() for each in (batch.q, batch.d, batch.h)]
        rows = [each.requires_grad_() for each in (whole[0][mine], whole[1][mine], whole[2][my_hard])]
        given_rows = [precision_rows(each, several) if several else each for each in rows]
        queued = precision_rows(pooled(batch.queue), several) if several else batch.queue
        known, hard = case.get("with_ids"), case.get("hard", True)
        queue = None
        if case.get("queued"):
            queue = ShardedQueue(64, queued.shape[1], dtype=torch.float64)
            queue.enqueue(queued[rank::world], ids=batch.queue_ids[rank::world] if known else None)
        tau = torch.tensor(case.get("temperature", 0.2), dtype=torch.float64, requires_grad=True)
        owners = batch.owners[my_hard]
        given: Case = dict(
            temperature=batch.temperatures[mine] if case.get("by_row") else tau if case.get("learned") else tau.item(),
            negatives=given_rows[2] if hard else None,
            negative_ids=batch.hard_ids[my_hard] if known and hard else None,
            negative_owners=torch.where(owners < 0, owners, owners - first) if hard else None,
            ids=batch.ids[mine] if known else None,
            query_ids=batch.query_ids[mine] if known == "known" else None,
            known=batch.known if known == "known" else None,
            stats=ContrastStats() if case.get("stats") else None,
            **{name: value for name, value in case.items() if name not in ARGUMENTS},
        )
        if case.get("similarity"):
            loss = similarity_nce(given_rows[0], given_rows[1], product, **given)
        else:
            loss = info_nce(given_rows[0], given_rows[1], queue=queue, **given)
        gradients = torch.autograd.grad(loss, [*rows, tau], materialize_grads=True)
        results.append({"loss": loss.item(), "gradients": [each.numpy() for each in gradients]})
    return results


@functools.cache
def _solved(world: int, case: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    options = dict(case)
    return Pairs(world).solve(options.get("temperature", 0.2), options)


def _check(world: int, case: Case, ranks: list[dict[str, Any]]) -> None:
    key = tuple((name, value) for name, value in case.items() if name not in ("impl", "learned", "stats", "similarity"))
    expected = _solved(world if case.get("in_batch") == "local" else 1, key)
    assert sum(each["loss"] for each in ranks) / world == pytest.approx(expected["loss"], rel=1e-11, abs=1e-13)
    batch = Pairs(world)
    for place, (name, owners) in enumerate((("q", batch.ranks), ("d", batch.ranks), ("h", batch.hard_ranks))):
        actual = torch.zeros_like(expected[name])
        for rank, each in enumerate(ranks):
            actual[torch.tensor(owners) == rank] = torch.from_numpy(each["gradients"][place]) / world
        assert relative(actual, expected[name]) < 1e-10 if expected[name].any() else not actual.any(), name
    if case.get("learned"):
        by_tau = sum(float(each["gradients"][3]) for each in ranks) / world
        assert by_tau == pytest.approx(expected["tau"], rel=1e-9, abs=1e-12)
    if {"mask_margin", "mask_relative"} & {*case} and case.get("in_batch") != "none":
        assert expected["masked"], "the case does not try the mask"


def _compare(world: int, cases: list[Case]) -> None:
    ranks = run_ranks(_rank_solves, world, cases)
    failures = []
    for index, case in enumerate(cases):
        try:
            _check(world, case, [rank[index] for rank in ranks])
        except AssertionError as error:
            failures.append(f"{case}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_option_is_the_literal_loop(world: int) -> None:
    _compare(world, [{}, *filter(_is_meaningful, OPTIONS)])


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_two_options_are_the_literal_loop(world: int) -> None:
    _compare(world, _pairs_of_options())
