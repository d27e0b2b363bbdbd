"""Read what a run left behind: metrics.jsonl, config.yaml, status.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config import flatten, load_mapping
from tokenizer.errors import DataError

COUNTERS = frozenset({"step", "samples", "tokens", "validation_samples"})
"""Numbers of a row that say where it stands; everything else that is a number is a curve."""

Row = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What a run folder tells. ``config`` is flat (``"optimizer.lr"``); ``notes`` say what was odd in its files."""

    folder: Path
    config: dict[str, Any]
    status: dict[str, Any]
    training: list[Row]
    validation: list[Row]
    notes: list[str]

    @property
    def last_step(self) -> int:
        """The last step that any row speaks of."""
        return max(int(row["step"]) for row in (*self.training, *self.validation))

    def series(self, key: str, *, validation: bool) -> tuple[list[int], list[float]]:
        """Steps and values of one curve; both empty where the run never logged it."""
        rows = [row for row in (self.validation if validation else self.training) if _is_number(row.get(key))]
        return [int(row["step"]) for row in rows], [float(row[key]) for row in rows]

    def keys(self, *, validation: bool) -> list[str]:
        """Names of all curves, in the order in which the run logged them first."""
        rows = self.validation if validation else self.training
        return list(dict.fromkeys(k for row in rows for k, v in row.items() if k not in COUNTERS and _is_number(v)))


def read_run(folder: Path) -> RunRecord:
    """Read one run folder.

    A line that is not JSON (a crash tears the last one) is left out and noted. Where steps were done again after a
    resume, the last row of a step counts, and rows beyond the step that was resumed from are dropped.

    Raises:
        DataError: the folder, metrics.jsonl or config.yaml is missing, or no line can be read.
        ConfigError: config.yaml is malformed.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run folder")
    for name in ("metrics.jsonl", "config.yaml"):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: no such file; a run folder holds metrics.jsonl and config.yaml")
    rows, notes = _read_rows(folder / "metrics.jsonl")
    training, validation = _last_timeline(rows, notes)
    status = _read_status(folder / "status.json", notes)
    values = [item for row in training + validation for item in row.items() if _is_number(item[1])]
    odd = {key for key, value in values if not math.isfinite(value)}
    if odd:
        notes.append(f"values that are not finite were logged for {', '.join(sorted(odd))}")
    return RunRecord(
        folder, flatten(load_mapping(folder / "config.yaml", resolved=True)), status, training, validation, notes
    )


def _read_rows(path: Path) -> tuple[list[Row], list[str]]:
    lines = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    damaged: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            whole = isinstance(row, dict) and isinstance(row.get("step"), int)
        except ValueError:
            whole = False
        if whole:
            rows.append(row)
        else:
            damaged.append(number)
    if not rows:
        raise DataError(f"{path}: no line is a JSON object with a step: nothing was logged yet, or the file is damaged")
    notes = []
    if damaged == [len(lines)]:
        notes.append(
            f"the last line of metrics.jsonl (line {damaged[0]}) is torn and was left out: killed while writing?"
        )
    elif damaged:
        notes.append(f"damaged lines of metrics.jsonl were left out: {', '.join(map(str, damaged))}")
    return rows, notes


def _last_timeline(rows: list[Row], notes: list[str]) -> tuple[list[Row], list[Row]]:
    """Training and validation rows; a row takes back those behind it and its like of the same step."""
    kept: dict[bool, list[Row]] = {False: [], True: []}
    taken_back = 0
    for row in rows:
        is_validation = row.get("split") == "validation"
        for split, earlier in kept.items():
            while earlier and earlier[-1]["step"] >= row["step"] + (split != is_validation):
                earlier.pop()
                taken_back += 1
        kept[is_validation].append(row)
    if taken_back:
        notes.append(f"{taken_back} rows were logged again after going back to an earlier step; the later ones count")
    return kept[False], kept[True]


def _read_status(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        notes.append("no status.json: the run does not say how it ended")
        return {}
    try:
        status = json.loads(path.read_bytes())
    except ValueError:
        status = None
    if not isinstance(status, dict):
        notes.append("status.json is damaged and was left out")
        return {}
    return status


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
