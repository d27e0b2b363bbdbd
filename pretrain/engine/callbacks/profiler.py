"""Records one step with torch.profiler into ``profile/`` of the run (Chrome trace and a table)."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from pretrain.engine import distributed
from pretrain.engine.loop import Callback, Run
from pretrain.engine.task import Report


class Profiler(Callback):
    """Profiles step ``run.profile_step`` (1-based) on rank 0."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def on_start(self, run: Run) -> None:
        self._maybe_start(run)

    def after_step(self, run: Run, report: Report) -> None:
        if self._profile is not None:
            self._profile.stop()
            folder = run.dir / "profile"
            folder.mkdir(exist_ok=True)
            name = f"step-{run.progress.step:08d}"
            self._profile.export_chrome_trace(str(folder / f"{name}.json"))
            table = self._profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
            (folder / f"{name}.txt").write_text(table)
            self._profile = None
        self._maybe_start(run)

    def _maybe_start(self, run: Run) -> None:
        if distributed.rank() == 0 and run.progress.step + 1 == run.job.run.profile_step:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
