"""``capt convert`` and ``capt neighbors``: what to do with a trained encoder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands import options as o
from tokenizer.errors import CheckpointError, ConfigError


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command(epilog="\b\nExample: capt convert runs/first export/hf --to hf")(convert)
    app.command(epilog="\b\nExample: capt neighbors export/st 'open a file' --run runs/first")(neighbors)


def convert(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A checkpoint or run; with --from a folder to read.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder to write.")],
    to: Annotated[str | None, typer.Option(help="hf, sentence-transformers or onnx.")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="hf: make a checkpoint of a Hugging Face folder.")] = None,
    pooling: Annotated[str, typer.Option(help="head (the aggregation head), cls or mean; not for hf.")] = "head",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older export in OUT.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face, sentence-transformers or ONNX folder, or the other way round."""
    o.quiet(context)
    if to is not None and from_ is None and _task_of(source) == "glue":
        if to != "hf":
            raise ConfigError(f"--to {to!r}: a fine-tuned checkpoint can be written as hf")
        from finetune.glue.export import export

        typer.echo(export(source, out, overwrite=overwrite))
        return
    from pretrain.convert.commands import convert as write

    typer.echo(write(source, out, to=to, from_=from_, pooling=pooling, overwrite=overwrite))


def _task_of(path: Path) -> str:
    """The task of a checkpoint or run; the verb itself complains of what it cannot read."""
    from pretrain.engine.checkpoint import find_checkpoint, read_job

    try:
        return read_job(find_checkpoint(path)).task.type
    except CheckpointError:
        with suppress(CheckpointError, ConfigError, OSError):
            if (kind := read_job(path).task.type) != "capt_language":
                return kind
        return "capt_language"


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
