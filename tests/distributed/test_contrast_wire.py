"""What goes over the wire: two collectives of a size that the queue has no part in, and none in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.contrast import ContrastStats, ShardedQueue, capt_loss
from pretrain.engine import distributed
from tests.support import run_ranks
from tests.unit.contrast.support import unit
from tests.unit.contrast.test_capt import _LargestTensor

N, D = 16, 64


class Wire:
    """Counts the bytes that each collective brings to this rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.received: list[tuple[str, int]] = []
        world = dist.get_world_size()
        own_share: dict[str, Callable[[Tensor, Tensor], int]] = {
            "all_gather_into_tensor": lambda out, sent: (world - 1) * sent.nbytes,
            "reduce_scatter_tensor": lambda out, sent: (world - 1) * out.nbytes,
        }
        for name, size in own_share.items():
            patch.setattr(dist, name, self._counted(name, getattr(dist, name), size))
        original = dist.all_reduce
        patch.setattr(dist, "all_reduce", self._counted("all_reduce", original, lambda x, *_: x.nbytes))

    def _counted(self, name: str, call: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.received.append((name, size(*args)))
            return call(*args, **kwargs)

        return counted


def _traffic(capacity: int, options: dict[str, Any], frozen: bool) -> dict[str, Any]:
    rank = distributed.rank()
    s, s_hat = (unit(N, D, seed=2 * rank + i, dtype=torch.float32).requires_grad_(not frozen) for i in (0, 1))
    queue = ShardedQueue(capacity, D)
    queue.enqueue(unit(queue.share, D, seed=9 + rank, dtype=torch.float32))
    stats = ContrastStats() if options.pop("stats", False) else None
    ids = torch.arange(N) if options.pop("ids", False) else None
    with pytest.MonkeyPatch.context() as patch, _LargestTensor() as largest:
        wire = Wire(patch)
        loss = capt_loss(s, s_hat, queue, temperature=0.05, stats=stats, ids=ids, **options)
        forward = list(wire.received)
        if not frozen:
            loss.backward()
        queue.enqueue(s, s_hat)
        return {"forward": forward, "later": wire.received[len(forward) :], "largest": largest.elements}


@pytest.mark.parametrize("world", [2, 4])
def test_traffic_is_that_of_the_anchors_whatever_the_queue(world: int) -> None:
    m, others = 2 * N, world - 1
    for capacity in (507, 8192):
        results = run_ranks(_traffic, world, capacity, {}, False)
        for result in results:
            assert result["forward"] == [
                ("all_gather_into_tensor", others * 8),  # rows of each rank
                ("all_gather_into_tensor", others * m * D * 4),  # the anchors
                ("reduce_scatter_tensor", others * m * (D + 1) * 4),  # their sums
                ("all_gather_into_tensor", others * m * 4),  # their log-sums, for the gradients of live keys
            ]
            assert result["later"] == []
            assert result["largest"] < min(world * m * capacity / 4, capacity * D)


@pytest.mark.parametrize(
    ("options", "frozen", "expected"),
    [
        ({"in_batch": "none"}, False, [8, 2 * N * D * 4, 2 * N * (D + 1) * 4]),
        ({"stats": True}, False, [8, 2 * N * D * 4, 2 * 2 * N * 4, 2 * N * (D + 1) * 4, 2 * N * 4]),
        ({"ids": True}, False, [8, 2 * N * D * 4, 2 * N * 8, 2 * N * (D + 1) * 4, 2 * N * 4]),
        ({}, True, [8, 2 * N * D * 4, 2 * N * 4]),
    ],
    ids=["queue only", "running reference", "ids", "validation"],
)
def test_what_each_option_adds(options: dict[str, Any], frozen: bool, expected: list[int]) -> None:
    for result in run_ranks(_traffic, 2, 507, options, frozen):
        assert [size for _, size in result["forward"]] == expected


def _local_without_queue() -> list[tuple[str, int]]:
    rows = unit(N, D, seed=distributed.rank()).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        wire = Wire(patch)
        capt_loss(rows, rows.flip(0).detach(), temperature=0.05, in_batch="local").backward()
        return wire.received


def test_local_negatives_without_a_queue_send_nothing_but_the_counts() -> None:
    assert run_ranks(_local_without_queue, 2) == [[("all_gather_into_tensor", 8)]] * 2
