"""What ``capt evaluate`` has measured of a checkpoint and kept in its run, for later evaluations and the model card."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pretrain.base.errors import DataError
from pretrain.base.files import read_json
from pretrain.engine.artifacts import EVALUATION, run_of

Figures = dict[str, float | None]
"""Measured numbers by name; None for one that is not finite."""


class Section(BaseModel):
    """Numbers measured on one thing, and how: ``metrics`` of the model, ``poolers`` of each pooler's vectors."""

    model_config = ConfigDict(frozen=True, strict=True)
    name: str
    protocol: str
    metrics: Figures = {}
    poolers: dict[str, Figures] = {}


class _Kept(BaseModel):
    sections: list[Section]


def sections_of(checkpoint: Path) -> list[Section]:
    """What was measured of ``checkpoint``; nothing where it lies in no run or was never evaluated.

    Raises:
        DataError: the run's file is not what ``capt evaluate`` writes.
    """
    run = run_of(checkpoint)
    path = None if run is None else run / EVALUATION.format(checkpoint=checkpoint.resolve().name)
    if path is None or not path.exists():
        return []
    try:
        return _Kept.model_validate(read_json(path)).sections
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise DataError(f"{path}: {where or 'content'} is not what capt evaluate writes; remove the file") from None
