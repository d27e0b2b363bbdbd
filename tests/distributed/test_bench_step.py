"""The benchmark of a training step takes its steps on either side, tried here with a small batch and vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import run_ranks


def _small() -> tuple[Any, Any, list[float]]:
    from tests.benchmarks import bench_step

    bench_step.BATCH, bench_step.LENGTH, bench_step.VOCABULARY = 2, 32, 97
    turns, seconds = iter([True, False]), list[float]()
    pipe: Any = SimpleNamespace(recv=lambda: next(turns), send=seconds.append)
    return bench_step, pipe, seconds


def _one_turn(precision: str) -> list[float]:
    bench, pipe, seconds = _small()
    bench.ours(pipe, precision, zero_stage=0)
    return seconds


def _one_turn_of_the_trainer(same_allocator: bool) -> tuple[list[float], int]:
    from capt.pretrain.engine import rank

    set_to_keep = []
    rank.keep_freed_memory = lambda: bool(set_to_keep.append(True))
    bench, pipe, seconds = _small()
    with pytest.raises(SystemExit):  # how the Trainer's process ends after the last turn
        bench.trainer(pipe, "fp32", zero_stage=0, keeps_freed_memory=same_allocator)
    return seconds, len(set_to_keep)


def test_our_side_takes_a_step() -> None:
    ((seconds,),) = run_ranks(_one_turn, 1, "bf16")
    assert seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("same_allocator", [True, False])
def test_the_trainers_side_takes_a_step_with_the_same_allocator_if_asked(same_allocator: bool) -> None:
    (((seconds,), times_set),) = run_ranks(_one_turn_of_the_trainer, 1, same_allocator)
    assert seconds > 0
    assert times_set == same_allocator


def _one_turn_each() -> list[float]:
    from tests.benchmarks import bench_modernbert

    _, pipe, seconds = _small()
    bench_modernbert.SHAPES, bench_modernbert.TOKENS, bench_modernbert.VOCABULARY = [(40, True)], 80, 97
    for side, sparse in (
        (bench_modernbert.ours, False),
        (bench_modernbert.theirs, False),
        (bench_modernbert.theirs, True),
    ):
        pipe.recv = iter([True, False]).__next__
        side(pipe, 1, sparse)
    return seconds


@pytest.mark.slow
def test_both_sides_take_a_step_of_modernbert() -> None:
    (seconds,) = run_ranks(_one_turn_each, 1)
    assert len(seconds) == 3
