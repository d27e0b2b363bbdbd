"""Read a run folder for a report: metrics.jsonl, config.yaml, status.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.base.errors import ConfigError, DataError
from pretrain.config import flatten, load_mapping
from pretrain.engine.metrics_file import METRICS, Row, read_metrics
from pretrain.engine.run_folder import read_status

_NO_CURVE = frozenset({"validation_samples"})
_MOST_CURVES = 500


@dataclass(frozen=True)
class RunRecord:
    """The metrics, configuration and status of a run.

    ``config`` has flat keys (``"optimizer.lr"``); ``notes`` are warnings about damaged or missing files.
    """

    folder: Path
    config: dict[str, Any]
    status: dict[str, Any]
    training: list[Row]
    validation: list[Row]
    notes: list[str]

    @property
    def last_step(self) -> int:
        """The last step of all rows."""
        return max(row.step for row in (*self.training, *self.validation))

    def series(self, key: str, *, validation: bool) -> tuple[list[int], list[float]]:
        """The steps and values of one curve; both empty where the run never logged it."""
        rows = [row for row in (self.validation if validation else self.training) if key in row.figures]
        return [row.step for row in rows], [row.figures[key] for row in rows]

    def keys(self, *, validation: bool) -> list[str]:
        """The names of all curves, in the order in which the run first logged them."""
        rows = self.validation if validation else self.training
        return list(dict.fromkeys(key for row in rows for key in row.figures if key not in _NO_CURVE))


def read_run(folder: Path) -> RunRecord:
    """Read one run folder.

    Raises:
        DataError: the folder, metrics.jsonl or config.yaml is missing or no regular file, or no line is a row.
        ConfigError: config.yaml is malformed.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run folder")
    for name in (METRICS, "config.yaml"):
        if not (folder / name).exists():
            raise DataError(f"{folder / name}: no such file; a run folder holds metrics.jsonl and config.yaml")
    metrics = read_metrics(folder / METRICS)
    rows, notes = [*metrics.training, *metrics.validation], metrics.notes
    if not rows:
        raise DataError(
            f"{folder / METRICS}: no line is a JSON object with a step: nothing was logged yet, or the file is damaged"
        )
    names = {name for row in rows for name in row.figures}
    if len(names) > _MOST_CURVES:
        raise DataError(f"{folder / METRICS}: {len(names):,} different figures; a report shows at most {_MOST_CURVES}")
    status = _read_status(folder, notes)
    not_finite = {key for row in rows for key, value in row.figures.items() if not math.isfinite(value)}
    if not_finite:
        notes.append(f"values that are not finite were logged for {', '.join(sorted(not_finite))}")
    config = flatten(load_mapping(folder / "config.yaml", resolved=True))
    return RunRecord(folder, config, status, metrics.training, metrics.validation, notes)


def _read_status(folder: Path, notes: list[str]) -> dict[str, Any]:
    try:
        status = read_status(folder)
    except ConfigError:
        notes.append("status.json is damaged and was left out")
        return {}
    if status is None:
        notes.append("no status.json: the run does not say how it ended")
        return {}
    return status.model_dump(exclude_unset=True)
