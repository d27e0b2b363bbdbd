"""The options of ``capt evaluate`` and ``capt predict`` of picture tasks. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of ``capt evaluate`` that this task alone takes."""

    predictions: Annotated[
        Path | None, typer.Option(help="Result file of a visual checkpoint, in the benchmark's own format.")
    ] = None


@dataclass(frozen=True)
class PredictOptions:
    """Options of ``capt predict`` that this task alone takes."""

    regions: Annotated[
        Path | None, typer.Option(help="The region store with the pictures, where it is not the one of the job.")
    ] = None
