"""The report of ``capt bench gpu``, on a CPU in small: every row, kernels, and engines that do not live on."""

from __future__ import annotations

import gc

import pytest
import torch

from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.plan.devices import cluster
from tests.benchmarks.bench_gpu import GRID, sections

TINY = [
    ["model.activation_checkpointing=full", "batch.micro=2", "model.compile=false", "contrast.cached=true"],
    ["model.activation_checkpointing=none", "batch.micro=4", "model.compile=false", "contrast.cached=false"],
]


def test_the_grid_is_whole() -> None:
    assert len(GRID) == len({tuple(row) for row in GRID}) == 48


@pytest.mark.slow
def test_the_whole_report_on_a_cpu() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps, *kernels = sections("capt_tiny", TINY, 1, 8.0, cluster("cpu"))
    torch.set_num_threads(threads)
    assert [row["ms"] > 0 for row in steps["rows"]] == [True, True]
    assert all("predicted, ms" in row and "predicted, GiB" in row for row in steps["rows"])
    assert kernels
    assert all(table["rows"][0]["ms"] > 0 for table in kernels)
    assert not [each for each in gc.get_objects() if type(each) is LocalEngine], "engines of a row live on"


def test_rows_beyond_the_time_are_named() -> None:
    steps, *kernels = sections("capt_tiny", TINY, 1, -1.0, cluster("cpu"))
    assert [row["result"] for row in steps["rows"]] == ["not run: out of time"] * 2
    assert kernels == []
