"""The order of fine-tuning: each example once an epoch, full steps, like lengths together, the same on any machine."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capt.finetune.batches import Batch, training_steps
from capt.finetune.order import ExampleOrder, micro_batches_of_rank


def _lengths(count: int) -> np.ndarray:
    return np.random.default_rng(3).integers(5, 90, size=count)


@given(
    count=st.integers(1, 300),
    batch=st.integers(1, 64),
    bucketing=st.booleans(),
    shuffle=st.booleans(),
    epochs=st.integers(1, 3),
)
def test_every_epoch_holds_every_example_once(
    count: int, batch: int, bucketing: bool, shuffle: bool, epochs: int
) -> None:
    order = ExampleOrder(_lengths(count), batch, 1, bucketing=bucketing, shuffle=shuffle)
    steps = -(-epochs * count // batch)
    seen = np.concatenate([order.rows(step * batch) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_a_resumed_run_reads_on_where_it_stopped() -> None:
    lengths = _lengths(203)
    whole = ExampleOrder(lengths, 16, 7)
    expected = [whole.rows(step * 16) for step in range(40)]
    for step in (0, 12, 13, 26, 39):
        assert np.array_equal(ExampleOrder(lengths, 16, 7).rows(step * 16), expected[step])


def test_bucketing_leaves_little_padding() -> None:
    lengths = _lengths(5000)

    def padding(bucketing: bool) -> float:
        order = ExampleOrder(lengths, 32, 1, bucketing=bucketing)
        widths = [lengths[order.rows(step * 32)] for step in range(150)]
        return 1 - sum(w.sum() for w in widths) / sum(len(w) * w.max() for w in widths)

    assert padding(False) > 0.3
    assert padding(True) < 0.03


def test_steps_of_every_epoch_hold_like_lengths() -> None:
    """The step in which an epoch begins is shared with the epoch before: bucketing must start behind it."""
    count, batch = 203, 16
    order = ExampleOrder(np.arange(count), batch, 7)
    for epoch in range(4):
        first, last = -(-epoch * count // batch), (epoch + 1) * count // batch
        steps = sorted((np.sort(order.rows(step * batch)) for step in range(first, last)), key=lambda rows: rows[0])
        assert all(before[-1] < after[0] for before, after in pairwise(steps)), f"epoch {epoch}"


def test_batches_of_an_epoch_do_not_come_by_length() -> None:
    lengths = _lengths(3200)
    order = ExampleOrder(lengths, 32, 1)
    means = [lengths[order.rows(step * 32)].mean() for step in range(100)]
    assert abs(np.corrcoef(means, np.arange(100))[0, 1]) < 0.3


def test_seeds_and_epochs_differ_and_file_order_is_kept() -> None:
    lengths = _lengths(64)
    first, second = ExampleOrder(lengths, 64, 1), ExampleOrder(lengths, 64, 2)
    assert not np.array_equal(first.rows(0), second.rows(0))
    assert not np.array_equal(first.rows(0), first.rows(64))
    plain = ExampleOrder(lengths, 16, 1, shuffle=False)
    assert np.array_equal(np.concatenate([plain.rows(start) for start in range(0, 128, 16)]), [*range(64), *range(64)])


@pytest.mark.parametrize(("world", "micro"), [(1, 8), (2, 4), (4, 4), (2, 8), (3, 2)])
def test_ranks_share_a_step(world: int, micro: int) -> None:
    lengths = _lengths(100)
    rows = np.random.default_rng(0).permutation(100)[: world * micro * 3]
    places = [micro_batches_of_rank(lengths[rows], micro, world, rank, bucketing=True) for rank in range(world)]
    parts = [[rows[part] for part in rank] for rank in places]
    assert sorted(np.concatenate([part for rank in parts for part in rank])) == sorted(rows)
    for together in zip(*parts, strict=True):
        assert all(len(part) == micro for part in together)
    by_length = np.sort(lengths[rows]).reshape(3, -1)  # what the ranks have at the same time are neighbours
    for index, expected in enumerate(by_length):
        assert sorted(lengths[np.concatenate([rank[index] for rank in parts])]) == expected.tolist()


def test_neighbours_share_a_micro_batch() -> None:
    lengths = np.array([9, 1, 8, 2, 7, 3, 6, 4])

    def micro_batches(rank: int, bucketing: bool) -> list[list[int]]:
        return [part.tolist() for part in micro_batches_of_rank(lengths, 2, 2, rank, bucketing=bucketing)]

    assert [lengths[part].tolist() for part in micro_batches(0, True)] == [[1, 2], [6, 7]]
    assert [lengths[part].tolist() for part in micro_batches(1, True)] == [[3, 4], [8, 9]]
    assert micro_batches(1, False) == [[2, 3], [6, 7]]


class _Numbers:
    """Rows that are their numbers."""

    lengths = np.array([9, 1, 8, 2, 7, 3, 6, 4])

    def __len__(self) -> int:
        return 8

    def batch(self, numbers: np.ndarray) -> Batch[tuple[np.ndarray]]:
        return Batch((numbers,))


@pytest.mark.parametrize("bucketing", [False, True])
def test_a_step_has_the_same_rows_on_every_world_and_after_a_restart(bucketing: bool) -> None:
    rows = _Numbers()
    order = ExampleOrder(rows.lengths, 12, 1, bucketing=bucketing)

    def seen(world: int, micro: int, first: int) -> list[list[int]]:
        starts = range(first, 48, 12)
        found: list[list[int]] = [[] for _ in starts]
        for rank in range(world):
            steps = training_steps(rows, order, starts, micro, world, rank, bucketing=bucketing)
            for numbers, step in zip(found, steps, strict=True):
                numbers += [number for part in step.micro_batches for number in part.inputs[0].tolist()]
        return [sorted(numbers) for numbers in found]

    whole = [sorted(order.rows(start).tolist()) for start in range(0, 48, 12)]
    assert whole == seen(1, 12, 0) == seen(2, 3, 0) == whole[:2] + seen(4, 1, 24)
