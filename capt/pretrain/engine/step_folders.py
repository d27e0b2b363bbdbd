"""The folders of a run's checkpoints: their names, and which are complete. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "manifest.json"
"""The file of a checkpoint that is written last: a folder without it is not a checkpoint."""
_STEP = re.compile(r"step-(\d{8,18})", re.ASCII)


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def is_step(name: str) -> bool:
    """Return whether a checkpoint's folder may have this name."""
    return _STEP.fullmatch(name) is not None


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder. Raises ``ValueError`` where there is none (`is_step`)."""
    match = _STEP.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint}: not called step-NUMBER")
    return int(match[1])


def checkpoints_of(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first (those whose manifest has been written)."""
    folder = run_dir / "checkpoints"
    found = [path for path in folder.iterdir() if is_step(path.name)] if folder.is_dir() else []
    return sorted((path for path in found if (path / MANIFEST).is_file()), key=step_of)


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run, in order."""
    return [step_of(path) for path in checkpoints_of(run_dir)]
