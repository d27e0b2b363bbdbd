"""Cost of one contrast over all micro-batches of a step (``contrast.cached``): time, and memory as they grow more.

``python -m tests.benchmarks.bench_cached`` trains ``capt_tiny`` in bf16 on one rank with 2 threads and prints one JSON
object; it exits with 1 when a bound is missed.

- *Time*: steps of four micro-batches with the cache and without it, in turns, each side in a process of its own; the
  ratio is the median over the turns of the ratio within a turn. Without the cache each micro-batch is contrasted alone.
- *Memory*: the most that a process ever held, with the cache, at 1, 4 and 16 micro-batches of 8 sequences.

The text is the docstrings of the installed packages, or the files that ``--files`` names.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.paired import answer, in_turns
from tests.support import run_ranks

MICRO, PARTS, THREADS = 16, 4, 2
MOST_TIME, MOST_GROWTH = 1.35, 1.1
SMALL, GROWING = 8, (1, 4, 16)


def stepper(folder: str, files: list[str], micro: int, parts: int, cached: bool) -> Callable[[int], None]:
    """Prepare an optimizer step of ``parts`` micro-batches of ``micro`` sequences."""
    torch.set_num_threads(THREADS)
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.config.load import load_job
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.engine.rank import keep_freed_memory
    from capt.pretrain.engine.task import Progress
    from capt.pretrain.registry import task_class

    keep_freed_memory()
    quiet_libraries(debug=False)
    text = [f"data.files=[{','.join(files)}]"] if files else []
    job = load_job("capt_tiny", [
        f"run.dir={folder}/run", f"data.cache={folder}/cache", "data.workers=1", *text,
        "engine.precision=bf16", "loader.workers=0",
        f"batch.global={micro * parts}", f"batch.micro={micro}", f"contrast.cached={str(cached).lower()}",
    ])  # fmt: skip
    task: Any = task_class(job.task.type)(job, job.run.dir)
    engines = build_engines(task.build_modules(), task.job, task.optimizers())
    progress = Progress()
    batches = itertools.cycle(list(itertools.islice(task.build_batches(progress), 8)))

    def step(turn: int) -> None:
        task.step(engines, next(batches), progress)
        progress.step += 1

    return step


def cached_side(pipe: Connection, folder: str, files: list[str]) -> None:
    """Steps with the cache, one each time the parent asks."""
    _serve(pipe, folder, files, cached=True)


def uncached_side(pipe: Connection, folder: str, files: list[str]) -> None:
    """Steps without it."""
    _serve(pipe, folder, files, cached=False)


def _serve(pipe: Connection, folder: str, files: list[str], *, cached: bool) -> None:
    from capt.pretrain.base import distributed

    distributed.initialize(timeout_minutes=10)
    answer(pipe, stepper(folder, files, MICRO, PARTS, cached))


def most_memory(folder: str, files: list[str], parts: int) -> float:
    """MiB that this process held at most over four cached steps."""
    step = stepper(folder, files, SMALL, parts, True)
    for turn in range(4):
        step(turn)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    """Measure, print, and say whether every bound is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--files", nargs="*", default=[], type=lambda name: str(Path(name).resolve()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        memory = {parts: run_ranks(most_memory, 1, folder, options.files, parts, timeout=900.0)[0] for parts in GROWING}
        timings = in_turns(uncached_side, cached_side, (folder, options.files), options.turns, warmup=3)
    times = timings.ratio
    growth = memory[GROWING[-1]] / memory[GROWING[1]]
    rows = [
        {
            "name": f"capt_tiny, bf16, {PARTS} micro-batches of {MICRO}: time of a step, cached / not",
            "value": round(times, 3), "bound": MOST_TIME, "ok": times <= MOST_TIME,
            "ms cached": round(1e3 * statistics.median(timings.other), 1),
            "ms not": round(1e3 * statistics.median(timings.ours), 1),
        },
        {
            "name": f"peak memory of the process, cached, {GROWING[-1]} micro-batches of {SMALL} / {GROWING[1]}",
            "value": round(growth, 3), "bound": MOST_GROWTH, "ok": growth <= MOST_GROWTH,
            **{f"MiB at {parts}": round(most) for parts, most in memory.items()},
        },
    ]  # fmt: skip
    print(json.dumps({"rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
