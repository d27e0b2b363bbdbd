"""Two ways to do the same, in turns: each in a process of its own, so that a busy machine slows both alike."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch


@dataclass(frozen=True)
class Timings:
    """Seconds of each turn of ``ours`` and of ``other``."""

    ours: list[float]
    other: list[float]

    @property
    def ratio(self) -> float:
        """Our speed divided by the other's: the median over the turns of the ratio within a turn."""
        return statistics.median(b / a for a, b in zip(self.ours, self.other, strict=True))

    @property
    def ratio_of_sums(self) -> float:
        """Our speed divided by the other's over all turns together, for turns whose work differs between the sides."""
        return sum(self.other) / sum(self.ours)


def begin_rank(threads: int) -> None:
    """Make this process a rank as `capt` starts one: its threads, the memory that it keeps, and its process group."""
    torch.set_num_threads(threads)
    from capt.pretrain.base import distributed
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.engine.rank import keep_freed_memory

    keep_freed_memory()
    quiet_libraries(debug=False)
    distributed.initialize(timeout_minutes=10)


def answer(pipe: Connection, turn: Callable[[int], None], clock: Callable[[], float] = time.perf_counter) -> None:
    """In the process of one side: take the turn that the parent asks for, and say how long it took by ``clock``."""
    number = 0
    while pipe.recv():
        begin = clock()
        turn(number)
        pipe.send(clock() - begin)
        number += 1


def trainer_turns(pipe: Connection, steps: int) -> Any:
    """``answer`` as a callback of ``transformers.Trainer``: a turn is ``steps`` steps with the fetching of batches."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        def _await(self) -> None:
            if not pipe.recv():
                raise SystemExit(0)
            self.begin = time.perf_counter()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._await()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % steps == 0:
                pipe.send(time.perf_counter() - self.begin)
                self._await()

    return Turns()


def in_turns(ours: Any, other: Any, arguments: tuple[Any, ...], turns: int, warmup: int) -> Timings:
    """Run ``ours(pipe, *arguments)`` and ``other(pipe, *arguments)``; the first ``warmup`` turns do not count."""
    context = multiprocessing.get_context("spawn")
    seconds: Mapping[str, list[float]] = {"ours": [], "other": []}
    sides: dict[str, tuple[Any, Connection]] = {}
    for name, target in (("ours", ours), ("other", other)):
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there, *arguments), daemon=True)
        process.start()
        there.close()
        sides[name] = (process, here)
    for turn in range(turns + warmup):
        for name, (_, pipe) in sides.items():
            pipe.send(True)
            elapsed = pipe.recv()
            if turn >= warmup:
                seconds[name].append(elapsed)
    for process, pipe in sides.values():
        pipe.send(False)
        process.join()
    return Timings(seconds["ours"], seconds["other"])
