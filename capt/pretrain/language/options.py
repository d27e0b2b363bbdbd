"""The options of ``capt evaluate`` of encoders. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of ``capt evaluate`` that this task alone takes."""

    text: Annotated[list[Path] | None, typer.Option(help="Held-out text (may be repeated).")] = None
    sts: Annotated[Path | None, typer.Option(help="A folder with STS sets.")] = None
    before: Annotated[
        bool | None, typer.Option("--before", help="The model.init of the run as well, and what has changed.")
    ] = None
