"""The queue on real processes: saved by four ranks, read by two, one and three, with equal losses all the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretrain.contrast import ShardedQueue, capt_loss
from pretrain.engine import distributed
from tests.support import run_ranks
from tests.unit.contrast.support import unit

SAMPLES, D, K = 12, 16, 101


def _steps(first: int, last: int, load: Path | None, save: Path) -> list[float]:
    """Global losses of some steps; the batch of a step is the same for any number of ranks."""
    rank, world = distributed.rank(), distributed.world_size()
    queue = ShardedQueue(K, D, dtype=torch.float64)
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


def test_losses_continue_on_any_number_of_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / str(i) for i in range(5)]
    for folder in folders:
        folder.mkdir()
    uninterrupted = _steps(0, 28, None, folders[4])
    losses, load = [], None
    for index, world in enumerate((4, 2, 1, 3)):
        ranks = run_ranks(_steps, world, 7 * index, 7 * (index + 1), load, folders[index])
        assert all(rank == ranks[0] for rank in ranks)
        losses += ranks[0]
        load = folders[index]
        assert len(list(load.iterdir())) == world
    assert losses == pytest.approx(uninterrupted, rel=1e-12)
