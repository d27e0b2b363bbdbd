"""Steps of CAPT-Large on one GPU beside what ``capt plan`` predicts, in ten minutes; kernels; products.

``capt bench gpu`` needs a checkout, a CUDA GPU, and neither data nor a network. Steps: {recomputation} x {micro-batch
16, 32, 64} x {compiled} x {cached contrast} x {vocabulary padded to 64}, bf16, 512 random tokens a window, two
micro-batches a step; the shipped job comes first, then what changes one thing of it. Kernels: by the time on the
device. Products: both of the contrast at CAPT-Large's shapes, the logits of all anchors with a shard of the queue and
the sums that follow, with the error of each against float64. Times are medians. Rows are printed as they are measured.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

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
from capt.pretrain.plan.devices import Cluster, device_named
from capt.pretrain.plan.predict import Prediction, predict
from capt.pretrain.plan.rehearsal import fill_queue, rehearse

D, ANCHORS, QUEUES, TAU = 1024, (32, 2048), (8192, 65536), 0.05  # anchors: both views of 16 samples on 1 and 64 ranks
FIXED = ("engine.zero_stage=0", "run.log_every=1000000", "schedule.max_steps=1000000", "schedule.warmup_steps=0")
_STEPS = """Of one GPU without ZeRO. `GiB` is the peak of the allocator, `waits` how often the host waits for the
device in a step. Send this report, whatever it says, with an issue."""

SHIPPED = {"compiled": "true", "cached": "true", "pad": 64, "recompute": "none", "micro": 16}
"""Values of `capt_large` where a step has several micro-batches."""
_VALUES = {
    "compiled": ("false", "true"), "cached": ("false", "true"), "pad": (1, 64), "recompute": ("full", "none"),
    "micro": (16, 32, 64),
}  # fmt: skip


def _changes(values: Sequence[object]) -> int:
    return sum(value != shipped for value, shipped in zip(values, SHIPPED.values(), strict=True))


GRID = [
    [f"model.activation_checkpointing={recompute}", f"batch.micro={micro}", f"model.compile={compiled}",
     f"contrast.cached={cached}", f"model.pad_vocab_to={pad}"]
    for compiled, cached, pad, recompute, micro in sorted(itertools.product(*_VALUES.values()), key=_changes)
]  # fmt: skip
"""Overrides of each row: the shipped job, then those that change one thing, then two: ten minutes may end before."""


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


def _task(job: Any) -> tuple[LanguageTask, Any, list[list[LanguageBatch]]]:
    """The task without its data, its engine, and two steps of random batches of the whole vocabulary."""
    rehearsal = rehearse(job, 1)
    task: Any = rehearsal.task
    engines = build_engines(task.build_modules(), job, task.optimizers())
    for engine in engines.values():
        engine.train()
    if task.contrast is not None:
        fill_queue(task.contrast, task.width)
    generator = torch.Generator().manual_seed(0)
    (n, length), slots = rehearsal.batch.tokens.shape, rehearsal.batch.positions.shape[1]
    rows = task.model_config.classes

    def batch(first: int) -> LanguageBatch:
        tokens = torch.randint(5, rows, (n, length), generator=generator)
        positions = (1 + torch.rand(n, length - 2, generator=generator).argsort(1)[:, :slots]).sort(1)[0]
        return replace(
            rehearsal.batch, tokens=tokens, corrupted=tokens.scatter(1, positions, 4), positions=positions,
            labels=tokens.gather(1, positions), ids=torch.arange(first, first + n),
        )  # fmt: skip

    parts = job.accumulation(1)
    return task, engines, [[batch((i * parts + j) * n) for j in range(parts)] for i in range(2)]


def steps(
    config: str, grid: Sequence[Sequence[str]], turns: int, minutes: float, device: Cluster
) -> Iterator[dict[str, Any]]:
    """Time, MFU and peak memory of whole steps beside what ``capt plan`` predicts; rows beyond ``minutes`` are named.

    A step has two micro-batches, so that the contrast can be cached. The engines of a row are freed before the next.
    """
    begin = time.monotonic()
    for overrides in grid:
        row: dict[str, Any] = {"name": " ".join(each.partition(".")[2] for each in overrides)}
        if time.monotonic() - begin > 60 * minutes:
            yield row | {"result": "not run: out of time"}
            continue
        micro = next(int(each.partition("=")[2]) for each in overrides if each.startswith("batch.micro="))
        job = load_job(config, [*FIXED, *overrides, f"batch.global={2 * micro}"])
        found = predict(job, device)
        least, most = found.bracket
        row |= {"predicted, ms": f"{1e3 * found.seconds:.0f} ({1e3 * least:.0f} to {1e3 * most:.0f})",
                "predicted, GiB": round(found.memory.total / 2**30, 2)}  # fmt: skip
        try:
            row |= _measured(job, turns, found)
        except torch.OutOfMemoryError:
            row |= {"result": "out of memory"}
        _free()
        yield row


def _measured(job: Any, turns: int, found: Prediction) -> dict[str, Any]:
    """Measure a row; nothing of it lives on afterwards."""
    step, task = _stepper(job)
    row: dict[str, Any] = {"ms": round(_milliseconds(step, turns), 1)}
    if torch.cuda.is_available():
        row["MFU, %"] = round(100 * task.flops_per_step() / (1e-3 * row["ms"]) / found.cluster.device.bf16, 1)
        row["GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        row["GiB reserved"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        row["waits"] = len(_waits(step))
    return row


def _stepper(job: Any) -> tuple[Callable[[], None], LanguageTask]:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # contrast.keep=auto takes the peak for that of its own step
    task, engines, batches = _task(job)
    progress, number = Progress(), itertools.count()

    def step() -> None:
        task.step(engines, batches[next(number) % 2], progress)
        progress.step += 1

    return step, task


def _free() -> None:
    """Give back what the engines of a row held."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def kernels(config: str, overrides: Sequence[str], most: int = 25) -> list[dict[str, Any]]:
    """The operators of one step by the time that they take on the device."""
    micro = next(int(each.partition("=")[2]) for each in overrides if each.startswith("batch.micro="))
    step, _ = _stepper(load_job(config, [*FIXED, *overrides, f"batch.global={2 * micro}"]))
    for _ in range(3):
        step()
    on_gpu = torch.cuda.is_available()
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        _wait()
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    ran = [event for event in profile.key_averages() if event.device_type == kind]  # an operator has its kernels' time
    events = sorted(ran, key=lambda event: -getattr(event, name))
    total = sum(getattr(event, name) for event in events)
    return [
        {"kernel": event.key[:120], "calls": event.count, "ms": round(getattr(event, name) / 1e3, 3),
         "share, %": round(100 * getattr(event, name) / total, 1)}
        for event in events[:most] if total
    ]  # fmt: skip


def _waits(step: Callable[[], None]) -> list[str]:
    """List the host's waits for the device in one step."""
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
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no further row is begun")
    parser.add_argument("--config", default="capt_large")
    arguments = parser.parse_args()
    device = device_named(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if device is None:
        sys.stderr.write("bench_gpu needs a CUDA GPU of a kind that capt plan knows\n")
        return 1
    report = sections(arguments.config, GRID, arguments.turns, arguments.minutes, Cluster(1, device))
    print(json.dumps({"device": torch.cuda.get_device_name(), "sections": report}))
    return 0


def sections(
    config: str, grid: Sequence[Sequence[str]], turns: int, minutes: float, device: Cluster
) -> list[dict[str, Any]]:
    """The report: steps beside their prediction, kernels of the first and of the fastest row, products."""
    rows = []
    for row in steps(config, grid, turns, minutes, device):
        sys.stderr.write(json.dumps(row) + "\n")
        rows.append(row)
    measured = [index for index, row in enumerate(rows) if "ms" in row]
    shown = []
    if measured:
        fastest = min(measured, key=lambda index: rows[index]["ms"] / int(grid[index][1].partition("=")[2]))
        shown = list(dict.fromkeys((measured[0], fastest)))
    found = [{"title": "Steps", "text": _STEPS, "rows": rows}]
    for index in shown:
        _free()
        found.append({"title": f"Kernels: {rows[index]['name']}", "rows": kernels(config, grid[index])})
    _free()
    if torch.cuda.is_available():
        found.append({"title": "Products of the contrast", "rows": list(products(D, ANCHORS, QUEUES, turns))})
    return found


if __name__ == "__main__":
    raise SystemExit(main())
