"""The options of ``capt evaluate`` of latent-variable models. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of ``capt evaluate`` that this task alone takes."""

    split: Annotated[
        str | None, typer.Option(help="The split for a latent checkpoint: train, validation or test (default).")
    ] = None
    draws: Annotated[
        int | None, typer.Option(min=1, help="Draws from each posterior of a latent checkpoint; default 128.")
    ] = None
    weighted: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Draws of each proposal for importance-weighted bounds of a latent checkpoint; default 100, 0 = none.",
        ),
    ] = None
    weighted_sentences: Annotated[
        int | None,
        typer.Option(min=1, help="About how many sentences for these bounds, in whole batches; default all."),
    ] = None
    bridge: Annotated[
        int | None,
        typer.Option(
            min=0, help="Sentences whose bound is checked by annealed importance sampling; default 0, 20 take minutes."
        ),
    ] = None
    generated: Annotated[
        str | None,
        typer.Option(
            help="Forward and reverse PPL of generated text: builtin (default for the test text), kenlm or none.",
        ),
    ] = None
