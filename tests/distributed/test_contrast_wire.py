"""Traffic of the contrast: two collectives of a size that the queue has no part in, and none in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capt.pretrain.base import distributed
from capt.pretrain.contrast import ContrastStats, ShardedQueue, capt_loss, info_nce
from capt.pretrain.plan.simulated import Sent, Wire
from tests.support import run_ranks
from tests.unit.contrast.support import unit
from tests.unit.contrast.test_capt import _LargestTensor

N, D = 16, 64
_ALL = 2 * 2 * N
"""Anchors of two ranks."""


def _received(sent: list[Sent]) -> list[tuple[str, int]]:
    return [(each.name, each.received) for each in sent]


def _traffic(capacity: int, options: dict[str, Any], frozen: bool) -> dict[str, Any]:
    rank = distributed.rank()
    s, s_hat = (unit(N, D, seed=2 * rank + i, dtype=torch.float32).requires_grad_(not frozen) for i in (0, 1))
    queue = ShardedQueue(capacity, D, drift=options.pop("drift", "none"))
    queue.enqueue(unit(queue.shard_size, D, seed=9 + rank, dtype=torch.float32))
    stats = ContrastStats() if options.pop("stats", False) else None
    ids = torch.arange(N) if options.pop("ids", False) else None
    with Wire() as wire, _LargestTensor() as largest:
        loss = capt_loss(s, s_hat, queue, temperature=0.05, stats=stats, ids=ids, **options)
        forward = _received(wire.sent)
        if not frozen:
            loss.backward()
        queue.enqueue(s, s_hat)
        return {"forward": forward, "later": _received(wire.sent)[len(forward) :], "largest": largest.elements}


@pytest.mark.parametrize("world", [2, 4])
def test_traffic_is_that_of_the_anchors_whatever_the_queue(world: int) -> None:
    m, others = 2 * N, world - 1
    for capacity in (507, 8192):
        results = run_ranks(_traffic, world, capacity, {}, False)
        for result in results:
            assert result["forward"] == [
                ("_allgather_base_", others * 8),  # rows of each rank
                ("_allgather_base_", others * m * D * 4),  # the anchors
                ("_reduce_scatter_base_", others * m * (D + 1) * 4),  # their sums
                ("_allgather_base_", others * m * 4),  # their log-sums, for the gradients of live keys
            ]
            assert result["later"] == []
            assert result["largest"] < min(world * m * capacity / 4, capacity * D)


def _both_ways() -> list[Any]:
    """Loss and gradient of rows of which all ranks have equal numbers, first asking how many, then knowing it."""
    found: list[Any] = []
    for equal in (False, True):
        s, s_hat = (unit(N, D, seed=2 * distributed.rank() + i, dtype=torch.float32).requires_grad_() for i in (0, 1))
        with Wire() as wire:
            loss = capt_loss(s, s_hat, temperature=0.05, equal_rows=equal)
            loss.backward()
        assert s.grad is not None
        found.append((float(loss), s.grad.numpy(), _received(wire.sent)))
    return found


def test_rows_known_to_be_equal_are_not_counted() -> None:
    for (loss, slope, asked), (same_loss, same_slope, told) in run_ranks(_both_ways, 2):
        assert told == asked[1:]
        assert asked[0] == ("_allgather_base_", 8)
        assert same_loss == loss
        assert (same_slope == slope).all()


@pytest.mark.parametrize(
    ("options", "frozen", "expected"),
    [
        ({"in_batch": "none"}, False, [8, 2 * N * D * 4, 2 * N * (D + 1) * 4]),
        ({"stats": True}, False, [8, 2 * N * D * 4, 2 * 2 * N * 4, 2 * N * (D + 2) * 4, 2 * N * 4]),
        ({"ids": True}, False, [8, 2 * N * D * 4, 2 * N * 8, 2 * N * (D + 1) * 4, 2 * N * 4]),
        ({}, True, [8, 2 * N * D * 4, 2 * N * 4]),
        ({"queue_share": 1.0}, False, [8, 8, 2 * N * D * 4, 2 * N * (D + 1) * 4, 2 * N * 4]),
        ({"hardness": 5.0}, False, [8, 2 * N * D * 4, 2 * _ALL * 4, 2 * N * (D + 1) * 4, 2 * N * 4]),
        (
            {"hardness": 50.0},
            False,
            [8, 2 * N * D * 4, _ALL * 4, 2 * _ALL * 4, _ALL * 4, 2 * N * (D + 1) * 4, 2 * N * 4],
        ),
        (
            {"hardness": 5.0, "stats": True},
            False,
            [8, 2 * N * D * 4, _ALL * 4, 2 * _ALL * 4, _ALL * 4, _ALL * 4, 2 * N * (D + 2) * 4, 2 * N * 4],
        ),
        ({"precision": "bf16"}, False, [8, 2 * N * D * 2, 2 * N * (D + 1) * 4, 2 * N * 4]),
        ({"mask_margin": 0.1}, False, [8, 2 * N * D * 4, 2 * N * 4, 2 * N * (D + 1) * 4, 2 * N * 4]),
        ({"hardness_in_batch": 5.0}, False, [8, 2 * N * D * 4, 2 * N * (D + 1) * 4, 2 * N * 4]),
        (
            {"matryoshka": (D, 16), "ids": True},
            False,
            [8, 2 * N * D * 4, 2 * N * 8, *(size for w in (D, 16) for size in (2 * N * (w + 1) * 4, 2 * N * 4))],
        ),
    ],
    ids=[
        "queue only", "statistics", "ids", "validation", "share of the queue", "hardness", "hardness, large logits",
        "hardness, statistics", "bf16", "mask by score", "hardness of live rows", "widths",
    ],
)  # fmt: skip
def test_what_each_option_adds(options: dict[str, Any], frozen: bool, expected: list[int]) -> None:
    for result in run_ranks(_traffic, 2, 507, options, frozen):
        assert [size for _, size in result["forward"]] == expected


def test_hardness_adds_two_numbers_an_anchor_whatever_the_queue() -> None:
    for capacity in (507, 8192):
        plain = run_ranks(_traffic, 2, capacity, {}, False)
        for result, before in zip(run_ranks(_traffic, 2, capacity, {"hardness": 5.0}, False), plain, strict=True):
            assert sorted(result["forward"]) == sorted([*before["forward"], ("allreduce_", 2 * _ALL * 4)])
            assert result["later"] == []
            assert result["largest"] < min(_ALL * capacity / 4, capacity * D)


@pytest.mark.parametrize("capacity", [507, 8192])
def test_drift_adds_one_sum_to_the_loss_and_one_to_the_push_whatever_the_queue(capacity: int) -> None:
    plain = run_ranks(_traffic, 2, capacity, {}, False)
    for result, before in zip(run_ranks(_traffic, 2, capacity, {"drift": "moments"}, False), plain, strict=True):
        added = ("allreduce_", (2 * D + 1) * 8)
        assert sorted(result["forward"]) == sorted([*before["forward"], added])
        assert result["later"] == [added]


def _known_pairs(known: int) -> list[tuple[str, int]]:
    rows = unit(N, D, seed=distributed.rank()).requires_grad_()
    ids, queries = torch.arange(N), torch.arange(N) // 2
    pairs = torch.stack([torch.arange(known) % N, torch.arange(known)], 1) if known else None
    with Wire() as wire:
        options = {"query_ids": queries, "known": pairs} if known else {}
        info_nce(rows, rows.flip(0).detach(), temperature=0.05, ids=ids, equal_rows=True, **options).backward()
    return _received(wire.sent)


def test_known_pairs_send_one_id_more_for_each_anchor_however_many_they_are() -> None:
    plain = run_ranks(_known_pairs, 2, 0)
    for known in (3, 5000):
        for sent, before in zip(run_ranks(_known_pairs, 2, known), plain, strict=True):
            assert sorted(sent) == sorted([*before, ("_allgather_base_", N * 8)])


def _local_without_queue() -> list[tuple[str, int]]:
    rows = unit(N, D, seed=distributed.rank()).requires_grad_()
    with Wire() as wire:
        capt_loss(rows, rows.flip(0).detach(), temperature=0.05, in_batch="local").backward()
    return _received(wire.sent)


def test_local_negatives_without_a_queue_send_nothing_but_the_counts() -> None:
    assert run_ranks(_local_without_queue, 2) == [[("_allgather_base_", 8)]] * 2
