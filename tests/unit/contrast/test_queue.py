from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.contrast import ShardedQueue, shards
from capt.pretrain.contrast.queue import NO_ID, check_ids
from tests.unit.contrast.support import unit


def _ranks(patch: pytest.MonkeyPatch, world: int, capacity: int, dim: int = 1) -> list[ShardedQueue]:
    """The queues that ``world`` ranks would make; pushing needs no communication, so one process can play them all."""
    queues = []
    for rank in range(world):
        patch.setattr(distributed, "rank", lambda group=None, rank=rank: rank)
        patch.setattr(distributed, "world_size", lambda group=None: world)
        queues.append(ShardedQueue(capacity, dim, dtype=torch.float64))
        assert (queues[-1].rank, queues[-1].world) == (rank, world)  # its first use
    patch.undo()
    return queues


class Fifo:
    """The queue of one process, as plainly as can be: a list of numbers, each row a counter."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.kept, self.count = capacity, list[float](), 0

    def step(self, queues: list[ShardedQueue], n: int) -> None:
        """Push ``n`` samples a rank, two views, in the joined order; sample g of the step belongs to rank g % W."""
        total = n * len(queues)
        s, s_hat = (torch.arange(total, dtype=torch.float64) + self.count + view * total for view in (0, 1))
        self.count += 2 * total
        self.kept = (self.kept + s.tolist() + s_hat.tolist())[-self.capacity :]
        for rank, queue in enumerate(queues):
            mine = slice(rank, None, len(queues))
            queue.enqueue(s[mine, None], s_hat[mine, None], ids=torch.arange(total)[mine])

    def equals(self, queues: list[ShardedQueue]) -> bool:
        return sorted(torch.cat([queue.rows for queue in queues]).flatten().tolist()) == sorted(self.kept)


@settings(max_examples=40)
@given(
    world=st.integers(1, 6),
    capacity=st.integers(1, 60),
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=8),
)
def test_union_of_the_shards_is_the_global_fifo(world: int, capacity: int, steps: list[int]) -> None:
    """For every capacity and world size, with no divisibility rule, at every step."""
    with pytest.MonkeyPatch.context() as patch:
        queues = _ranks(patch, world, capacity)
    fifo = Fifo(capacity)
    for n in steps:
        fifo.step(queues, n)
        assert fifo.equals(queues)
        assert max(len(queue) for queue in queues) <= -(-capacity // world)
    assert sum(queue.shard_size for queue in queues) == capacity


@settings(max_examples=25)
@given(
    capacity=st.integers(1, 50),
    worlds=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    n=st.integers(1, 6),
    new_capacity=st.integers(1, 50),
)
def test_reshards_to_any_world_size_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, capacity: int, worlds: list[int], n: int, new_capacity: int
) -> None:
    """Save, load on another number of ranks, push on: still the one global FIFO. At last into another capacity."""
    fifo = Fifo(capacity)
    with pytest.MonkeyPatch.context() as patch:
        queues = _ranks(patch, worlds[0], capacity)
        fifo.step(queues, n)
        fifo.step(queues, n)
        for world in worlds[1:]:
            folder = tmp_path_factory.mktemp("queue")
            for queue in queues:
                queue.save_shard(folder)
            queues = _ranks(patch, world, capacity)
            for queue in queues:
                queue.load_shards(folder)
            assert fifo.equals(queues)
            fifo.step(queues, n)
            assert fifo.equals(queues)
        for queue in queues:
            queue.save_shard(folder := tmp_path_factory.getbasetemp())
        resized = _ranks(patch, 2, new_capacity)
        for queue in resized:
            queue.load_shards(folder)
        for path in folder.glob("queue-*.safetensors"):
            path.unlink()
    fifo.capacity, fifo.kept = new_capacity, fifo.kept[-new_capacity:]
    assert fifo.equals(resized)
    fifo.step(resized, n)
    assert fifo.equals(resized)


def test_reshards_4_2_1_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = Fifo(507)
    queues = _ranks(monkeypatch, 4, 507)
    for _ in range(70):
        fifo.step(queues, 3)
    for world in (2, 1, 3):
        folder = tmp_path / str(world)
        folder.mkdir()
        for queue in queues:
            queue.save_shard(folder)
        queues = _ranks(monkeypatch, world, 507)
        for queue in queues:
            queue.load_shards(folder)
        assert fifo.equals(queues)
        for _ in range(5):
            fifo.step(queues, 3)
            assert fifo.equals(queues)


@pytest.mark.parametrize("world", [1, 3])
def test_a_resumed_queue_has_every_row_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    """A resumed run thus adds up in the same order, and its losses are equal to the last digit."""
    fifo, queues = Fifo(50), _ranks(monkeypatch, world, 50)
    for _ in range(6):
        fifo.step(queues, 7)
    for queue in queues:
        queue.save_shard(tmp_path)
    resumed = _ranks(monkeypatch, world, 50)
    copies = _ranks(monkeypatch, world, 50)
    for queue, other, copied in zip(queues, resumed, copies, strict=True):
        other.load_shards(tmp_path)
        copied.load_state_dict(queue.state_dict())
    for _ in range(3):
        for queue, other, copied in zip(queues, resumed, copies, strict=True):
            assert torch.equal(queue.rows, other.rows)
            assert torch.equal(queue.ids, copied.ids)
            assert torch.equal(queue.rows, copied.rows)
        for ranks in (queues, resumed, copies):
            Fifo(50).step(ranks, 5)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 6)
)  # fmt: skip
def test_which_rows_a_rank_keeps_is_what_sorting_all_of_them_gives(
    counts: list[int], capacity: int, world: int
) -> None:
    ages = [(-age * len(counts) + i, i, count - age) for i, count in enumerate(counts) for age in range(1, count + 1)]
    newest = [(i, row) for _, i, row in sorted(ages)][-capacity:]
    for rank in range(world):
        expected = [row for k, row in enumerate(newest) if (k - len(newest)) % world == rank]
        found = [
            (-int(ages[row]), i, int(row))
            for i, ages in enumerate(shards._ages(counts))
            for row in shards._kept(ages, capacity, rank, world).nonzero().flatten()
        ]
        assert [(i, row) for _, i, row in sorted(found)] == expected


def test_a_large_queue_is_dealt_out_in_little_memory() -> None:
    """4M rows of 256 ranks; a table of all rows would be 32 MB a column."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.nbytes if isinstance(out, torch.Tensor) else 0)
            return out

    with Sizes():
        kept = sum(int(shards._kept(ages, 1 << 22, 3, 128).sum()) for ages in shards._ages([1 << 14] * 256))
    assert kept == 1 << 15
    assert largest <= 8 * ((1 << 14) + 1)


def test_ids_travel_with_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queues = _ranks(monkeypatch, 2, 9)
    for rank, queue in enumerate(queues):
        queue.enqueue(torch.tensor([[1.0 + rank], [3.0 + rank]]).double(), ids=torch.tensor([10 + rank, 30 + rank]))
        queue.enqueue(torch.tensor([[5.0 + rank]]).double())
        queue.save_shard(tmp_path)
    single = ShardedQueue(9, 1, dtype=torch.float64)
    single.load_shards(tmp_path)
    assert single.rows.flatten().tolist() == [1, 2, 3, 4, 5, 6]
    assert single.ids.tolist() == [10, 11, 30, 31, NO_ID, NO_ID]


def test_folders_are_strings_or_paths_and_are_made(tmp_path: Path) -> None:
    queue, other = ShardedQueue(9, 2), ShardedQueue(9, 2)
    queue.enqueue(unit(5, 2, seed=0, dtype=torch.float32))
    assert queue.save_shard(str(tmp_path / "a" / "b")).is_file()
    other.load_shards(str(tmp_path / "a" / "b"))
    assert torch.equal(other.rows, queue.rows)


def test_unfilled_slots_are_never_seen() -> None:
    queue = ShardedQueue(100, 8)
    assert queue.rows.shape == (0, 8)
    queue.enqueue(unit(3, 8, seed=0, dtype=torch.float32))
    assert queue.rows.shape == (3, 8)
    assert len(queue) == 3
    torch.testing.assert_close(queue.rows.norm(dim=1), torch.ones(3))


def test_rows_are_detached_copies_in_the_dtype_of_the_queue() -> None:
    rows = unit(4, 8, seed=0, dtype=torch.float32).requires_grad_()
    queue = ShardedQueue(10, 8, dtype=torch.bfloat16)
    queue.enqueue(rows)
    with torch.no_grad():
        rows.zero_()
    assert not queue.rows.requires_grad
    assert queue.rows.dtype == torch.bfloat16
    assert bool((queue.rows.float().norm(dim=1) > 0.9).all())


def test_state_dict_round_trip_and_growth() -> None:
    queue, other = ShardedQueue(10, 1, dtype=torch.float64), ShardedQueue(10, 1, dtype=torch.float64)
    queue.enqueue(torch.arange(14.0).double()[:, None], ids=torch.arange(14))
    other.load_state_dict(queue.state_dict())
    assert other.state_dict()["rows"].flatten().tolist() == list(range(4, 14))
    assert other.state_dict()["ids"].tolist() == list(range(4, 14))
    for q in (queue, other):
        q.enqueue(torch.tensor([[99.0]]).double())
    assert other.state_dict()["rows"].flatten().tolist() == queue.state_dict()["rows"].flatten().tolist()
    smaller, larger = ShardedQueue(3, 1), ShardedQueue(20, 1)
    smaller.load_state_dict(queue.state_dict())
    larger.load_state_dict(queue.state_dict())
    assert smaller.state_dict()["rows"].flatten().tolist() == [12, 13, 99]
    larger.enqueue(torch.tensor([[100.0]]))
    assert larger.state_dict()["rows"].flatten().tolist() == [*range(5, 14), 99, 100]


def test_an_overflowed_step_cannot_spoil_the_queue() -> None:
    queue = ShardedQueue(10, 4)
    rows = unit(3, 4, seed=1, dtype=torch.float32)
    rows[1, 2] = torch.nan
    rows[2, 0] = torch.inf
    queue.enqueue(rows)
    torch.testing.assert_close(queue.rows, torch.stack([rows[0], torch.zeros(4), torch.zeros(4)]))


def test_warns_when_it_holds_less_than_one_step(caplog: pytest.LogCaptureFixture) -> None:
    queue = ShardedQueue(7, 4)
    with caplog.at_level(logging.WARNING):
        queue.warn_if_smaller_than(7)
        assert not caplog.records
        queue.warn_if_smaller_than(8)
    assert "the queue of 7 rows holds less than one step, which pushes 8" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0, "dim": 4}, "capacity and a dim of 1 or more"),
        ({"capacity": -8, "dim": 4}, "got -8 and 4"),
        ({"capacity": 8, "dim": 0}, "got 8 and 0"),
        ({"capacity": 8, "dim": 4, "dtype": torch.float16}, "dtype must be one of"),
    ],
)
def test_bad_construction(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardedQueue(**arguments)  # type: ignore[arg-type]


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 features, got \(2, 5\)"):
        ShardedQueue(8, 4).enqueue(unit(2, 5, seed=0))


@pytest.mark.parametrize(
    "ids", [torch.zeros(1, dtype=torch.int64), torch.arange(4), torch.tensor([0.5, 1.5]), torch.zeros(2, 2).long()]
)
def test_ids_are_one_number_a_sample(ids: torch.Tensor) -> None:
    """A single id went to all rows, and of ids for both views the last ones counted."""
    views = unit(2, 4, seed=0), unit(2, 4, seed=1)
    with pytest.raises(ConfigError, match="ids must be one int64 number a sample, the same for each view"):
        check_ids(views, ids)
    queue = ShardedQueue(8, 4)
    with pytest.raises((ConfigError, TypeError)):  # in tests the annotation refuses some even earlier
        queue.enqueue(*views, ids=ids)
    assert len(queue) == 0


def test_bad_checkpoints_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="holds no queue shard"):
        ShardedQueue(8, 4).load_shards(tmp_path)
    queues = _ranks(monkeypatch, 2, 8, dim=4)
    for queue in queues:
        queue.enqueue(unit(2, 4, seed=0))
        queue.save_shard(tmp_path)
    with pytest.raises(CheckpointError, match=r"shape \[4\], this model's have \[5\]"):
        ShardedQueue(8, 5).load_shards(tmp_path)
    with pytest.raises(CheckpointError, match="rank 0 of 2; this is rank 0 of 1"):
        ShardedQueue(8, 4).load_state_dict(queues[0].state_dict())
    with pytest.raises(CheckpointError, match="4 features, not 5"):
        _ranks(monkeypatch, 2, 8, dim=5)[0].load_state_dict(queues[0].state_dict())

    shard = tmp_path / "queue-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9])
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged"):
        ShardedQueue(8, 4).load_shards(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {shard.name}"):
        ShardedQueue(8, 4).load_shards(tmp_path)
    ShardedQueue(8, 4).save_shard(tmp_path)
    with pytest.raises(CheckpointError, match=r"mixes queue shards of \[1, 2\] ranks"):
        ShardedQueue(8, 4).load_shards(tmp_path)


@settings(max_examples=25)
@given(world=st.integers(1, 4), capacity=st.integers(2, 40), seed=st.integers(0, 99))
def test_samples_that_are_left_out_keep_their_places_and_nobody_sees_them(
    tmp_path_factory: pytest.TempPathFactory, world: int, capacity: int, seed: int
) -> None:
    """Ranks leave out different numbers of samples; the shards stay those of one queue, also after a restart."""
    with pytest.MonkeyPatch.context() as patch:
        queues, trained = _ranks(patch, world, capacity), _ranks(patch, world, capacity)
    generator, places, count = torch.Generator().manual_seed(seed), list[float | None](), 0
    for _ in range(4):
        kept = torch.rand(3 * world, generator=generator) < 0.5
        rows = torch.arange(3 * world, dtype=torch.float64) + count
        count += len(rows)
        places += [float(row) if keep else None for row, keep in zip(rows, kept, strict=True)]
        for rank, queue in enumerate(queues):
            mine = slice(rank, None, world)
            queue.enqueue(rows[mine, None], ids=rows[mine].long(), only=kept[mine].nonzero().flatten())
        expected = sorted(place for place in places[-capacity:] if place is not None)
        assert sorted(torch.cat([queue.rows for queue in queues]).flatten().tolist()) == expected
        assert sorted(torch.cat([queue.ids for queue in queues]).tolist()) == expected
    folder = tmp_path_factory.mktemp("queue")
    for queue in queues:
        queue.save_shard(folder)
    for queue in trained:
        queue.load_shards(folder)
    assert sorted(torch.cat([queue.rows for queue in trained]).flatten().tolist()) == expected


@pytest.mark.parametrize("pushed", [0, 3, 10])
def test_room_is_asked_for_a_full_queue(pushed: int) -> None:
    """A queue that has begun to fill would else find the memory of a host full later."""
    queue = ShardedQueue(7, 5, dtype=torch.bfloat16)
    queue.enqueue(unit(pushed, 5, seed=0).bfloat16())
    assert queue.nbytes == 7 * (5 * 2 + 8)
