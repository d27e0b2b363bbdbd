"""The part of a report that names runs on synthetic data."""

from __future__ import annotations

from collections.abc import Sequence

from capt.pretrain.report.document import ReportSection
from capt.pretrain.report.runs import RunRecord
from capt.pretrain.vision_language.report import synthetic_sections


def run_sections(runs: Sequence[RunRecord]) -> list[ReportSection]:
    """Return a note on the fine-tuning runs whose data come from a microworld."""
    return synthetic_sections(runs, "visual")
