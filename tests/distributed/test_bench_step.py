"""The benchmark of a training step takes its step through our engine, tried here with a small batch and vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support import run_ranks


def _one_turn(precision: str) -> list[float]:
    from tests.benchmarks import bench_step

    bench_step.BATCH, bench_step.LENGTH, bench_step.VOCABULARY = 2, 32, 97
    turns, seconds = iter([True, False]), list[float]()
    pipe: Any = SimpleNamespace(recv=lambda: next(turns), send=seconds.append)
    bench_step.ours(pipe, precision, zero_stage=0)
    return seconds


def test_our_side_takes_a_step() -> None:
    ((seconds,),) = run_ranks(_one_turn, 1, "bf16")
    assert seconds > 0
