"""The part of a report that names runs on synthetic data."""

from __future__ import annotations

from collections.abc import Sequence

from capt.pretrain.report.document import ReportSection
from capt.pretrain.report.runs import RunRecord
from capt.pretrain.vision_language.config import is_synthetic


def run_sections(runs: Sequence[RunRecord]) -> list[ReportSection]:
    """Return a note on the pretraining runs whose data come from a microworld."""
    return synthetic_sections(runs, "capt_vl")


def synthetic_sections(runs: Sequence[RunRecord], task: str) -> list[ReportSection]:
    """Return a section with a note that names the runs of ``task`` on a microworld; none where there is no such run."""
    names = [str(run.folder) for run in runs if run.config.get("task.type") == task and is_synthetic(run.config)]
    return [ReportSection("", notes=[f"synthetic data (microworld): {', '.join(names)}"])] if names else []
