"""The options of ``capt evaluate`` of word vectors. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of ``capt evaluate`` that this task alone takes."""

    word_similarity: Annotated[
        Path | None, typer.Option(help="A file of scored word pairs, or a folder of them, for word vectors.")
    ] = None
    analogies: Annotated[
        Path | None, typer.Option(help="Analogies for word vectors, in the form of questions-words.txt.")
    ] = None
