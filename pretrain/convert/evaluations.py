"""Results of ``capt evaluate`` that a run holds about its checkpoints, for later evaluations and the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.engine.artifacts import EVALUATION, Section, read_sections, run_of


def sections_of(checkpoint: Path) -> list[Section]:
    """The stored results for ``checkpoint``; empty where it lies in no run or was never evaluated.

    Raises:
        DataError: the run's file is not what ``capt evaluate`` writes.
    """
    run = run_of(checkpoint)
    path = None if run is None else run / EVALUATION.format(checkpoint=checkpoint.resolve().name)
    if path is None or not path.exists():
        return []
    return read_sections(path)


def with_earlier(checkpoint: Path, sections: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """``sections`` after the stored ones of ``checkpoint`` that have other names."""
    names = {section["name"] for section in sections}
    earlier = [section.model_dump() for section in sections_of(checkpoint) if section.name not in names]
    return [*earlier, *sections]
