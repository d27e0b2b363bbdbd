"""``trials.jsonl`` of a sweep: one typed record for each finished trial, for its writer and its readers. No torch."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat, ValidationError, field_validator

from pretrain.base.files import open_regular
from pretrain.base.records import Count, Record
from pretrain.engine.metrics_file import bounded_lines

TRIALS = "trials.jsonl"

_Name = Annotated[str, Field(min_length=1, max_length=200)]
_Number = Annotated[FiniteFloat, Field(strict=False, ge=-1e100, le=1e100)]
_KEYS = 1000


State = Literal["done", "failed", "pruned"]
"""How a trial ended; the scheduler ended a pruned one early."""


class ParameterChange(Record):
    """Population based training: from ``step`` on a member trains with ``params``, continuing the run ``source``."""

    model_config = ConfigDict(populate_by_name=True)

    step: Count
    params: dict[str, Any]
    source: str = Field(alias="from")


class TrialRecord(Record):
    """A finished trial. ``score`` is its best validation value, ``metrics`` the validation row that holds it."""

    study: _Name
    params: Annotated[dict[_Name, Any], Field(max_length=_KEYS)]
    seed: Count
    state: State
    metric: _Name = "score"
    mode: Literal["max", "min"] = "max"
    score: _Number | None = None
    best_step: Count | None = None
    metrics: dict[_Name, _Number | None] = Field(default_factory=dict, max_length=_KEYS)
    run: Annotated[str, Field(min_length=1, max_length=1000)]
    """The run's folder, below the sweep's."""
    node: str = ""
    seconds: Annotated[_Number, Field(ge=0)] = 0.0
    attempts: Count = 1
    error: str = ""
    history: Annotated[tuple[ParameterChange, ...] | None, Field(strict=False)] = None
    """Population based training: the parameters that the member has trained with."""

    def to_json(self) -> str:
        """The record as a line of the file; ``history`` is present only in lines of population based training."""
        unused = {"history"} if self.history is None else None
        return json.dumps(self.model_dump(mode="json", by_alias=True, exclude=unused))

    @field_validator("study", "metric", "run")
    @classmethod
    def _is_printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("holds characters that cannot be shown")
        return value

    @field_validator("run")
    @classmethod
    def _lies_below(cls, run: str) -> str:
        parts = PurePosixPath(run).parts
        if PurePosixPath(run).is_absolute() or ".." in parts or not parts:
            raise ValueError("leads out of the sweep's folder")
        return run


def read_trials(path: Path) -> tuple[dict[str, TrialRecord], list[str]]:
    """The trials by their run folders (of several lines about one, the last), and notes about damaged lines.

    Raises:
        DataError: it is not a regular file, or over a GiB. ``OSError`` passes.
    """
    records: dict[str, TrialRecord] = {}
    damaged: list[str] = []
    with open_regular(path) as file:
        for number, raw in enumerate(bounded_lines(file, path), start=1):
            if not raw.strip():
                continue
            try:
                line = TrialRecord.model_validate(json.loads(raw))
            except ValidationError as error:
                key = error.errors(include_url=False, include_input=False, include_context=False)[0]["loc"]
                damaged.append(f"{number} ({ascii(key[0])[:42] if key else 'no object'})")
            except (ValueError, RecursionError):
                damaged.append(str(number))
            else:
                records.pop(line.run, None)
                records[line.run] = line
    more = f" and {len(damaged) - 10} more" if len(damaged) > 10 else ""
    notes = [f"damaged lines of {TRIALS} were left out: {', '.join(damaged[:10])}{more}"] if damaged else []
    return records, notes
