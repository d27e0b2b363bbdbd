"""What a GPU makes of the contrast's precisions, the padded vocabulary, and attention within documents.

``python -m tests.benchmarks.bench_gpu`` prints one JSON object and needs a CUDA GPU; its output is empty on another
machine, and its exit code 1. Products: both of the contrast at CAPT-Large's shapes, the logits of all anchors with a
shard of the queue and the sums that follow, with the error of each against float64. Steps: whole steps of capt_base
(four micro-batches, bf16, 512 random tokens a window) through the engine and the task, and those of them in which the
host waits for the device. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.config.load import load_job
from capt.pretrain.contrast.kernels import Precision, Products, multiply
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.task import Progress
from capt.pretrain.language.batches import LanguageBatch
from capt.pretrain.language.task import LanguageTask

D, ANCHORS, QUEUES, TAU = 1024, (32, 2048), (8192, 65536), 0.05  # anchors: both views of 16 samples on 1 and 64 ranks
VOCABULARY, DOCUMENTS = 50_265, 8  # documents in a window, on average
PEAK = 989e12  # dense bf16 of an H100 or H200, FLOP/s

STEPS: dict[str, list[str]] = {
    "capt_base": [],
    "pad_vocab_to 64": ["model.pad_vocab_to=64"],
    "within documents": ["data.cross_document_attention=false"],
    **{f"precision {name}": [f"contrast.precision={name}"] for name in ("tf32", "bf16x6", "bf16x3", "bf16")},
}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _milliseconds(function: Callable[[], Any], turns: int) -> float:
    times = []
    for turn in range(turns + 3):
        _wait()
        begin = time.perf_counter()
        function()
        _wait()
        times.append(time.perf_counter() - begin)
        if turn < 3:
            times.clear()
    return 1e3 * statistics.median(times)


def products(d: int, anchors: tuple[int, ...], queues: tuple[int, ...], turns: int) -> Iterator[dict[str, Any]]:
    """Time and relative error of both products, in each precision that this device has."""
    device = distributed.device()
    for n, c in ((n, c) for n in anchors for c in queues):
        rows = torch.Generator(device).manual_seed(0)
        q, keys = (F.normalize(torch.randn(k, d, generator=rows, device=device), dim=1) for k in (n, c))
        q /= TAU
        exact = q.double() @ keys.double().T
        weights = exact.float().exp()
        totals = weights.double() @ keys.double()
        for precision in get_args(Precision):
            if precision == "tf32" and device.type != "cuda":
                continue
            logits, sums = torch.full((n, c), torch.nan, device=device), torch.full((n, d), torch.nan, device=device)

            def both(
                kind: Precision = precision, q: Tensor = q, keys: Tensor = keys, weights: Tensor = weights,
                logits: Tensor = logits, sums: Tensor = sums,
            ) -> None:  # fmt: skip
                of = Products(kind)
                k = of.split(keys, torch.float32)
                with of.applied_on(q.device):
                    multiply(logits, of.split(q, torch.float32), tuple(term.T for term in k), add=False)
                    multiply(sums, of.split(weights, torch.float32), k, add=False)

            yield {
                "name": f"products, {n} anchors, {c} rows, {precision}",
                "ms": _milliseconds(both, turns),
                "error of logits": float((logits - exact).norm() / exact.norm()),
                "error of sums": float((sums - totals).norm() / totals.norm()),
            }


def _task(overrides: list[str]) -> tuple[LanguageTask, Any, list[list[LanguageBatch]]]:
    """The task of capt_base without its data, its engine, and two steps of random batches."""
    job: Any = load_job("capt_base", overrides)
    length, n = job.data.sequence_length, job.micro_batch(1)
    slots = round(0.15 * (length - 2))
    data = types.SimpleNamespace(
        job=job,
        model_config=job.model.for_tokenizer(VOCABULARY, 1),
        corruptor=types.SimpleNamespace(slots=slots),
        source=None,
    )
    with mock.patch("capt.pretrain.language.task.prepare", return_value=data):
        task = LanguageTask(job, Path())
    engines = build_engines(task.build_modules(), job, task.optimizers())
    generator = torch.Generator().manual_seed(0)

    def batch(first: int) -> LanguageBatch:
        tokens = torch.randint(5, VOCABULARY, (n, length), generator=generator)
        tokens[:, 0], tokens[:, -1] = 0, 2
        positions = (1 + torch.rand(n, length - 2, generator=generator).argsort(1)[:, :slots]).sort(1)[0]
        borders = torch.rand(n, length, generator=generator) < DOCUMENTS / length
        return LanguageBatch(
            tokens=tokens, corrupted=tokens.scatter(1, positions, 4), positions=positions,
            labels=tokens.gather(1, positions), ids=torch.arange(first, first + n), padded=False,
            documents=None if job.data.cross_document_attention else borders.cumsum(1),
        )  # fmt: skip

    parts = job.batch.global_ // n
    return task, engines, [[batch((i * parts + j) * n) for j in range(parts)] for i in range(2)]


def steps(overrides: list[str], turns: int) -> Iterator[dict[str, Any]]:
    """Time, model FLOP utilisation, memory and waits of whole steps."""
    for name, changes in STEPS.items():
        if "precision=tf32" in str(changes) and not torch.cuda.is_available():
            continue
        task, engines, batches = _task([*overrides, *changes])
        progress, number = Progress(), iter(range(10**6))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

        def step(
            task: LanguageTask = task, engines: Any = engines, batches: Any = batches, progress: Progress = progress,
            number: Iterator[int] = number,
        ) -> None:  # fmt: skip
            task.step(engines, batches[next(number) % 2], progress)
            progress.step += 1

        milliseconds = _milliseconds(step, turns)
        row: dict[str, Any] = {"name": f"step, {name}", "ms": milliseconds}
        row["MFU"] = task.flops_per_step() / (1e-3 * milliseconds) / PEAK
        if torch.cuda.is_available():
            row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
            row["waits"] = len(_waits(step))
        yield row


def _waits(step: Callable[[], None]) -> list[str]:
    """Where the host waits for the device in one step."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    found = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    for place in sorted(set(found)):
        logging.getLogger(__name__).warning("%d x %s", found.count(place), place)
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("bench_gpu needs a CUDA GPU\n")
        return 1
    distributed.initialize(timeout_minutes=10)
    rows = list(products(D, ANCHORS, QUEUES, arguments.turns))
    rows += steps(["batch.global=128"], arguments.turns // 2)
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
