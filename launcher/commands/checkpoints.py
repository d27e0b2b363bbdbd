"""``capt evaluate``, ``capt convert`` and ``capt neighbors``: what to do with a trained encoder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands import options as o
from tokenizer.errors import CheckpointError, ConfigError


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command(epilog="\b\nExample: capt evaluate runs/first --text held_out.txt --sts STS-B --out evaluation.json")(
        evaluate
    )
    app.command(epilog="\b\nExample: capt convert runs/first export/hf --to hf")(convert)
    app.command(epilog="\b\nExample: capt neighbors export/st 'open a file' --run runs/first")(neighbors)


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, a run (its best one where it keeps one, else its newest), or a Hugging Face folder.",
        ),
    ],
    text: Annotated[list[Path] | None, typer.Option(help="Held-out text (may stand several times).")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Of a fine-tuned or latent checkpoint: its data folder, else as trained.")
    ] = None,
    sts: Annotated[Path | None, typer.Option(help="A folder with STS sets.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the result to as well.")] = None,
    pooler: Annotated[
        list[str] | None, typer.Option(help="cls, mean, head (may stand several times); else all.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Windows of each text, at most.")] = 512,
    length: Annotated[int | None, typer.Option(min=8, help="Tokens of a window; else as trained.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Windows or sentences a forward pass.")] = 32,
    split: Annotated[str, typer.Option(help="Of a latent checkpoint: train, validation or test.")] = "test",
    draws: Annotated[int, typer.Option(min=1, help="Of a latent checkpoint: draws of each posterior.")] = 128,
    weighted: Annotated[
        int, typer.Option(min=0, help="Of a latent checkpoint: draws for the importance-weighted likelihood; 0 = none.")
    ] = 500,
    weighted_sentences: Annotated[
        int | None,
        typer.Option(min=1, help="Sentences for that likelihood, at most; else all."),
    ] = None,
    generated: Annotated[
        str | None,
        typer.Option(
            help="Forward and reverse PPL of generated text: builtin, kenlm or none; else builtin for the test text.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of windows and of the corruption.")] = 1,
    json: o.Json = False,
) -> None:
    """Measure a checkpoint: an encoder on text and similarity, a fine-tuned one on its dev set, a latent model.

    Which options have a meaning depends on the task that the checkpoint was trained on.
    """
    o.quiet(context)
    kind = _task_of(checkpoint)
    if kind != "capt_language":
        only = {"--text": text, "--sts": sts, "--pooler": pooler, "--length": length}
        foreign = [name for name, value in only.items() if value]
        if foreign:
            raise ConfigError(f"{foreign[0]} has no meaning for a checkpoint of task {kind}")
        if kind == "glue":
            _evaluate_glue(checkpoint, data, out, batch, json)
        else:
            _evaluate_latent(checkpoint, split, data, draws, weighted, weighted_sentences, generated, out, json)
        return
    if data is not None:
        raise ConfigError("--data is for fine-tuned and latent checkpoints; give text with --text, STS sets with --sts")
    from pretrain.language.evaluate import as_text
    from pretrain.language.evaluate import evaluate as measure
    from pretrain.language.from_hf import is_hf, load_hf
    from pretrain.language.representations import POOLERS

    result = measure(
        load_hf(checkpoint) if is_hf(checkpoint) else checkpoint,
        text=text or (),
        sts=sts,
        out=out,
        batch=batch,
        seed=seed,
        poolers=pooler or tuple(POOLERS),
        samples=samples,
        length=length,
    )
    if json:
        o.echo_json(result)
    else:
        typer.echo(as_text(result))


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


def _evaluate_latent(
    checkpoint: Path, split: str, data: Path | None, draws: int, weighted: int, weighted_sentences: int | None,
    generated: str | None, out: Path | None, json: bool,
) -> None:  # fmt: skip
    from launcher.progress import progress_bar
    from pretrain.latent.evaluate import as_text, evaluate
    from pretrain.latent.generated import writes_text

    split = {"valid": "validation", "dev": "validation"}.get(split, split)
    if split not in ("train", "validation", "test"):
        raise ConfigError(f"--split {split!r}: choose train, validation or test")
    if generated not in (None, "builtin", "kenlm", "none"):
        raise ConfigError(f"--generated {generated!r}: choose builtin, kenlm or none")
    if generated is None and data is None and split == "test" and writes_text(checkpoint):
        generated = "builtin"
    with progress_bar("measuring") as progress:
        result = evaluate(
            checkpoint, split=split, data=data, samples=draws, weighted=weighted, weighted_limit=weighted_sentences,
            generated=None if generated == "none" else generated, out=out, progress=progress,  # type: ignore[arg-type]
        )  # fmt: skip
    if json:
        o.echo_json(result)
    else:
        typer.echo(as_text(result))


def _evaluate_glue(checkpoint: Path, data: Path | None, out: Path | None, batch: int, json: bool) -> None:
    from finetune.glue.predict import as_text, evaluate
    from launcher.progress import progress_bar

    with progress_bar("predicting") as progress:
        result = evaluate(checkpoint, path=data, out=out, batch=batch, progress=progress)
    if json:
        o.echo_json(result)
    else:
        typer.echo(as_text(result))


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
