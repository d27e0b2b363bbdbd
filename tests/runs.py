"""Readers of a run folder for tests and studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows_of(run: str | Path) -> list[dict[str, Any]]:
    """Logged rows of a run, but for a last line that is half written."""
    path = Path(run) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def training_rows(run: str | Path) -> list[dict[str, Any]]:
    """Logged rows of the training steps."""
    return [row for row in rows_of(run) if "split" not in row]


def validations(run: str | Path) -> list[dict[str, Any]]:
    """Logged rows of the validations."""
    return [row for row in rows_of(run) if row.get("split") == "validation"]


def losses(run: str | Path) -> dict[int, float]:
    """The training loss of each step."""
    return {row["step"]: row["loss"] for row in training_rows(run)}


def step(run: Path) -> int:
    """The last step in the metrics."""
    return max(losses(run), default=0)


def crashes(run: Path) -> list[dict[str, Any]]:
    """The reports of crashes, oldest first."""
    return [json.loads(path.read_text()) for path in sorted((run / "crashes").glob("*.json"))]
