"""Memory and time of a step with each kind of ``model.activation_checkpointing``, beside torch's recomputation.

``python -m tests.benchmarks.bench_recompute`` trains an encoder of 8 layers x 128 in fp32 on one rank with one thread,
16 sequences of 128 tokens in both views, and prints one JSON object.

- *Time*: CPU seconds of steps of one kind and of ``full`` in turns, each in a process of its own; the ratio is the
  median over the turns of the ratio within a turn, so that a busy machine slows both alike.
- *Memory*: the most that a process ever held. On a machine without a GPU what is offloaded stays in the same memory.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.paired import answer, begin_rank, in_turns
from tests.support import run_ranks

KINDS = ("none", "offload", "fairscale", "fairscale_offload")


def stepper(folder: str, kind: str) -> Callable[[int], None]:
    """Prepare an optimizer step."""
    begin_rank(1)
    from capt.pretrain.config.load import load_job
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.engine.task import Progress
    from capt.pretrain.registry import task_class

    job = load_job("capt_tiny", [
        f"run.dir={folder}/run", f"data.cache={folder}/cache", f"data.files={folder}/text.txt", "data.workers=1",
        "tokenizer.vocab_size=400", "model.layers=8", "data.sequence_length=128", "batch.global=16", "batch.micro=16",
        "contrast.cached=false", "engine.precision=fp32", "loader.workers=0",
        f"model.activation_checkpointing={kind}",
    ])  # fmt: skip
    task: Any = task_class(job.task.type)(job, job.run.dir)
    engines = build_engines(task.build_modules(), task.job, task.optimizers())
    progress = Progress()
    batches = itertools.cycle(list(itertools.islice(task.build_batches(progress), 4)))

    def step(turn: int) -> None:
        task.step(engines, next(batches), progress)
        progress.step += 1

    return step


def side(kind: str, pipe: Connection, folder: str) -> None:
    """Steps of one kind, one each time the parent asks."""
    answer(pipe, stepper(folder, kind), time.process_time)


def most_memory(folder: str, kind: str) -> float:
    """MiB that this process held at most over three steps."""
    step = stepper(folder, kind)
    for turn in range(3):
        step(turn)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        drawn = np.random.default_rng(0).integers(3000, size=(4000, 12))
        lines = (" ".join(f"word{number}" for number in row) for row in drawn)
        (Path(folder) / "text.txt").write_text("\n".join(lines) + "\n")
        for kind in ("full", *KINDS):
            (memory,) = run_ranks(most_memory, 1, folder, kind, timeout=900.0)
            row: dict[str, Any] = {"kind": kind, "MiB": round(memory)}
            if kind != "full":
                sides = (functools.partial(side, kind), functools.partial(side, "full"))
                timings = in_turns(*sides, (folder,), options.turns, warmup=1)
                ratios = sorted(a / b for a, b in zip(timings.ours, timings.other, strict=True))
                row |= {"time / full": round(statistics.median(ratios), 2), "ratios": [round(r, 2) for r in ratios]}
            rows.append(row)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
