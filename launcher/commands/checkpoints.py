"""``capt evaluate`` and ``capt convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
