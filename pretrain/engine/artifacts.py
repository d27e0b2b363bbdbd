"""What is measured of a run after its training, kept in the run folder for reports and model cards."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pretrain.base.errors import DataError
from pretrain.base.files import finite, read_json, write_json

logger = logging.getLogger(__name__)

EVALUATION = "evaluation-{checkpoint}.json"
"""File that ``capt evaluate`` writes about one checkpoint, such as ``evaluation-step-00000100.json``."""

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


def read_sections(path: Path) -> list[Section]:
    """Read the sections that ``capt evaluate`` has stored.

    Raises:
        DataError: the file is not what ``capt evaluate`` writes.
    """
    try:
        return _StoredEvaluation.model_validate(read_json(path)).sections
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise DataError(f"{path}: {where or 'content'} is not what capt evaluate writes; remove the file") from None


def run_of(path: Path) -> Path | None:
    """The run folder that ``path``, a run or one of its checkpoints, lies in; None for a checkpoint that was copied."""
    path = path.resolve()
    folders = [path, path.parent.parent] if path.parent.name == "checkpoints" else [path]
    return next((folder for folder in folders if (folder / "checkpoints").is_dir()), None)


def save_artifact(path: Path, name: str, result: Mapping[str, Any]) -> None:
    """Write ``result`` as ``name`` into the run folder of ``path``, a run or one of its checkpoints.

    A checkpoint that lies in no run (it has been copied), or in one that cannot be written, keeps nothing.
    """
    run = run_of(path)
    if run is None:
        return
    kept = run / name
    said = "replaced" if kept.exists() else "written"
    try:
        write_result(kept, result)
    except OSError as error:
        logger.warning("%s: not kept: %s", kept, error.strerror)
    else:
        logger.info("%s: %s, for capt report and model cards", kept, said)


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write measurements as JSON; a number that is not finite, which JSON cannot hold, as ``null``."""
    write_json(path, finite(result))
