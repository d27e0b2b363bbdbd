"""Options of encoders and of mining, declared once for the command line and for what it calls.

``capt`` reads them before it knows what to run, so that nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from capt.pretrain.base.errors import ConfigError

Pooling = Annotated[
    str | None,
    typer.Option(
        "--pooler",
        "--pooling",
        help="mean, cls or head; default the vector that a bottleneck has trained, else mean. A sentence-transformers "
        "folder says it itself.",
    ),
]
Length = Annotated[int | None, typer.Option(min=3, help="Tokens of a text at most; default as the model's own limit.")]
QueryPrompt = Annotated[str | None, typer.Option(help="Precedes every query; default as the folder says.")]
DocumentPrompt = Annotated[str | None, typer.Option(help="Precedes every document; default as the folder says.")]


@dataclass(frozen=True)
class EncoderOptions:
    """Choices of the user about an encoder."""

    pooling: Pooling = None
    length: Length = None
    query_prompt: QueryPrompt = None
    document_prompt: DocumentPrompt = None


@dataclass(frozen=True)
class Rules:
    """Rules by which documents that were found become negatives."""

    number: Annotated[int, typer.Option(min=0, help="Negatives of a row; 0 = none, only --keep-top.")] = 7
    first: Annotated[int, typer.Option(min=0, help="Documents of a ranking to skip.")] = 0
    last: Annotated[int, typer.Option(min=1, help="Documents of a ranking to look at.")] = 100
    max_score: Annotated[float | None, typer.Option(help="Highest score of a negative.")] = None
    margin: Annotated[float | None, typer.Option(help="Least distance below the score of the positive.")] = None
    relative_margin: Annotated[float | None, typer.Option(help="The same as a share m: s_pos - |s_pos| m at most.")] = (
        None
    )
    choice: Annotated[str, typer.Option(help="top: the nearest that are left. random: drawn from them.")] = "top"
    keep_top: Annotated[
        int, typer.Option(min=0, help="Leave out rows whose positive is not among this number of nearest documents.")
    ] = 0
    short: Annotated[
        str, typer.Option(help="Rows with too few negatives: keep them with what they have, drop them, or refuse all.")
    ] = "keep"
    seed: Annotated[int, typer.Option(min=0, help="Seed of --choice random.")] = 1

    def check(self) -> None:
        """Raise ``ConfigError`` for a value that cannot be meant."""
        if self.choice not in ("top", "random"):
            raise ConfigError(f"--choice {self.choice}: choose top or random")
        if self.short not in ("refuse", "keep", "drop"):
            raise ConfigError(f"--short {self.short}: choose keep, drop or refuse")
        if not 0 <= self.first < self.last:
            raise ConfigError(f"--first {self.first} --last {self.last}: --last must be the larger one")
        if self.number > self.last - self.first:
            raise ConfigError(f"--number {self.number}: --first and --last leave {self.last - self.first} documents")
        if self.keep_top > self.last:
            raise ConfigError(f"--keep-top {self.keep_top}: more than --last {self.last}")
        if self.max_score is not None and self.max_score != self.max_score:
            raise ConfigError(f"--max-score {self.max_score}: a number is expected")
        for name, value in (("margin", self.margin), ("relative-margin", self.relative_margin)):
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"--{name} {value}: give a number of 0 or more")
