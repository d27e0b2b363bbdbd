"""The queue on real processes: saved by four ranks, read by two, one and three, with equal losses all the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.contrast import ShardedQueue, capt_loss, shards
from tests.support import run_ranks
from tests.unit.contrast.reference import capt_loss_dense, drifted_queue_by_terms
from tests.unit.contrast.support import unit

SAMPLES, D, K = 12, 16, 101


def _steps(first: int, last: int, load: Path | None, save: Path, options: dict[str, Any]) -> list[float]:
    """Global losses of some steps; the batch of a step is the same for any number of ranks."""
    rank, world = distributed.rank(), distributed.world_size()
    queue = ShardedQueue(K, D, dtype=torch.float64, **options)
    if load is not None:
        queue.load_shards(load)
    losses = []
    for step in range(first, last):
        s, s_hat = (unit(SAMPLES, D, seed=2 * step + view)[rank::world] for view in (0, 1))
        share = capt_loss(s, s_hat, queue, temperature=0.2)
        losses.append(float(distributed.all_reduce_sum(share)) / world)
        queue.enqueue(s, s_hat, ids=torch.arange(SAMPLES)[rank::world])
    queue.save_shard(save)
    return losses


@pytest.mark.parametrize("options", [{}, {"drift": "mean"}, {"drift": "moments"}], ids=["none", "mean", "moments"])
def test_losses_continue_on_any_number_of_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    folders = [tmp_path / str(i) for i in range(5)]
    for folder in folders:
        folder.mkdir()
    uninterrupted = _steps(0, 28, None, folders[4], options)
    losses, load = [], None
    for index, world in enumerate((4, 2, 1, 3)):
        ranks = run_ranks(_steps, world, 7 * index, 7 * (index + 1), load, folders[index], options)
        assert all(rank == ranks[0] for rank in ranks)
        losses += ranks[0]
        load = folders[index]
        assert len(list(load.iterdir())) == world
    assert losses == pytest.approx(uninterrupted, rel=1e-12)


def _ragged(load_options: dict[str, Any], share: float | None) -> dict[str, Any]:
    """Loss and gradients of ranks with 5, 2 and 7 samples, whose queue has rows of three steps, and those steps."""
    rank, counts = distributed.rank(), (5, 2, 7)[: distributed.world_size()]
    queue = ShardedQueue(10_000, D, dtype=torch.float64, **load_options)
    pushed = [_joined(step, counts) for step in range(4)]
    places = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    for s, s_hat in pushed[:3]:
        queue.enqueue(s[places], s_hat[places])
    s, s_hat = (view[places].clone().requires_grad_() for view in pushed[3])
    loss = capt_loss(s, s_hat, queue, temperature=0.2, queue_share=share)
    loss.backward()
    return {"loss": loss.item(), "s": s.grad.numpy(), "s_hat": s_hat.grad.numpy()}


def _joined(step: int, counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    shift = 0.3 * step * unit(D, seed=99)  # the encoder drifts
    views = [unit(sum(counts), D, seed=2 * step + view) + shift for view in (0, 1)]
    return tuple(torch.nn.functional.normalize(view, dim=1) for view in views)  # type: ignore[return-value]


@pytest.mark.parametrize(("drift", "share"), [("mean", None), ("moments", 0.5), ("moments", 100.0)])
def test_ragged_ranks_correct_and_weigh_the_queue_as_the_literal_loops_do(drift: str, share: float | None) -> None:
    counts = (5, 2, 7)
    *old, live = [torch.cat(_joined(step, counts)) for step in range(4)]
    queue = drifted_queue_by_terms(old, live, 10_000, scale=drift == "moments")
    s, s_hat = (view.requires_grad_() for view in _joined(3, counts))
    weight = 1.0 if share is None else min(1.0, share * 2 * sum(counts) / len(queue))
    expected = capt_loss_dense(s, s_hat, 0.2, queue, queue_weight=weight) / sum(counts)
    expected.backward()
    ranks = run_ranks(_ragged, 3, {"drift": drift}, share)
    assert sum(rank["loss"] for rank in ranks) / 3 == pytest.approx(expected.item(), rel=1e-12)
    for name, rows in (("s", s), ("s_hat", s_hat)):
        joined = np.concatenate([rank[name] for rank in ranks]) / 3  # an engine takes the mean over ranks
        np.testing.assert_allclose(joined, rows.grad.numpy(), rtol=1e-9, atol=1e-12)


def _made_early(meeting: Path, used: bool) -> tuple[int, int, str]:
    """The queue's part of a rank, and what the loss says, of a queue that is older than the process group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    queue = ShardedQueue(7, D)
    if used:
        queue.enqueue(unit(2, D, seed=0, dtype=torch.float32))
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{meeting}")
    rows = unit(2, D, seed=1, dtype=torch.float32)
    try:
        capt_loss(rows, rows, queue, temperature=0.1)
    except ConfigError as error:
        return queue.rank, queue.shard_size, str(error)
    return queue.rank, queue.shard_size, ""


def test_a_queue_may_be_made_before_the_process_group(tmp_path: Path) -> None:
    assert run_ranks(_made_early, 2, tmp_path / "unused", False) == [(0, 3, ""), (1, 4, "")]
    for rank, size, error in run_ranks(_made_early, 2, tmp_path / "used", True):
        assert (rank, size) == (0, 7)
        assert "use the queue only after torch.distributed.init_process_group" in error


_COUNTS = (5, 0, 9, 9, 2)
"""Rows of the files of five ranks that pushed different numbers."""


def _write_shards(folder: Path, dtype: torch.dtype) -> None:
    for rank, count in enumerate(_COUNTS):
        rows = unit(max(count, 1), D, seed=rank)[:count].to(dtype)
        shards.write_shard(folder, rows, torch.arange(count) + 100 * rank, 0, rank, len(_COUNTS), "mean")


def _read_together(folder: Path, capacity: int, dtype: torch.dtype) -> list[str]:
    """Read the queue that another number of ranks has saved; the files that this rank has opened for it."""
    opened, open_shard = list[str](), shards._open_shard

    def noted(path: Path) -> Any:
        opened.append(path.name)
        return open_shard(path)

    queue = ShardedQueue(capacity, D, dtype=dtype, drift="mean")
    shards._AT_ONCE = distributed.world_size() * 2 * D * dtype.itemsize  # two rows of each rank at a time
    shards._open_shard = noted
    queue.load_shards(folder)
    shards._open_shard = open_shard
    rows, ids, _ = shards.read_shards(folder, capacity, D, queue.rank, queue.world)
    assert torch.equal(queue.rows, rows.to(dtype))
    assert torch.equal(queue.ids, ids)
    return opened


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [2, 3, 6])
def test_each_file_of_another_number_of_ranks_is_opened_by_one(tmp_path: Path, world: int, dtype: torch.dtype) -> None:
    """A thousand ranks that each open the files of a thousand ask a file server for a million."""
    _write_shards(tmp_path, dtype)
    for capacity in (1000, 11, 1):
        opened = run_ranks(_read_together, world, tmp_path, capacity, dtype)
        names = sorted(path.name for path in tmp_path.iterdir())
        for name in names:
            of_file = [each.count(name) for each in opened]
            # rank 0 looks into the first one for the drift
            assert sum(times > 0 for times in of_file) == 1
            assert sum(of_file) <= 2 + 2 * (name == names[0])


def _refused(folder: Path) -> str:
    try:
        ShardedQueue(20, D, drift="mean").load_shards(folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_one_rank_finds_damaged_is_told_by_all(tmp_path: Path) -> None:
    _write_shards(tmp_path, torch.float32)
    path = tmp_path / "queue-00003-of-00005.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for told in run_ranks(_refused, 2, tmp_path):
        assert told.startswith(f"rank 1: {path} is damaged")
    path.unlink()
    for told in run_ranks(_refused, 2, tmp_path):
        assert f"lacks {path.name}" in told
