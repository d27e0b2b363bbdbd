from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.data.sampler import Sampler, micro_batches, permute


def _locate(sampler: Sampler, sample: int) -> tuple[int, int]:
    epochs, windows = sampler.locate(np.array([sample], dtype=np.int64))
    return int(epochs[0]), int(windows[0])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 65, 1000, 4096, 4097])
def test_permutation_is_a_bijection(size: int) -> None:
    out = permute(np.arange(size), size, key=7)
    assert sorted(out.tolist()) == list(range(size))


def test_permutations_look_random() -> None:
    size, draws = 50, 2000
    images = np.stack([permute(np.arange(size), size, key) for key in range(draws)])
    counts = np.stack([np.bincount(images[:, place], minlength=size) for place in range(size)])
    chi_square = ((counts - draws / size) ** 2 / (draws / size)).sum(axis=1)
    assert chi_square.mean() == pytest.approx(size - 1, rel=0.1)  # its expectation; 50 values of variance 98
    steps = np.diff(images, axis=1)
    assert np.abs((steps == 1).mean() - 1 / size) < 0.005


def test_epochs_hold_every_window_once_in_different_orders() -> None:
    sampler = Sampler(windows=97, seed=3)
    epochs, windows = sampler.locate(np.arange(97 * 3))
    orders = [windows[epochs == epoch] for epoch in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(97))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[1], orders[2])
    assert sampler.locate(np.arange(97))[1].tolist() != Sampler(97, seed=4).locate(np.arange(97))[1].tolist()


def test_order_is_the_same_on_every_machine_and_release() -> None:
    sampler = Sampler(windows=1000, seed=1)
    assert [_locate(sampler, g) for g in (0, 1, 2, 999, 1000)] == [(0, 887), (0, 703), (0, 508), (0, 166), (1, 685)]


def test_validation_reads_in_order() -> None:
    assert [_locate(Sampler(3, 0, shuffle=False), g) for g in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_huge_datasets_need_no_table() -> None:
    epoch, window = _locate(Sampler(windows=10**12, seed=0), 3 * 10**12 + 5)
    assert epoch == 3
    assert 0 <= window < 10**12


@given(
    start=st.integers(0, 10**6),
    micro=st.integers(1, 5),
    world=st.sampled_from([1, 2, 3, 4, 8]),
    steps=st.integers(1, 4),
)
def test_ranks_split_each_global_micro_batch(start: int, micro: int, world: int, steps: int) -> None:
    together = micro * world
    per_rank = [micro_batches(start, steps * together, micro, world, rank) for rank in range(world)]
    for m in range(steps):
        samples = np.concatenate([batches[m] for batches in per_rank])
        assert sorted(samples.tolist()) == list(range(start + m * together, start + (m + 1) * together))
    for rank, batches in enumerate(per_rank):
        assert all(len(batch) == micro and (batch % world == rank).all() for batch in batches)


def test_sample_ids_are_exact_over_a_change_of_world_size() -> None:
    """Step 0 on 2 ranks, step 1 on 1 rank, step 2 on 4 ranks: the ids of an uninterrupted run."""
    assert [b.tolist() for b in micro_batches(0, 8, 2, 2, 0)] == [[0, 2], [4, 6]]
    assert [b.tolist() for b in micro_batches(0, 8, 2, 2, 1)] == [[1, 3], [5, 7]]
    assert [b.tolist() for b in micro_batches(8, 8, 4, 1, 0)] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert [[b.tolist() for b in micro_batches(16, 8, 1, 4, rank)] for rank in range(4)] == [
        [[16], [20]], [[17], [21]], [[18], [22]], [[19], [23]],
    ]  # fmt: skip
    assert [b.tolist() for b in micro_batches(7, 6, 1, 3, 0)] == [[9], [12]]


def test_mid_epoch_resume_goes_on_with_the_next_sample() -> None:
    sampler = Sampler(windows=11, seed=5)
    whole = [_locate(sampler, g) for g in range(40)]
    again = Sampler(windows=11, seed=5)
    assert [_locate(again, g) for g in range(17, 40)] == whole[17:]


@pytest.mark.parametrize(("batch", "micro", "world"), [(6, 4, 1), (3, 2, 2), (0, 1, 1)])
def test_batch_that_does_not_fit_the_ranks_is_refused(batch: int, micro: int, world: int) -> None:
    with pytest.raises(ConfigError, match=rf"batch.global = {batch} .* {micro} x {world} = {micro * world}"):
        micro_batches(0, batch, micro, world, 0)
