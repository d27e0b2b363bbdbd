"""Files that a trial keeps in its run folder: its state, and the setting and seed that it is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from launcher.sweep.trials import StudyPlan, TrialSpec
from pretrain.base.errors import DataError
from pretrain.base.files import write_text
from pretrain.base.records import Count, Record, read_record
from pretrain.report.trials_file import ParameterChange

_STATE, _SPEC = "trial.json", "point.json"


class TrialState(Record):
    """``trial.json``: how long a trial has run, how often it was started, on which node, and what went wrong."""

    attempts: Count = 0
    seconds: Annotated[float, Field(ge=0)] = 0.0
    node: str = ""
    error: str = ""
    history: Annotated[tuple[ParameterChange, ...], Field(strict=False)] = ()
    """The parameters of a member of population based training, in the order in which they changed."""

    @classmethod
    def read(cls, run_dir: Path) -> TrialState:
        """The state of a run, empty where there is no file. Raises ``DataError`` for a damaged file."""
        try:
            return read_record(cls, run_dir / _STATE, "; remove it", error=DataError)
        except FileNotFoundError:
            return cls()

    def updated(self, **changes: Any) -> TrialState:
        """A copy with other values."""
        return self.model_copy(update=changes)

    def write(self, run_dir: Path) -> None:
        """Replace the state of a run."""
        write_text(run_dir / _STATE, self.model_dump_json(by_alias=True) + "\n", private=True)


class _SpecRecord(Record):
    study: str
    params: dict[str, Any]
    seed: Count


def write_spec(run_dir: Path, spec: TrialSpec) -> None:
    """Write the setting and seed of a trial that starts, as ``point.json``."""
    values = {"study": spec.study, "params": dict(spec.params), "seed": spec.seed}
    write_text(run_dir / _SPEC, json.dumps(values) + "\n", private=True)


def started_trials(study: StudyPlan) -> list[TrialSpec]:
    """The trials of a study that were started with its present base job, in the order of their start.

    Raises:
        DataError: a ``point.json`` is damaged.
    """
    files = sorted(study.folder.glob(f"*/{_SPEC}"), key=lambda path: path.stat().st_mtime_ns)
    records = [read_record(_SpecRecord, path, "; remove it", error=DataError) for path in files]
    specs = [TrialSpec(record.study, record.params, record.seed) for record in records]
    return [spec for path, spec in zip(files, specs, strict=True) if study.run_dir(spec) == path.parent]
