"""``capt convert``, ``capt merge``, ``capt shrink`` and ``capt neighbors``: what to do with a trained encoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from capt.launcher.commands import options as o
from capt.pretrain.base.errors import ConfigError, quoted


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog="\b\nExample: capt convert runs/first export/hf --to hf")(convert)
    app.command(epilog="\b\nExample: capt merge runs/a runs/b --weights 0.7,0.3 --out runs/merged")(merge)
    app.command(
        epilog="\b\nExample: capt shrink sentence-transformers/all-MiniLM-L6-v2 small --layers 0,2,4 "
        "--vocabulary-of my.txt"
    )(shrink)
    app.command(epilog="\b\nExample: capt neighbors export/st 'open a file' --run runs/first")(neighbors)


def convert(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            parser=o.source_path,
            help="A checkpoint, a run (its best checkpoint, else its newest) or a file of word vectors; with --from a "
            "folder or USER/NAME of the hub.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder to write; for word vectors a file.")],
    to: Annotated[
        str | None,
        typer.Option(help="hf, sentence-transformers or onnx; word2vec, glove or gensim: as the task offers."),
    ] = None,
    from_: Annotated[str | None, typer.Option("--from", help="hf: make a run of a Hugging Face model.")] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling",
            "--pooler",
            help="mean, cls or head; default: the best that capt evaluate --sts has measured, else mean.",
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="int8", help="Of --to onnx: a second graph in int8, model_int8.onnx, with what it loses and gains."
        ),
    ] = None,
    option: o.OwnOptions = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older export in OUT.")] = False,
    license: Annotated[str | None, typer.Option(help="For the model card: apache-2.0, mit, ...")] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="For the model card: en, de, ... (may be repeated).")
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="For the model card: hub id that training started from (default: that of model.init)."),
    ] = None,
    push: Annotated[str | None, typer.Option(metavar="USER/NAME", help="Upload the export to the hub.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository of --push public.")] = False,
) -> None:
    """Export a checkpoint for other libraries. With --from it makes a run of a Hugging Face model."""
    o.quiet(context)
    of_exports = {"--license": license, "--language": language, "--base-model": base_model, "--push": push}
    given = [name for name, value in of_exports.items() if value]
    if from_ is not None and given:
        raise ConfigError(f"{given[0]} has no meaning with --from")
    if public and push is None:
        raise ConfigError("--public has no meaning without --push")
    from capt.pretrain.convert.card import About
    from capt.pretrain.convert.dispatch import convert as write
    from capt.pretrain.convert.output import check_push
    from capt.pretrain.convert.output import push as upload

    if push is not None:
        # Before the export: what refuses the upload is known early.
        check_push(push)
    about = About(license, tuple(language or ()), base_model, push or "PATH")
    written = write(
        source, out, to=to, from_=from_, overwrite=overwrite, about=about, assignments=option or (), pooling=pooling,
        quantize=quantize,
    )  # fmt: skip
    typer.echo(written)
    if push is not None:
        typer.echo(upload(out, push, private=not public))


def merge(
    context: typer.Context,
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE...", help="Runs, checkpoints, or Hugging Face folders.")
    ],
    out: Annotated[Path, typer.Option("--out", help="New folder: a run or a Hugging Face folder, as the sources are.")],
    weights: Annotated[
        str | None, typer.Option(help="The share of each source, as 0.7,0.3; they add up to 1 (default: equal ones).")
    ] = None,
    method: Annotated[str, typer.Option(help="average, or slerp: along the arc between two models.")] = "average",
    validate: Annotated[
        bool, typer.Option("--validate/--no-validate", help="Measure sources and mixture as their job validates.")
    ] = True,
) -> None:
    """Mix the weights of several models into one. They need one architecture; all are measured."""
    o.quiet(context)
    from capt.pretrain.convert.merge import command

    if method not in ("average", "slerp"):
        raise ConfigError(f"--method {method!r} is unknown; average or slerp")
    try:
        shares = None if weights is None else [float(share) for share in weights.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {weights!r}: numbers are expected, as 0.7,0.3") from None
    way: Any = "slerp" if method == "slerp" else "average"
    compared = command(sources, out, weights=shares, method=way, validate=validate)
    typer.echo(out)
    typer.echo(compared)


def shrink(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", parser=o.source_path, help="A Hugging Face or sentence-transformers folder, or USER/NAME."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder to write.")],
    layers: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="The layers to keep, from 0 on; -1 is the last (default: all)."),
    ] = None,
    vocabulary_of: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="TEXTS",
            help="Keep the pieces of these texts: a text a line, a table with text, or a BEIR folder (repeatable).",
        ),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Of these pieces the N most frequent, with what they need.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older export in OUT.")] = False,
    json: o.Json = False,
) -> None:
    """Make an encoder of fewer layers and pieces.

    Kept are the layers that you name and the pieces of your texts; special tokens, bytes and letters stay. It is
    compared with the whole one: what is printed says which texts are read as before.
    """
    o.quiet(context)
    try:
        kept = None if layers is None else [int(number) for number in layers.split(",")]
    except ValueError:
        raise ConfigError(f"--layers {layers!r}: whole numbers are expected, as 0,2,4") from None
    if keep is not None and not vocabulary_of:
        raise ConfigError("--keep has no meaning without --vocabulary-of")
    from capt.pretrain.convert.shrink import shrink_model
    from capt.pretrain.retrieval.data import read_documents

    files = vocabulary_of or []

    def texts() -> Iterator[str]:
        return (text for path in files for _, text in read_documents(path))

    found = shrink_model(model, out, layers=kept, texts=texts if files else None, number=keep, overwrite=overwrite)
    following = [
        f"next: capt encode TEXTS --model {quoted(model)} --out VECTORS",
        f"next: capt pretrain capt_distil model.init={quoted(out)} data.files=TEXTS distillation.vectors=VECTORS",
    ]
    o.answer(found.to_json(), lambda: "\n".join([str(out), *found.lines(), *following]), json=json)


def neighbors(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            parser=o.source_path,
            help="A sentence-transformers folder (capt convert --to), a run, a Hugging Face folder, or USER/NAME.",
        ),
    ],
    queries: Annotated[list[str], typer.Argument(metavar="QUERY...", help="Sentences to find neighbours of.")],
    run: Annotated[Path | None, typer.Option(help="Search in the training text of this run.")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Search in this file (may be repeated).")] = None,
    text_column: Annotated[
        str, typer.Option(help="Column or key with the text of a row of a .jsonl, .csv, .tsv or .parquet.")
    ] = "text",
    top: Annotated[int, typer.Option(min=1, help="Neighbours of each query.")] = 3,
    lines: Annotated[int, typer.Option("--lines", "--limit", min=1, help="How many lines to search, at most.")] = 2000,
    rerank: Annotated[
        Path | None,
        typer.Option(
            parser=o.source_path,
            metavar="MODEL",
            help="A reranker, a run or a folder, that orders the 50 nearest lines anew.",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Show the lines of a text that are nearest to a query."""
    o.quiet(context)

    from capt.pretrain.retrieval.neighbors import neighbors as find_neighbors

    results = find_neighbors(
        model, queries, run=run, text=text or (), column=text_column, top=top, limit=lines, rerank=rerank
    )
    if json:
        o.echo_json(
            [{"query": query, "found": [asdict(n) for n in near]} for query, near in zip(queries, results, strict=True)]
        )
        return
    for query, near in zip(queries, results, strict=True):
        o.say(query)
        for neighbor in near:
            o.say(f"  {neighbor.similarity:.3f}  {neighbor.text}")
