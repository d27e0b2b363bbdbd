"""``capt evaluate``, ``capt convert`` and ``capt neighbors``: what to do with a trained encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.commands import options as o


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command(epilog="\b\nExample: capt neighbors export/st 'open a file' --run runs/first")(neighbors)


def neighbors(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A sentence-transformers folder (capt convert --to).")],
    queries: Annotated[list[str], typer.Argument(metavar="QUERY...", help="Sentences to find neighbours of.")],
    run: Annotated[Path | None, typer.Option(help="Search in the training text of this run.")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Search in this file (may stand several times).")] = None,
    top: Annotated[int, typer.Option(min=1, help="Neighbours a query.")] = 3,
    limit: Annotated[int, typer.Option(min=1, help="Lines to search in.")] = 2000,
    json: o.Json = False,
) -> None:
    """Show the lines of a text that an exported encoder puts nearest to each query."""
    from dataclasses import asdict

    from pretrain.language.neighbors import neighbors as find

    found = find(model, queries, run=run, text=text or (), top=top, limit=limit)
    if json:
        o.echo_json(
            [{"query": query, "found": [asdict(n) for n in near]} for query, near in zip(queries, found, strict=True)]
        )
        return
    for query, near in zip(queries, found, strict=True):
        typer.echo(query)
        for neighbor in near:
            typer.echo(f"  {neighbor.similarity:.3f}  {neighbor.text}")
