"""``trials.jsonl`` of a sweep, a line a finished trial: its typed records. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, ValidationError, field_validator, model_validator

from pretrain.base.files import open_regular
from pretrain.base.records import Count, Record
from pretrain.engine.metrics_file import bounded_lines

TRIALS = "trials.jsonl"

_Name = Annotated[str, Field(min_length=1, max_length=200)]
_Number = Annotated[FiniteFloat, Field(strict=False, ge=-1e100, le=1e100)]
_KEYS = 1000


class TrialLine(Record):
    """A finished trial. ``score`` is its best validation value, ``metrics`` the row in which it stands."""

    study: _Name
    params: Annotated[dict[_Name, Any], Field(max_length=_KEYS)]
    seed: Count
    state: Literal["done", "failed", "pruned"]
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
    history: tuple[dict[str, Any], ...] | None = None
    """Of population based training: what the member has trained with."""

    @model_validator(mode="before")
    @classmethod
    def _are_lists(cls, values: Any) -> Any:
        return {**values, "history": tuple(values["history"])} if _has_history(values) else values

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


def _has_history(values: Any) -> bool:
    return isinstance(values, dict) and isinstance(values.get("history"), list)


def read_trials(path: Path) -> tuple[dict[str, TrialLine], list[str]]:
    """The trials by their runs, of several lines about one the last, and what was odd: lines that are no trial's.

    Raises:
        DataError: it is not a regular file, or over a GiB. ``OSError`` passes.
    """
    found: dict[str, TrialLine] = {}
    damaged: list[str] = []
    with open_regular(path) as file:
        for number, raw in enumerate(bounded_lines(file, path), start=1):
            if not raw.strip():
                continue
            try:
                line = TrialLine.model_validate(json.loads(raw))
            except ValidationError as error:
                key = error.errors(include_url=False, include_input=False, include_context=False)[0]["loc"]
                damaged.append(f"{number} ({ascii(key[0])[:42] if key else 'no object'})")
            except (ValueError, RecursionError):
                damaged.append(str(number))
            else:
                found.pop(line.run, None)
                found[line.run] = line
    more = f" and {len(damaged) - 10} more" if len(damaged) > 10 else ""
    notes = [f"damaged lines of {TRIALS} were left out: {', '.join(damaged[:10])}{more}"] if damaged else []
    return found, notes
