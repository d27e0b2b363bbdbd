"""Records one step with torch.profiler into ``profile/`` of the run (Chrome trace and a table)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pretrain.base import distributed
from pretrain.base.errors import ConfigError
from pretrain.base.files import require_own_folder, write_bytes, write_text
from pretrain.engine.loop import NEVER, Callback, Run
from pretrain.engine.task import StepMetrics


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
            table = self._profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
            write_text(folder / f"{name}.txt", table)
            self._profile = None
        self._maybe_start(run)

    def next_due(self, run: Run) -> int:
        due = run.job.run.profile_step
        assert due is not None
        if run.progress.step >= due:
            return NEVER
        return due if run.progress.step + 1 == due else due - 1

    def _maybe_start(self, run: Run) -> None:
        if distributed.rank() == 0 and run.progress.step + 1 == run.job.run.profile_step:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
