"""``capt plan`` against steps on a CPU: memory of jobs, and time of others by rates that are fitted to a third set.

Memory is the peak of torch's allocator, from the events of its profiler, in the third step of a job through its engine.
The time of a job is the least processor time of its steps, on one thread: what a step takes on an idle machine,
whatever else runs on this one. One step of each job in turn; the rates of products, bytes and operators are
fitted to `FITTED`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.task import Progress
from capt.pretrain.plan.devices import CENTRAL, Assumptions, Cluster, cluster
from capt.pretrain.plan.predict import predict
from capt.pretrain.plan.rehearsal import fill_queue, rehearse
from tests.support import run_ranks

_SMALL = (
    "engine.zero_stage=0", "model.size=custom", "tokenizer.vocab_size=2000", "run.log_every=1000000",
    "schedule.max_steps=1000000", "data.files=[none.txt]",
)  # fmt: skip


def _sizes(layers: int, hidden: int, length: int, micro: int, parts: int, *more: str) -> list[str]:
    return [
        *_SMALL, f"model.layers={layers}", f"model.hidden={hidden}", f"model.heads={hidden // 32}",
        f"model.ffn={4 * hidden}", f"data.sequence_length={length}", f"model.max_positions={length}",
        f"batch.micro={micro}", f"batch.global={micro * parts}", *more,
    ]  # fmt: skip


MEMORY = [
    _sizes(2, 128, 64, 8, 1),
    _sizes(6, 128, 64, 8, 1),
    _sizes(2, 256, 64, 8, 1),
    _sizes(2, 128, 128, 16, 1, "engine.precision=bf16"),
    _sizes(4, 128, 64, 8, 4),
    _sizes(4, 128, 64, 8, 4, "contrast.keep=3"),
    _sizes(4, 128, 64, 8, 2, "contrast.cached=false"),
    _sizes(4, 128, 64, 16, 1, "model.activation_checkpointing=full"),
    _sizes(4, 128, 64, 8, 1, "contrast.queue=65536"),
    _sizes(4, 128, 64, 8, 1, "contrast.weight=0"),
    _sizes(2, 128, 64, 8, 1, "tokenizer.vocab_size=20000", "optimizer.type=sgd", "optimizer.momentum=0.9"),
]
"""Overrides of ``capt_tiny`` for the memory."""
_WORDS = ["data.max_words=30", "data.vocabulary=5000"]
LATENT = [
    ("ptb/vae", [*_WORDS, "engine.precision=fp32"]),
    ("ptb/clvae_plus_mi", [*_WORDS, "batch.global=16", "batch.micro=16"]),
    ("clusters_k8", []),
]
"""Jobs of sentences and of clusters, with overrides, for the memory."""

FITTED = [
    _sizes(layers, hidden, length, micro, 1)
    for layers, hidden, length, micro in (
        (2, 128, 64, 8), (4, 128, 64, 8), (2, 256, 64, 8), (2, 128, 128, 8), (2, 128, 64, 16),
        (4, 256, 64, 4), (6, 128, 64, 4), (2, 256, 128, 8), (4, 128, 128, 8), (2, 192, 64, 16),
    )
]  # fmt: skip
TIMED = [
    _sizes(layers, hidden, length, micro, 1)
    for layers, hidden, length, micro in (
        (3, 128, 64, 8), (3, 256, 64, 8), (3, 192, 64, 8), (3, 128, 128, 8), (2, 128, 96, 16),
        (4, 192, 64, 8), (5, 128, 64, 8), (2, 256, 96, 8), (4, 256, 64, 8), (3, 192, 96, 8),
    )
]  # fmt: skip


_LATENT = "No bounds: what operators take and give back within themselves is not seen, and is much of so small a job."
_TIME = "Bounds: 0.85 to 1.15, of the processor time. How much longer the clock ran is the work of others."


def job_of(overrides: list[str], config: str = "capt_tiny") -> Job:
    """A shipped job with ``overrides``."""
    return load_job(config, overrides)


def stepper(job: Job) -> Callable[[], None]:
    """Prepare a step of a job through its engine, with a full queue and tokens that are all alike."""
    rehearsal = rehearse(job, 1)
    task: Any = rehearsal.task
    engines = build_engines(task.build_modules(), job, task.optimizers())
    for engine in engines.values():
        engine.train()
    if (term := getattr(task, "contrast", None)) is not None:
        fill_queue(term, task.width)
    batch, progress = [rehearsal.batch] * job.accumulation(1), Progress()

    def step() -> None:
        task.step(engines, batch, progress)
        progress.step += 1

    return step


def tracked_peak(overrides: list[str], config: str = "capt_tiny") -> int:
    """Bytes that torch's allocator has given out at most in the third step, what lived before included."""
    torch.set_num_threads(1)
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step = stepper(job_of(overrides, config))
        for _ in range(2):
            step()
        mark = time.time_ns()
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        if event.start_ns() >= mark:
            peak = max(peak, live)
    return peak


def memory_rows(jobs: Iterable[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    """Predicted and tracked memory of each of ``jobs``, which are shipped ones with overrides."""
    rows = []
    for config, overrides in jobs:
        tracked = run_ranks(tracked_peak, 1, overrides, config)[0]
        predicted = predict(job_of(overrides, config), cluster("cpu")).memory.total
        rows.append({"job": f"{config}: {_name(overrides)}", "predicted, MB": round(predicted / 1e6, 2),
                     "tracked, MB": round(tracked / 1e6, 2), "ratio": round(predicted / tracked, 3)})  # fmt: skip
    return rows


def step_times(jobs: list[list[str]], rounds: int) -> list[list[tuple[float, float]]]:
    """Seconds of the processor and of the clock for steps of each job: one of each in turn."""
    torch.set_num_threads(1)
    steps = [stepper(job_of(overrides)) for overrides in jobs]
    times: list[list[tuple[float, float]]] = [[] for _ in jobs]
    for turn in range(rounds + 2):
        for step, taken in zip(steps, times, strict=True):
            begin, busy = time.perf_counter(), time.process_time()
            step()
            if turn >= 2:
                taken.append((time.process_time() - busy, time.perf_counter() - begin))
    return times


def time_rows(rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Predicted and measured time of each job of `TIMED`, and the rates."""
    jobs = [*FITTED, *TIMED]
    times = run_ranks(step_times, 1, jobs, rounds, timeout=900)[0]
    least = [min(busy for busy, _ in taken) for taken in times]
    one = cluster("cpu")
    given = fitted_rates(one, least[: len(FITTED)])
    cases = {"central": given, "slow": given, "fast": given}
    rows = []
    for overrides, own, taken in zip(TIMED, least[len(FITTED) :], times[len(FITTED) :], strict=True):
        predicted = predict(job_of(overrides), one, cases).seconds
        clock = statistics.median(seconds for _, seconds in taken)
        rows.append({"job": _name(overrides), "predicted, ms": round(1e3 * predicted, 1),
                     "processor, ms": round(1e3 * own, 1), "clock (median), ms": round(1e3 * clock, 1),
                     "ratio": round(predicted / own, 3)})  # fmt: skip
    device = one.device
    rates = {"GFLOP/s": given.products * device.fp32 / 1e9, "GB/s": given.memory * device.bandwidth / 1e9,
             "microseconds an operator": 1e6 * given.launch}  # fmt: skip
    return rows, rates


def fitted_rates(one: Cluster, seconds: list[float]) -> Assumptions:
    """The rates of products, bytes and operators that fit `FITTED`: least squares of relative errors, none below 0."""
    parts = []
    for overrides, own in zip(FITTED, seconds, strict=True):
        time = predict(job_of(overrides), one, dict.fromkeys(("central", "slow", "fast"), CENTRAL)).times["central"]
        parts.append([time.products / own, (time.between + time.update) / own, time.launches / own])
    factors, _ = nnls(np.array(parts), np.ones(len(parts)))
    products, between, launch = (max(float(factor), 1e-9) for factor in factors)
    return replace(
        CENTRAL,
        products=CENTRAL.products / products,
        memory=CENTRAL.memory / between,
        launch=CENTRAL.launch * launch,
    )


def _name(overrides: list[str]) -> str:
    shown = [each.partition(".")[2] for each in overrides if each not in _SMALL]
    return " ".join(each for each in shown if not each.startswith(("heads", "ffn", "max_positions")))


def main() -> int:
    """Measure, print, and say whether memory is within 10% and time within 15%."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    memory = memory_rows(("capt_tiny", overrides) for overrides in MEMORY)
    times, rates = time_rows(arguments.rounds)
    sections = [
        {"title": "Memory", "text": "Bounds: 0.90 to 1.10.", "rows": memory},
        {"title": "Memory of latent jobs", "text": _LATENT, "rows": memory_rows(LATENT)},
        {
            "title": "Time",
            "text": _TIME,
            "rows": times,
        },
        {"title": "Rates that were fitted", "rows": [rates]},
    ]
    print(json.dumps({"sections": sections}))
    right = all(abs(row["ratio"] - 1) <= 0.10 for row in memory) and all(abs(row["ratio"] - 1) <= 0.15 for row in times)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
