from __future__ import annotations

import numpy as np
import pytest

from capt.pretrain.base.randomness import generator_for


def test_same_name_and_sample_give_the_same_numbers() -> None:
    first, again = (generator_for("corruption", 1, 2, 3).random(8) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first[0] == 0.941664970754576


@pytest.mark.parametrize(
    "other", [("order", 1, 2, 3), ("corruption", 0, 2, 3), ("corruption", 1, 3, 3), ("corruption", 1, 2, 4)]
)
def test_any_other_key_gives_other_numbers(other: tuple[str, int, int, int]) -> None:
    assert not np.array_equal(generator_for("corruption", 1, 2, 3).random(8), generator_for(*other).random(8))


def test_streams_of_neighbouring_samples_are_uncorrelated() -> None:
    draws = np.stack([generator_for("x", 0, 0, sample).random(64) for sample in range(500)])
    correlation = np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]
    assert abs(correlation) < 0.02
    assert abs(draws.mean() - 0.5) < 0.01


def test_numbers_outside_the_key_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        generator_for("x", 0, 1 << 24, 0)
    with pytest.raises(AssertionError):
        generator_for("x", 0, 0, 1 << 40)
