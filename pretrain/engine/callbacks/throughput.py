"""Measures samples and tokens per second over all ranks, and model FLOP utilisation where a GPU's peak is known."""

from __future__ import annotations

import time

import torch

from pretrain.base import distributed
from pretrain.engine.loop import NEVER, Callback, Run
from pretrain.engine.task import Progress, StepMetrics, is_logged

_PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12}
"""Dense bf16 (V100: fp16) peak, FLOP/s, from the vendor's data sheets, by a part of the device's name."""


def peak_flops() -> float | None:
    """Return the peak dense half-precision FLOP/s of all ranks' GPUs together; None where it is not known (CPUs)."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    each = next((peak for key, peak in _PEAK_BF16.items() if key in name), None)
    return each * distributed.world_size() if each else None


class Throughput(Callback):
    """Adds ``samples_per_second``, ``tokens_per_second`` (a packed token counts once, not once per view) and ``mfu``.

    Rates are over the last logging interval; validation and checkpoints in between are not counted.
    """

    def on_start(self, run: Run) -> None:
        self._flops = run.task.flops_per_step()
        self._peak = peak_flops()
        self._busy = 0.0
        self._last = Progress(**run.progress.to_json())

    def before_step(self, run: Run) -> None:
        self._mark = time.perf_counter()

    def after_step(self, run: Run, report: StepMetrics) -> None:
        self._busy += time.perf_counter() - self._mark
        if is_logged(run.job, run.progress.step):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            steps = run.progress.step - self._last.step
            report["samples_per_second"] = (run.progress.samples - self._last.samples) / self._busy
            report["tokens_per_second"] = (run.progress.tokens - self._last.tokens) / self._busy
            report["seconds_per_step"] = self._busy / steps
            if self._peak is not None:
                report["mfu"] = self._flops * steps / self._busy / self._peak
            self._busy, self._last = 0.0, Progress(**run.progress.to_json())

    def next_due(self, run: Run) -> int:
        return NEVER
