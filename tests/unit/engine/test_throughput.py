"""Speed that a run reports, beside a device that computes after the host has gone on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from capt.pretrain.base import distributed
from capt.pretrain.engine.callbacks import performance
from capt.pretrain.engine.callbacks.checkpointer import Checkpointer, Pace
from capt.pretrain.engine.callbacks.metrics import Metrics, Validator
from capt.pretrain.engine.callbacks.performance import Throughput
from capt.pretrain.engine.loop import Callback, Run, train
from capt.pretrain.engine.task import Progress, StepMetrics
from tests.toy.config import ToyJob
from tests.toy.task import ToyTask

HOST, STEP, ELSEWHERE = 0.0005, 0.02, 0.05
"""Seconds that the host takes to enqueue a step, that the device takes to compute it, and of a validation or a save."""
STEPS, LOGGED, FLOPS = 15, 5, 1e12


class Device:
    """A device with a queue: work is computed after what was given to it before, and the host does not wait."""

    def __init__(self) -> None:
        self.free = 0.0

    def enqueue(self, seconds: float) -> None:
        self.free = max(self.free, time.perf_counter()) + seconds

    def wait(self) -> None:
        time.sleep(max(0.0, self.free - time.perf_counter()))


class Task(ToyTask):
    device: Device

    def build_batches(self, progress: Progress) -> Iterator[Any]:
        while True:
            yield None

    def step(self, engines: Any, batch: Any, progress: Progress) -> StepMetrics:
        time.sleep(HOST)
        self.device.enqueue(STEP)
        progress.samples += 4
        progress.tokens += 400
        return {}

    def flops_per_step(self) -> float:
        return FLOPS


class Elsewhere(Callback):
    """Validates, or saves, after some steps, also within one another: the device computes and the host waits."""

    def __init__(self, device: Device, steps: set[int]) -> None:
        self.device, self.steps = device, steps

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if run.progress.step in self.steps:
            with run.pause(), run.pause():
                self.device.enqueue(ELSEWHERE)
                time.sleep(ELSEWHERE)


class Reports(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if "seconds_per_step" in report:
            self.seen.append({name: float(value) for name, value in report.items()})


@pytest.mark.parametrize("paused_after", [set(), {2, 7, 8}, {5, 10}, set(range(1, 15))], ids=str)
def test_speed_is_that_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused_after: set[int]) -> None:
    device, reports = Device(), Reports()
    monkeypatch.setattr(distributed, "wait_for_device", device.wait)
    monkeypatch.setattr(performance, "peak_flops", lambda: FLOPS / STEP / 0.4)
    job = ToyJob.model_validate(
        {"task": {"type": "toy"}, "schedule": {"max_steps": STEPS}, "run": {"log_every": LOGGED}}
    )
    task = Task(job, tmp_path)
    task.device = device
    begin = time.perf_counter()
    train(Run(job, tmp_path, task, {}, Progress()), [Throughput(), Elsewhere(device, paused_after), reports])
    late = time.perf_counter() - begin - STEPS * STEP - len(paused_after) * ELSEWHERE  # on a machine with other work
    assert len(reports.seen) == STEPS // LOGGED
    for report in reports.seen:
        assert STEP * 0.95 < report["seconds_per_step"] < STEP * 1.1 + late / LOGGED
        assert report["mfu"] == pytest.approx(0.4 * STEP / report["seconds_per_step"])
        assert report["tokens_per_second"] == pytest.approx(400 / report["seconds_per_step"])
        assert report["samples_per_second"] == pytest.approx(4 / report["seconds_per_step"])


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA B200", 2250e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA RTX A1000", None)]
)
def test_peaks_are_those_of_the_named_gpu(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert performance.peak_flops() == peak


def test_memory_of_a_gpu_is_in_every_logged_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is that of the interval: a validation before it says nothing of the steps."""
    peaks = iter([3, 5, 4])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(distributed, "device", lambda: torch.device("cpu"))
    reset: list[int] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: reset.append(1))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {
        "allocated_bytes.all.peak": next(peaks) << 30, "reserved_bytes.all.peak": 6 << 30, "num_alloc_retries": 2,
    })  # fmt: skip
    job = ToyJob.model_validate(
        {"task": {"type": "toy"}, "schedule": {"max_steps": STEPS}, "run": {"log_every": LOGGED}}
    )
    task, reports = Task(job, tmp_path), Reports()
    task.device = Device()
    train(Run(job, tmp_path, task, {}, Progress()), [Throughput(), reports])
    assert [row["memory/peak"] for row in reports.seen] == [3, 5, 4]
    assert {(row["memory/reserved"], row["memory/retries"]) for row in reports.seen} == {(6, 2)}
    assert len(reset) == 3


def test_validations_and_saves_are_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the real callbacks is counted, the wait for the steps before them is not."""
    device = Device()
    monkeypatch.setattr(distributed, "wait_for_device", device.wait)
    job = ToyJob.model_validate({"task": {"type": "toy"}, "schedule": {"max_steps": STEPS}})
    task = Task(job, tmp_path)
    run = Run(job, tmp_path, task, {}, Progress())

    def spend(*_: Any) -> dict[str, float]:
        device.enqueue(ELSEWHERE)
        return {}

    monkeypatch.setattr(task, "validate", spend, raising=False)
    device.enqueue(0.2)
    validator = Validator(Metrics())
    validator.on_start(run)
    validator._validate(run)
    checkpointer = Checkpointer()
    checkpointer._pace = Pace(1, 0)
    checkpointer._try(run, spend)
    assert 2 * ELSEWHERE <= run.paused < 2 * ELSEWHERE + 0.1
