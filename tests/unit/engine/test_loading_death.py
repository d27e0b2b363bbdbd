"""Data workers end with their rank, however it dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.config.loader import LoaderSection


@dataclass(frozen=True)
class _Batch:
    worker: Tensor


def _rank(told: Any) -> None:
    from pretrain.engine.loading import training_batches

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
