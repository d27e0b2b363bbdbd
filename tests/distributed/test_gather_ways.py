"""The page on gathering says what its command measures, and the two ways of ours are exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.bench_gradients import WAYS, measure, table

PAGE = Path(__file__).parents[2] / "docs" / "results" / "gradients.md"
NAMES = [way.name for way in WAYS]
WITHOUT_INSTALLED = [name for name in NAMES if "sentence-transformers" not in name]


def test_the_page_has_the_measured_numbers_and_ours_is_exact() -> None:
    measured = {2: measure(2, WITHOUT_INSTALLED)}
    for name, numbers in measured[2].items():
        if "capt" in name:
            assert numbers == pytest.approx((1.0, 1.0), abs=1e-12)
    page = PAGE.read_text()
    for line in table(measured).splitlines()[2:]:
        assert line.removesuffix(" |") in page


@pytest.mark.slow
def test_the_page_is_the_table_of_the_command() -> None:
    pytest.importorskip("sentence_transformers")
    assert table({ranks: measure(ranks, NAMES) for ranks in (2, 4)}) in PAGE.read_text()
