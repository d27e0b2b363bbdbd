from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capt.pretrain.data.sampler import Sampler, micro_batch_weights, micro_batches, permute


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


@given(start=st.integers(0, 10**6), batch=st.integers(1, 90), parts=st.integers(1, 7), world=st.integers(1, 9))
def test_ranks_and_micro_batches_share_each_step(start: int, batch: int, parts: int, world: int) -> None:
    per_rank = [micro_batches(start, batch, parts, world, rank) for rank in range(world)]
    every = np.concatenate([part for parts_ in per_rank for part in parts_])
    assert sorted(every.tolist()) == list(range(start, start + batch))
    for rank, own in enumerate(per_rank):
        assert len(own) == parts
        assert all((part % world == rank).all() for part in own)
        sizes = [len(part) for part in own]
        assert max(sizes) - min(sizes) <= 1
    shares = [sum(map(len, own)) for own in per_rank]
    assert max(shares) - min(shares) <= 1
    totals = [sum(len(own[part]) for own in per_rank) for part in range(parts)]
    assert micro_batch_weights(batch, parts, world) == pytest.approx([total * parts / batch for total in totals])
    if batch % (parts * world) == 0:  # even ones are whole runs of samples, each of the weight 1 to the last bit
        assert micro_batch_weights(batch, parts, world) == [1.0] * parts
        for part in range(parts):
            first = start + part * batch // parts
            mixed = sorted(np.concatenate([own[part] for own in per_rank]).tolist())
            assert mixed == list(range(first, first + batch // parts))


def test_sample_ids_are_exact_over_a_change_of_world_size() -> None:
    """Step 0 on 2 ranks, step 1 on 1 rank, step 2 on 4 ranks, step 3 on 3: the ids of an uninterrupted run."""
    assert [b.tolist() for b in micro_batches(0, 8, 2, 2, 0)] == [[0, 2], [4, 6]]
    assert [b.tolist() for b in micro_batches(0, 8, 2, 2, 1)] == [[1, 3], [5, 7]]
    assert [b.tolist() for b in micro_batches(8, 8, 2, 1, 0)] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert [[b.tolist() for b in micro_batches(16, 8, 2, 4, rank)] for rank in range(4)] == [
        [[16], [20]], [[17], [21]], [[18], [22]], [[19], [23]],
    ]  # fmt: skip
    assert [[b.tolist() for b in micro_batches(24, 8, 2, 3, rank)] for rank in range(3)] == [
        [[24, 27], [30]], [[25, 28], [31]], [[26], [29]],
    ]  # fmt: skip


def test_mid_epoch_resume_goes_on_with_the_next_sample() -> None:
    sampler = Sampler(windows=11, seed=5)
    whole = [_locate(sampler, g) for g in range(40)]
    again = Sampler(windows=11, seed=5)
    assert [_locate(again, g) for g in range(17, 40)] == whole[17:]
