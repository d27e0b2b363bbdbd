"""Overlap of validation with training: counts against sets written out, and what the log says."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest

from capt.pretrain.base.overlap import Shared, report_overlap, rows_as_bytes, shared


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_looking_each_up(seed: int) -> None:
    rng = random.Random(seed)
    train, validation = ([rng.randrange(30) for _ in range(rng.randrange(40))] for _ in range(2))
    assert shared(train, validation) == (sum(each in train for each in validation), len(validation))


def test_rows_of_a_flat_array() -> None:
    values, starts = np.array([1, 2, 1, 2, 3, 1], dtype=np.int32), np.array([0, 2, 4, 5, 5, 6])
    rows = list(rows_as_bytes(values, starts))
    assert rows[0] == rows[1]
    assert len({*rows}) == 4


def test_the_log_warns_of_any(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        report_overlap({"text": Shared(0, 1), "picture": Shared(0, 2)})
        report_overlap({"text": Shared(0, 1), "picture": Shared(1, 2)})
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert (
        caplog.messages[0] == "data.validation does not overlap data.train: 0 of 1 text and 0 of 2 pictures are in both"
    )
    assert "data.validation overlaps data.train: 0 of 1 text and 1 of 2 pictures are in both" in caplog.messages[1]
