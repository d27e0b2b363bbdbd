from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.parallel import ordered_map


def slow_square(x: int) -> tuple[int, int]:
    if x == 13:
        raise DataError("thirteen")
    time.sleep(0.1 if x < 8 else 0)
    return x * x, os.getpid()


def test_order_is_kept_over_processes() -> None:
    values, processes = zip(*ordered_map(slow_square, range(12), 2), strict=True)
    assert list(values) == [x * x for x in range(12)]
    assert len(set(processes)) == 2
    assert os.getpid() not in processes
    assert list(ordered_map(slow_square, range(3), 1)) == [(x * x, os.getpid()) for x in range(3)]


def test_few_items_are_in_flight() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for x in range(1000):
            taken += 1
            yield x % 10

    results = ordered_map(slow_square, items(), 2)
    for _ in range(3):
        next(results)
    results.close()
    assert taken <= 3 + 4


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    with pytest.raises(DataError, match="thirteen"):
        list(ordered_map(slow_square, range(100), 2))
