"""Results of ``capt evaluate`` that a run holds about its checkpoints, for later evaluations and the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pretrain.base.errors import DataError
from pretrain.base.files import read_json
from pretrain.engine.artifacts import EVALUATION, run_of

Figures = dict[str, float | None]
"""Metrics by name; None for a value that is not finite."""


class Section(BaseModel):
    """The metrics on one data set and the ``protocol`` of measuring them.

    ``metrics`` are those of the whole model, ``poolers`` those of the vectors of each pooler, where there are several.
    """

    model_config = ConfigDict(frozen=True, strict=True)
    name: str
    protocol: str
    metrics: Figures = {}
    poolers: dict[str, Figures] = {}


class _StoredEvaluation(BaseModel):
    sections: list[Section]


def sections_of(checkpoint: Path) -> list[Section]:
    """The stored results for ``checkpoint``; empty where it lies in no run or was never evaluated.

    Raises:
        DataError: the run's file is not what ``capt evaluate`` writes.
    """
    run = run_of(checkpoint)
    path = None if run is None else run / EVALUATION.format(checkpoint=checkpoint.resolve().name)
    if path is None or not path.exists():
        return []
    try:
        return _StoredEvaluation.model_validate(read_json(path)).sections
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise DataError(f"{path}: {where or 'content'} is not what capt evaluate writes; remove the file") from None


def with_earlier(checkpoint: Path, sections: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """``sections`` after the stored ones of ``checkpoint`` that have other names."""
    names = {section["name"] for section in sections}
    earlier = [section.model_dump() for section in sections_of(checkpoint) if section.name not in names]
    return [*earlier, *sections]
