"""A training step of ACE (noise and generator, V = 30,000, d = 300) against the naive full-softmax step.

``python -m tests.benchmarks.bench_ace --files TEXT`` trains the preset ``ace/nce_ace`` on a text, prints JSON
and exits with 1 when the bound is missed. The other side is ACE as one would write it from the paper in PyTorch: 256
pairs a step, the generator's softmax over the whole vocabulary for each pair, 5 negatives each from noise or generator,
dense gradients of all four tables, Adam. Its pairs are those of the same text, drawn before the clock runs; ours draws
its pairs within the measured time. Each side lives in a process of its own and they take turns; what is compared is
seconds per word of the text (before subsampling), and the ratio is the median over the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.benchmarks.paired import in_turns

PAIRS, NEGATIVES, DIM, THREADS, BOUND = 256, 5, 300, 2, 30.0
PRESET = Path(__file__).parents[2] / "configs" / "pretrain" / "ace" / "nce_ace.yaml"


class Naive:
    """A step of ACE: the discriminator by SGNS, the generator by REINFORCE with a normalised reward."""

    def __init__(self, noise: Tensor, mixture: float = 0.5) -> None:
        self.noise, self.mixture = noise, mixture
        self.discriminator, self.generator = (nn.ModuleList([self._table(), self._table()]) for _ in range(2))
        self.optimizers = [
            torch.optim.Adam(tables.parameters(), 1e-3) for tables in (self.discriminator, self.generator)
        ]

    def _table(self) -> nn.Embedding:
        table = nn.Embedding(len(self.noise), DIM)
        nn.init.uniform_(table.weight, -0.5 / DIM, 0.5 / DIM)
        return table

    def step(self, centres: Tensor, contexts: Tensor) -> None:
        """Update both for some pairs."""
        source, target = self.generator
        log_g = (source(centres) @ target.weight.T).log_softmax(1)
        drawn = torch.multinomial(log_g.detach().exp(), NEGATIVES, replacement=True)
        noise = torch.multinomial(self.noise, drawn.numel(), replacement=True).view_as(drawn)
        words = torch.where(torch.rand(drawn.shape) < self.mixture, noise, drawn)
        vectors = self.discriminator[0](centres)
        positive = (vectors * self.discriminator[1](contexts)).sum(1)
        negative = (vectors[:, None] * self.discriminator[1](words)).sum(2)
        self._update(0, (F.softplus(-positive).sum() + F.softplus(negative).sum()) / len(centres))
        reward = negative.detach().sigmoid()
        reward = ((reward - reward.mean()) / (reward.std() + 1e-8) / 0.5).sigmoid()
        self._update(1, -(reward * log_g.gather(1, words)).mean())

    def _update(self, number: int, loss: Tensor) -> None:
        self.optimizers[number].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers[number].step()


def _task(settings: list[str], folder: str) -> Any:
    """The preset's task on the text."""
    from capt.pretrain.base import distributed
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.config.load import load_job
    from capt.pretrain.embeddings.task import EmbeddingTask
    from capt.pretrain.engine.rank import keep_freed_memory

    keep_freed_memory()
    quiet_libraries(debug=False)
    distributed.initialize(timeout_minutes=10)
    return EmbeddingTask(load_job(PRESET, [*settings, f"run.dir={folder}"]), Path(folder))


def _answer(pipe: Connection, turn: Callable[[], float]) -> None:
    """Take the turn that the parent asks for, which says how many words it was, and send seconds per word."""
    while pipe.recv():
        begin = time.perf_counter()
        words = turn()
        pipe.send((time.perf_counter() - begin) / words)


class _Chunk:
    """Several updates together, as the loop gives them to a task."""

    def __init__(self, batches: Iterator[Any], number: int) -> None:
        self._batches, self._number = batches, number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Any]:
        return (next(self._batches) for _ in range(self._number))


def ours(pipe: Connection, settings: list[str], threads: int, updates: int) -> None:
    """Chunks of the preset's updates."""
    torch.set_num_threads(threads)
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.engine.task import Progress

    with tempfile.TemporaryDirectory() as folder:
        task = _task(settings, folder)
        engines = build_engines(task.build_modules(), task.job, task.optimizers())
        progress = Progress()
        batches = task.build_batches(progress)

        def turn() -> float:
            task.step_many(engines, _Chunk(batches, updates), progress)
            return float(updates * task.job.batch.global_)

        _answer(pipe, turn)


def naive(pipe: Connection, settings: list[str], threads: int, updates: int) -> None:
    """Steps of the naive side on the pairs of the same text."""
    torch.set_num_threads(threads)
    steps = 4
    with tempfile.TemporaryDirectory() as folder:
        task = _task(settings, folder)
        segments = task.segments.read(np.arange(400))
        pairs = segments.positives(task.job.data.window)
        centres, contexts = (torch.from_numpy(x) for x in (pairs.centres[pairs.owner], pairs.contexts))
        words_per_pair = segments.raw * task.corpus.raw_words / len(task.corpus) / len(centres)
        side = Naive(torch.from_numpy(task.segments.noise).float(), task.job.negatives.mixture)
        place = 0

        def turn() -> float:
            nonlocal place
            for _ in range(steps):
                part = slice(place, place + PAIRS)
                side.step(centres[part], contexts[part])
                place = (place + PAIRS) % (len(centres) - PAIRS)
            return steps * PAIRS * words_per_pair

        _answer(pipe, turn)


def main() -> int:
    """Measure both, print JSON, return 1 below the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", required=True, help="text files, one sentence a line")
    parser.add_argument("--vocabulary", type=int, default=30_000)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--updates", type=int, default=32, help="of our side in a turn")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("settings", nargs="*", help="keys of the job, such as generator.every=8")
    options = parser.parse_args()
    settings = [
        f"data.files=[{','.join(str(Path(file).resolve()) for file in options.files)}]",
        f"data.max_vocabulary={options.vocabulary}", "data.min_count=1", f"model.dim={DIM}", *options.settings,
    ]  # fmt: skip
    timings = in_turns(ours, naive, (settings, options.threads, options.updates), options.turns, warmup=1)
    result = {
        "ours_words_per_second": round(1 / statistics.median(timings.ours)),
        "naive_words_per_second": round(1 / statistics.median(timings.other), 1),
        "ratio": round(timings.ratio, 1),
        "bound": BOUND,
        "threads": options.threads,
        "vocabulary": options.vocabulary,
        "dim": DIM,
    }
    print(json.dumps(result))
    return 0 if timings.ratio >= BOUND else 1


if __name__ == "__main__":
    raise SystemExit(main())
