"""The digest of a step adds up over ranks, and tells which id was exchanged, added or left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capt.pretrain.base.randomness import mix64, unmix64
from capt.pretrain.reliability.ledger.files import digest_contents, digest_ids, find_exchange

_IDS = st.lists(st.integers(0, 2**40 - 1), min_size=2, max_size=30, unique=True)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_unmixing_undoes_mixing(numbers: list[int]) -> None:
    x = np.array(numbers, dtype=np.uint64)
    assert (unmix64(mix64(x)) == x).all()


@given(_IDS, st.randoms(use_true_random=False))
def test_parts_in_any_order_add_up_to_the_whole(ids: list[int], random: object) -> None:
    shuffled = sorted(ids, key=lambda _: random.random())  # type: ignore[attr-defined]
    a, b = np.array(shuffled[:1]), np.array(shuffled[1:])
    assert (digest_ids(a) + digest_ids(b)) % 2**64 == digest_ids(np.array(ids))
    of = {i: np.array([i, 7 * i], dtype=np.float32) for i in ids}

    def contents(part: np.ndarray) -> int:
        return digest_contents(part, [np.stack([of[i] for i in part.tolist()]), part % 5 == 0])

    assert (contents(a) + contents(b)) % 2**32 == contents(np.array(ids))


@given(_IDS, st.data())
def test_a_single_difference_is_named(ids: list[int], data: st.DataObject) -> None:
    samples = 1 << 40
    planned, lost = np.array(ids[1:]), ids[1]
    rest = planned[1:]
    assert find_exchange(planned, len(rest), digest_ids(rest), samples) == (None, lost)
    more = np.append(planned, ids[0])
    assert find_exchange(planned, len(more), digest_ids(more), samples) == (ids[0], None)
    used = data.draw(st.sampled_from([ids[0], *rest.tolist()]))
    exchanged = np.append(rest, used)
    assert find_exchange(planned, len(planned), digest_ids(exchanged), samples) == (used, lost)


def test_several_differences_are_not_guessed() -> None:
    planned, used = np.arange(10), np.arange(10, 20)
    assert find_exchange(planned, 10, digest_ids(used), 100) is None
    assert find_exchange(planned, 7, digest_ids(used[:7]), 100) is None
    assert find_exchange(planned, 9, digest_ids(used[:9]), 100) is None


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_])
def test_a_change_of_one_element_changes_the_digest_of_the_contents(dtype: type) -> None:
    generator = np.random.default_rng(0)
    ids, first = np.arange(6), generator.integers(0, 2, (6, 3, 4)).astype(dtype)
    second = generator.integers(0, 9, (6, 5))
    before = digest_contents(ids, [first, second])
    for place in np.ndindex(first.shape):
        changed = first.copy()
        changed[place] = not changed[place]
        assert digest_contents(ids, [changed, second]) != before, place
    assert digest_contents(ids, [first[::-1].copy(), second]) != before, "rows belong to their ids"
    assert digest_contents(ids, [second, first]) != before
