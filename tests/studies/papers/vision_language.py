"""The part of ``capt report`` for ``capt_vl`` runs and sweeps: which objectives and which data a row represents.

The losses of runs with different objectives do not compare, and numbers from the microworld are synthetic: the reader
of a report must see both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capt.pretrain.report.document import ReportSection, Table
from capt.pretrain.report.runs import RunRecord
from capt.pretrain.report.sweeps import SweepRecord
from capt.pretrain.vision_language.config import OBJECTIVES, is_synthetic

_TITLE = "Vision-language pretraining"
_REMARK = (
    "Losses compare between rows with the same objectives, tokenizer and region store only. loss/capt_fixed is CAPT's "
    "loss at one temperature for all runs."
)


def run_sections(runs: Sequence[RunRecord]) -> list[ReportSection]:
    """A row for each ``capt_vl`` run."""
    return _section({str(run.folder): run.config for run in runs if is_pretraining(run.config)})


def sections(sweeps: Sequence[SweepRecord]) -> list[ReportSection]:
    """A row for each study of ``capt_vl`` jobs, as its best configuration was."""
    rows = {}
    for sweep in sweeps:
        for study in sweep.studies:
            if is_pretraining(study.config):
                best = study.best.params if study.best is not None else {}
                rows[f"{sweep.name}, {study.name}"] = {**study.config, **best}
    return _section(rows)


def is_pretraining(config: Mapping[str, Any]) -> bool:
    """Return whether the flat keys of a job are those of a ``capt_vl`` job."""
    return config.get("task.type") == "capt_vl"


def pretraining_of(config: Mapping[str, Any]) -> str:
    """``CAPT`` or ``LXMERT objectives``, with question answering or without, of a ``capt_vl`` job's flat keys."""
    kind = "CAPT" if _number(config.get("contrast.weight", 1.0)) > 0 else "LXMERT objectives"
    answers = "with QA" if _number(config.get("objectives.answers", 0.0)) > 0 else "without QA"
    data = ", on synthetic data" if is_synthetic(config) else ""
    return f"{kind}, {answers}{data}"


def _section(rows: Mapping[str, Mapping[str, Any]]) -> list[ReportSection]:
    if not rows:
        return []
    synthetic = [name for name, config in rows.items() if is_synthetic(config)]
    notes = [f"synthetic data (microworld): {', '.join(synthetic)}"] if synthetic else []
    lines = [
        [name, pretraining_of(config), *(f"{_number(config.get(f'objectives.{key}')):g}" for key in OBJECTIVES),
         f"{_number(config.get('contrast.weight')):g}", str(config.get("data.regions") or "microworld")]
        for name, config in rows.items()
    ]  # fmt: skip
    table = Table(["run", "pretraining", *OBJECTIVES, "contrast", "regions"], lines)
    data = {name: {"pretraining": pretraining_of(config)} for name, config in rows.items()}
    return [ReportSection(_TITLE, notes=notes, tables=[table], remarks=[_REMARK], data=data)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
