"""Throughput over all ranks and MFU where a GPU's peak is known; garbage collection; the profile of a step."""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import require_own_folder, write_bytes, write_text
from capt.pretrain.engine.loop import NEVER, Callback, Run
from capt.pretrain.engine.provenance import gpu_kind
from capt.pretrain.engine.task import Progress, StepMetrics, is_logged

_PEAK_BF16 = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12}
"""Dense bf16 (V100: fp16) peak, FLOP/s, from the vendor's data sheets, by a part of the device's name."""


def peak_flops() -> float | None:
    """Return the peak dense half-precision FLOP/s of all ranks' GPUs together; None where it is not known (CPUs)."""
    if not torch.cuda.is_available():
        return None
    kind = gpu_kind(torch.cuda.get_device_name(), _PEAK_BF16)
    return _PEAK_BF16[kind] * distributed.world_size() if kind else None


def memory_report() -> dict[str, float]:
    """Return the GPU memory of the rank that took most since the last call, in GiB, and its retries. Collective."""
    statistics = torch.cuda.memory_stats()
    names = {
        "memory/peak": statistics["allocated_bytes.all.peak"] / 2**30,
        "memory/reserved": statistics["reserved_bytes.all.peak"] / 2**30,
        "memory/retries": statistics["num_alloc_retries"],
    }
    torch.cuda.reset_peak_memory_stats()
    most = distributed.all_reduce_max(torch.tensor(list(names.values()), device=distributed.device()))
    return dict(zip(names, most.tolist(), strict=True))


class Throughput(Callback):
    """Adds ``samples_per_second``, ``tokens_per_second`` (a packed token counts once, not once per view) and ``mfu``;
    on GPUs also ``memory/peak`` and ``memory/reserved`` (GiB, the largest of all ranks since the last logged step) and
    ``memory/retries`` (allocations so far that had to give cached memory back first).

    Rates are by wall-clock time from one logged step to the next, both waited for on the device, less validations
    and checkpoints in between. The host's own time in a step says nothing: it enqueues in a few
    milliseconds what the device computes for a second.
    """

    def on_start(self, run: Run) -> None:
        self._flops = run.task.flops_per_step()
        self._peak = peak_flops()
        self._begun: float | None = None
        self._last = Progress(**run.progress.to_json())

    def before_step(self, run: Run) -> None:
        if self._begun is None:
            self._begin(run)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if not is_logged(run.job, run.progress.step):
            return
        assert self._begun is not None
        distributed.wait_for_device()
        seconds = time.perf_counter() - self._begun - (run.paused - self._paused)
        steps = run.progress.step - self._last.step
        report["samples_per_second"] = (run.progress.samples - self._last.samples) / seconds
        report["tokens_per_second"] = (run.progress.tokens - self._last.tokens) / seconds
        report["seconds_per_step"] = seconds / steps
        if self._peak is not None:
            # FLOP are those of a step of batch.global; with batch.ramp some steps were smaller.
            sizes = run.job.batch_sizes
            of_samples = sizes.samples_before(run.progress.step) - sizes.samples_before(self._last.step)
            report["mfu"] = self._flops * of_samples / run.job.batch.global_ / seconds / self._peak
        if torch.cuda.is_available():
            report |= memory_report()
        self._begin(run)

    def _begin(self, run: Run) -> None:
        self._begun, self._paused = time.perf_counter(), run.paused
        self._last = Progress(**run.progress.to_json())

    def next_due(self, run: Run) -> int:
        return NEVER


# Takes Python's cyclic garbage collector out of the step, where it stalls ranks at different times.


_EVERY = 200


class GarbageCollector(Callback):
    """Freezes what exists after the first step and collects every 200 steps, on all ranks at the same one."""

    def __init__(self) -> None:
        self._first = True

    def on_start(self, run: Run) -> None:
        gc.disable()
        self._last = run.progress.step

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if self._first:
            self._first = False
            gc.collect()
            gc.freeze()
        elif run.progress.step // _EVERY > self._last // _EVERY:
            # The two young generations alone: a full collection visits all that came since the freeze.
            gc.collect(1)
        self._last = run.progress.step

    def next_due(self, run: Run) -> int:
        return NEVER

    def close(self, run: Run) -> None:
        gc.unfreeze()
        gc.enable()


# Records one step with torch.profiler into ``profile/`` of the run (Chrome trace and a table).


class Profiler(Callback):
    """Profiles step ``run.profile_step`` (1-based) on rank 0."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def on_start(self, run: Run) -> None:
        self._maybe_start(run)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if self._profile is not None:
            self._profile.stop()
            folder = run.dir / "profile"
            require_own_folder(folder, error=ConfigError)
            name = f"step-{run.progress.step:08d}"
            with tempfile.TemporaryDirectory() as private:  # torch would write through a link in the run folder
                trace = Path(private) / "trace.json"
                self._profile.export_chrome_trace(str(trace))
                write_bytes(folder / f"{name}.json", trace.read_bytes())
            device = "cuda" if torch.cuda.is_available() else "cpu"
            table = self._profile.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=40)
            write_text(folder / f"{name}.txt", table)
            self._profile = None
        self._maybe_start(run)

    def next_due(self, run: Run) -> int:
        due = run.job.run.profile_step
        assert due is not None
        if run.progress.step >= due:
            return NEVER
        # A chunk of updates must end one before that step, where the profile begins, and then right after it.
        return due if run.progress.step + 1 == due else due - 1

    def _maybe_start(self, run: Run) -> None:
        if distributed.rank() == 0 and run.progress.step + 1 == run.job.run.profile_step:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
