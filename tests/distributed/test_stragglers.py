"""A rank that is slow by itself is named in the progress line; ranks that only wait for it are not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base import distributed
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.run import run_job
from capt.pretrain.registry import TASKS
from capt.pretrain.reliability.stragglers import slow_ranks
from tests.runs import training_rows
from tests.support import run_ranks

TASKS["toy"] = "tests.toy"
_CASES: dict[str, dict[str, Any]] = {
    "data": {"fault": {"kind": "slow_data", "rank": 1}},
    "forward": {"fault": {"kind": "slow_forward", "rank": 1}, "engine": {"zero_stage": 2}},
    "all": {"fault": {"kind": "slow_data", "everywhere": True}},
}


def _run_all(folder: Path) -> list[int]:
    quiet_libraries(debug=False)
    logging.getLogger("capt.pretrain").setLevel(logging.INFO)
    codes = []
    for name, changes in _CASES.items():
        mapping = {
            "task": {"type": "toy"},
            "run": {"dir": str(folder / name), "log_every": 2, "tensorboard": False, "threads": 1},
            "batch": {"global": 12, "micro": 2},
            "schedule": {"max_steps": 20},
            "engine": {"zero_stage": 0},
            "validate": {"every": 0},
            "checkpoint": {"every": 0},
            **changes,
        }
        codes.append(run_job(job_from_mapping(mapping, "test")))
        distributed.barrier()
    return codes


@pytest.fixture(scope="module", params=[2, 3])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert run_ranks(_run_all, request.param, folder) == [[0] * len(_CASES)] * request.param
    return folder


def _lines(run: Path) -> tuple[list[str], list[str]]:
    """The progress lines, and the warnings."""
    lines = (run / "log/rank-0.log").read_text().splitlines()
    return [line for line in lines if "/20 eta" in line], [line for line in lines if "than the median of all" in line]


def _ratios(run: Path) -> list[float]:
    return [row["own_time_ratio"] for row in training_rows(run)]


@pytest.mark.parametrize("name", ["data", "forward"])
def test_the_slow_rank_is_named_after_ten_steps_and_warned_of_once(folder: Path, name: str) -> None:
    progress, warnings = _lines(folder / name)
    named = ["rank 1 (" in line and "x slower" in line for line in progress]
    assert not any(named[:4])
    assert all(named[5:]), "the first log is of steps in which all set themselves up"
    assert not any(f"rank {other} (" in line for line in progress for other in (0, 2))
    assert len(warnings) == 1
    assert min(_ratios(folder / name)[1:]) > 1.3


def test_alike_ranks_are_not_named(folder: Path) -> None:
    progress, warnings = _lines(folder / "all")
    assert len(progress) == len(_ratios(folder / "all")) == 10
    assert not any("slower" in line for line in progress)
    assert not warnings


def test_who_is_slow() -> None:
    assert slow_ranks([1.0, 1.0, 1.31, 1.0], 2.0) == [False, False, True, False]
    assert slow_ranks([1.0, 1.0, 1.29, 1.0], 2.0) == [False] * 4
    assert slow_ranks([1.0, 1.31], 2.0) == [False, True], "of two the faster one is the median"
    assert slow_ranks([0.001, 0.01], 2.0) == [False, False], "too little of a step to matter"
    assert slow_ranks([0.0, 0.0, 0.0], 0.1) == [False] * 3
