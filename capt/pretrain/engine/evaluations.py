"""Results of evaluations of a trained model, kept in its run folder for reports and model cards. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import finite, read_json, write_json
from capt.pretrain.base.records import Count

logger = logging.getLogger(__name__)

EVALUATION = "evaluation-{checkpoint}.json"
"""File that ``capt evaluate`` writes about one checkpoint, such as ``evaluation-step-00000100.json``."""

Figures = dict[str, float | None]
"""Metrics by name; None for a value that is not finite."""


class Histograms(BaseModel):
    """Histograms over the same ``edges``: the counts of each kind."""

    model_config = ConfigDict(frozen=True, strict=True)
    edges: Annotated[list[FiniteFloat], Field(min_length=2, max_length=1000)]
    counts: dict[str, list[Count]]

    @model_validator(mode="after")
    def _fit(self) -> Histograms:
        if any(len(counts) + 1 != len(self.edges) for counts in self.counts.values()):
            raise ValueError("a histogram has one count less than edges")
        return self


class Section(BaseModel):
    """The metrics on one data set and the ``protocol`` of measuring them.

    ``metrics`` are those of the whole model, ``systems`` those of each system that is measured beside others: the
    vectors of a pooler or in a precision, BM25, a reranker. In files they are called ``poolers``, after the first kind.
    Of retrieval, ``dimension`` is that of whole vectors, ``scores`` are histograms of the scores of documents, and
    ``differences`` are those of two systems on the same queries (`capt.pretrain.base.paired.Paired`).
    """

    model_config = ConfigDict(frozen=True, strict=True, serialize_by_alias=True, validate_by_name=True)
    name: str
    protocol: str
    metrics: Figures = {}
    systems: dict[str, Figures] = Field({}, alias="poolers")
    dimension: Annotated[int, Field(gt=0)] | None = None
    scores: Histograms | None = None
    differences: dict[str, Figures] = {}


def sections_as_text(result: Mapping[str, Any], of: str = "checkpoint", number: str = ".4g") -> str:
    """A result of ``capt evaluate`` for people: under each heading the protocol and the figures, a column a system."""
    lines = [f"{of} {result['checkpoint']}"]
    for section in result["sections"]:
        lines += ["", section["name"], f"  protocol: {section['protocol']}"]
        lines += [f"  {name:<28}{value:>12{number}}" for name, value in section["metrics"].items()]
        systems = section["poolers"]
        if systems:
            lines.append(f"  {'':<28}" + "".join(f"{system:>12}" for system in systems))
        for name in dict.fromkeys(name for values in systems.values() for name in values):
            lines.append(f"  {name:<28}" + "".join(f"{values[name]:>12{number}}" for values in systems.values()))
        for name, found in section.get("differences", {}).items():
            low, high = found["low"], found["high"]
            interval = "no 95% interval" if low is None else f"95% {low:+{number}} to {high:+{number}}"
            lines.append(f"  {name:<28}{found['difference']:>+12{number}}  {interval}, p {found['p']:.4f}")
    return "\n".join(lines)


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
    """The run folder that ``path``, a run or one of its checkpoints, is in; None for a checkpoint that was copied."""
    path = path.resolve()
    folders = [path, path.parent.parent] if path.parent.name == "checkpoints" else [path]
    return next((folder for folder in folders if (folder / "checkpoints").is_dir()), None)


def sections_of(checkpoint: Path) -> list[Section]:
    """Read what ``capt evaluate`` has stored of ``checkpoint``; empty where it is in no run or was never evaluated.

    Raises:
        DataError: the run's file is not what ``capt evaluate`` writes.
    """
    run = run_of(checkpoint)
    path = None if run is None else run / EVALUATION.format(checkpoint=checkpoint.resolve().name)
    if path is None or not path.exists():
        return []
    return read_sections(path)


def keep_sections(checkpoint: Path, result: Mapping[str, Any]) -> None:
    """Keep ``result`` in the run of ``checkpoint``, with the sections kept before that have other names."""
    names = {section["name"] for section in result["sections"]}
    earlier = [section.model_dump() for section in sections_of(checkpoint) if section.name not in names]
    kept = {**result, "sections": [*earlier, *result["sections"]]}
    save_artifact(checkpoint, EVALUATION.format(checkpoint=checkpoint.name), kept)


def save_artifact(path: Path, name: str, result: Mapping[str, Any]) -> None:
    """Write ``result`` as ``name`` into the run folder of ``path``, a run or one of its checkpoints.

    A checkpoint that is in no run (it has been copied), or in one that cannot be written, keeps nothing.
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
