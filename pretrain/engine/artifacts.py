"""What is measured of a run after its training, kept in the run folder for reports and model cards."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.base.files import write_json

logger = logging.getLogger(__name__)

EVALUATION = "evaluation-{checkpoint}.json"
"""Of ``capt evaluate``: what was measured of one checkpoint, ``evaluation-step-00000100.json``."""


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


def finite(value: Any) -> Any:
    """The measurements with None in the place of numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
