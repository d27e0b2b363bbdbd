"""Data workers end with their rank, however it dies; those that do not begin are started again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capt.pretrain.config.schema import LoaderSection


@dataclass(frozen=True)
class _Batch:
    worker: Tensor


def _rank(told: Any) -> None:
    from capt.pretrain.engine.loading import training_batches

    batches = training_batches(lambda _: [_Batch(torch.tensor([os.getpid()]))], range(100), LoaderSection(workers=2))
    told.send([int(batch.worker) for _ in range(2) for batch in next(batches)])
    while True:
        signal.pause()


def test_workers_of_a_killed_rank_end_at_once() -> None:
    """torch's own look at the parent, every five seconds, would fail this."""
    here, there = multiprocessing.Pipe(duplex=False)
    rank = multiprocessing.get_context("forkserver").Process(target=_rank, args=(there,))
    rank.start()
    assert here.poll(60), "no batch came"
    workers = here.recv()
    assert len(set(workers)) == 2
    assert rank.pid not in workers
    rank.kill()
    until = time.monotonic() + 2
    while left := [pid for pid in workers if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < until, f"workers {left} outlive their rank"
        time.sleep(0.02)
    rank.join()


def _load(folder: str, stuck: int, told: Any) -> None:
    from capt.pretrain.engine import loading

    start, loading._BEGINNING = loading._start_worker, 0.5

    def stuck_at_first(rank: int, begun: Any, worker: int) -> None:
        if worker == 1 and len(os.listdir(folder)) < stuck:
            Path(folder, str(os.getpid())).touch()
            time.sleep(60)
        start(rank, begun, worker)

    loading._start_worker = stuck_at_first
    try:
        batches = loading.training_batches(lambda n: [_Batch(torch.tensor([n]))], range(5), LoaderSection(workers=2))
        told.send([int(batch.worker) for step in batches for batch in step])
    except loading.LoaderFailedError as error:
        told.send(str(error))


@pytest.mark.parametrize(("stuck", "said"), [(2, [0, 1, 2, 3, 4]), (9, "loader workers do not begin: 3 times")])
def test_workers_that_do_not_begin_are_started_again(tmp_path: Path, stuck: int, said: Any) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    rank = multiprocessing.get_context("forkserver").Process(target=_load, args=(str(tmp_path), stuck, there))
    rank.start()
    assert here.poll(60), "neither a batch nor an error came"
    assert here.recv()[: len(said)] == said
    rank.join(10)
    assert rank.exitcode == 0
    assert not [name for name in os.listdir(tmp_path) if Path(f"/proc/{name}/exe").exists()]


class _JumpingClock:
    """A semaphore of processes while the wall clock is set: a wait with a time limit ends too early."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        self.looks -= 1
        return self.looks < 0 and not block


@pytest.mark.parametrize(("looks", "begins"), [(0, True), (5, True), (10**9, False)])
def test_a_clock_that_jumps_is_no_worker_that_does_not_begin(looks: int, begins: bool) -> None:
    from capt.pretrain.engine.loading import _begins

    assert _begins(_JumpingClock(looks), time.monotonic() + (60 if begins else 0.1)) == begins
