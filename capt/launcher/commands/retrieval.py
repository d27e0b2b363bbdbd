"""``capt encode``, ``capt mine`` and ``capt compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from capt.launcher.commands import options as o
from capt.pretrain.base.errors import ConfigError, counted, quoted
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, Rules, VectorOptions


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog="\b\nExample: capt encode corpus.jsonl --model exported-st --out vectors --nproc 2")(encode)
    app.command(
        epilog="\b\nExample: capt mine --pairs pairs.jsonl --corpus beir --model exported-st --relative-margin 0.05 "
        "--out mined"
    )(mine)
    app.command(epilog="\b\nExample: capt compare first.jsonl second.jsonl")(compare)


def encode(
    context: typer.Context,
    named: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL | TEXTS...", help="The model; or with --model the texts, as for --text."),
    ] = None,
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            parser=o.source_path,
            metavar="MODEL",
            help="A checkpoint or run, a Hugging Face or sentence-transformers folder, or USER/NAME of the hub: the "
            "texts are then named first.",
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Files of a text a line, tables with text, a folder or pattern of them, here or in a store, or a BEIR "
            "folder (repeatable)."
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Encode the training text of this run.")] = None,
    text_column: Annotated[str, typer.Option(help="Column or key with the text of a row of a table.")] = "text",
    out: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="Folder of the vectors, new or of earlier calls, here or in a store (s3://, gs://, az://).",
        ),
    ],
    role: Annotated[str, typer.Option(help="What the texts of a file are: document, query or text.")] = "document",
    encoder: EncoderOptions,
    vectors: VectorOptions,
    ranks: o.RankOptions,
    json: o.Json = False,
) -> None:
    """Encode texts into a store of vectors. What is there already is not encoded again.

    After an interruption give the same command again.
    """
    o.quiet(context)
    model, texts = _model_and_texts(named or [], model, text or [])
    if not texts and run is None:
        raise ConfigError("nothing to encode: give --text FILE or --run RUN")
    out = o.written_place(out)
    arguments = {
        "model": model, "text": [o.place(each) for each in texts], "run": run.absolute() if run else None,
        "column": text_column, "role": role, "encoder_options": encoder,
        "options": EncodeOptions(out, **vars(vectors)),
    }  # fmt: skip
    result = o.carry_out("capt.pretrain.retrieval.work:encode_all", o.shared_folder(out), ranks, arguments)
    if json:
        o.echo_json(result)
        return
    for each in result["sources"]:
        o.say(
            f"{each['source']} ({each['role']}): {each['texts']:,} texts, {each['encoded']:,} encoded now, "
            f"{each['dimension']} dimensions in {each['folder']}"
        )
    o.say(f"next: {_use_of(result['sources'], model, out, role, encoder, vectors.dtype)}")


def _use_of(
    sources: Sequence[Mapping[str, Any]], model: Path, out: str, role: str, encoder: EncoderOptions, dtype: str
) -> str:
    """The command that uses the vectors: a student's training, or of a collection and of coarse ones an evaluation."""
    collections = [each["source"] for each in sources if each["role"] != role]
    if not collections and role != "query" and dtype in ("fp32", "fp16"):
        first = sources[0]["source"]
        texts = first if len(sources) == 1 and not Path(first).is_dir() else "TEXTS"
        student = f"capt pretrain capt_distil model.init=STUDENT data.files={quoted(texts)}"
        return f"{student} distillation.vectors={quoted(sources[0]['folder'])}"
    # Vectors of other options are others, which would be encoded anew.
    options = {**asdict(encoder), "dtype": None if dtype == "fp32" else dtype}
    words = [
        word for name, each in options.items() if each is not None for word in (f"--{name.replace('_', '-')}", each)
    ]
    searched = collections[0] if collections else "FOLDER"
    return " ".join(map(quoted, ["capt", "evaluate", model, "--retrieval", searched, "--store", out, *words]))


def _model_and_texts(named: list[str], model: Path | None, text: list[str]) -> tuple[Path, list[str]]:
    """Return the model and the texts of a command that names either of them first."""
    if model is not None:
        return model, [*named, *text]
    if len(named) != 1:
        texts = f"{len(named)} names" if named else "no model"
        raise ConfigError(f"{texts}: give capt encode MODEL --text FILE, or capt encode TEXTS --model MODEL")
    return o.source_path(named[0]), text


def mine(
    context: typer.Context,
    *,
    pairs: Annotated[
        list[Path], typer.Option(help="jsonl, csv, tsv or parquet with queries and positives (may be repeated).")
    ],
    model: Annotated[
        Path, typer.Option(parser=o.source_path, metavar="MODEL", help="As for capt encode: what finds the negatives.")
    ],
    out: Annotated[Path, typer.Option(help="New folder for pairs.jsonl, audit.json and audit.html.")],
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="A folder of documents as for capt search build, a BEIR folder, a table with text, or a text a line; "
            "default the positives of all pairs."
        ),
    ] = None,
    rules: Rules,
    cross_encoder: Annotated[
        Path | None,
        typer.Option(
            parser=o.source_path,
            metavar="MODEL",
            help="Scores by a reranker, a run or a folder, for the rules and as labels.",
        ),
    ] = None,
    encoder: EncoderOptions,
    vectors: EncodeOptions,
    ranks: o.RankOptions,
    json: o.Json = False,
) -> None:
    """Mine hard negatives for pairs. The search is exact, filters follow, and an audit refuses bad output."""
    o.quiet(context)
    audit = mine_pairs(pairs, model, out, corpus, rules, cross_encoder, encoder, vectors, ranks)
    if json:
        o.echo_json(audit)
        return
    o.say(f"{out}: {audit['rows_written']:,} of {audit['rows_read']:,} rows; {out / 'audit.html'} shows examples")
    for name, removed in audit["removed"].items():
        o.say(f"  removed, {name}: {removed['count']:,} ({removed['share']:.1%})")
    if few := audit["rows_with_too_few_negatives"]:
        o.say(f"  rows with fewer than {rules.number} negatives: {few:,}")
    found = audit["negative_scores"]["count"]
    if rules.number and not found:
        o.say("  no document passed the rules as a negative; loosen them")

    # By the names that were written: a label or a score of the input would make two texts of a row, and no negatives.
    written = out / "pairs.jsonl"
    train = f"capt pretrain capt_pairs model.init=MODEL data.files={quoted(written)} data.form=flagembedding"
    o.say(f"next: {train}" + (f" data.negatives={rules.number}" if found else ""))
    if found:
        reranker = f"capt finetune rerank model.init=MODEL data.train={quoted(written)} data.form=flagembedding"
        o.say(f"  or a reranker: {reranker}")


def mine_pairs(
    pairs: Sequence[Path],
    model: Path,
    out: Path,
    corpus: Path | None,
    rules: Rules,
    cross_encoder: Path | None,
    encoder: EncoderOptions,
    vectors: EncodeOptions,
    ranks: o.RankOptions,
) -> dict[str, Any]:
    """Mine hard negatives on the ranks that are asked for, and return the audit; arguments are those of `mine`."""
    arguments = {
        "model": model, "pairs": [path.absolute() for path in pairs], "corpus": corpus.absolute() if corpus else None,
        "out": out.absolute(), "rules": rules, "cross_encoder": cross_encoder, "encoder_options": encoder,
        "options": o.with_place(vectors),
    }  # fmt: skip
    return o.carry_out("capt.pretrain.retrieval.mine:mine", out.absolute().parent, ranks, arguments)


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A file of capt evaluate --per-query, or FILE:SYSTEM.")],
    others: Annotated[
        list[str], typer.Argument(metavar="B...", help="The same of another model; of several, nDCG@10 in one table.")
    ],
    samples: Annotated[
        int, typer.Option(min=100, help="Sign flips that are drawn where 2^queries are too many.")
    ] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 1,
    json: o.Json = False,
) -> None:
    """Compare two models on the same queries.

    Prints the mean difference, its t interval, and the p of a sign-flip test.
    """
    from capt.pretrain.retrieval.compare import compare as compare_figures

    compared = {other: compare_figures(first, other, samples=samples, seed=seed) for other in others}
    if len(others) > 1:
        _show_several(first, compared, json=json)
        return
    rows = compared[others[0]]
    if json:
        o.echo_json(rows)
        return
    shown = None
    for row in rows:
        if row["set"] != shown:
            shown = row["set"]
            o.say(f"{shown}, {counted(row['queries'], 'query')}")
            if row["least_p"] > 0.05:
                o.say(f"  of so few queries no p is below {row['least_p']:g}, whatever the difference")
            o.say(f"  {'':<12}{'A':>9}{'B':>9}{'B - A':>9}  95% interval        p")
        o.say(
            f"  {row['metric']:<12}{row['first']:>9.4f}{row['second']:>9.4f}{row['difference']:>+9.4f}"
            f"  {_interval(row):<18}  {row['p']:.4f}"
        )


def _show_several(first: str, compared: Mapping[str, list[dict[str, Any]]], *, json: bool) -> None:
    """Show nDCG@10 of each model, and its difference from the first one."""
    if json:
        o.echo_json([{"system": other, **row} for other, rows in compared.items() for row in rows])
        return
    # FILE:SYSTEM by its system, FILE by its name.
    names = {each: Path(each).name.rpartition(".jsonl:")[2].removesuffix(".jsonl") for each in (first, *compared)}
    if len(set(names.values())) < len(names):
        names = {each: each for each in names}
    width = max(map(len, names.values())) + 2
    at_ten = {other: [row for row in rows if row["metric"] == "ndcg@10"] for other, rows in compared.items()}
    for of_set in zip(*at_ten.values(), strict=True):
        o.say(f"{of_set[0]['set']}, {counted(of_set[0]['queries'], 'query')}: ndcg@10, and less that of {names[first]}")
        o.say(f"  {'':<{width}}{'ndcg@10':>9}{'less':>9}  95% interval        p")
        o.say(f"  {names[first]:<{width}}{of_set[0]['first']:>9.4f}")
        for other, row in zip(compared, of_set, strict=True):
            figures = f"{row['second']:>9.4f}{row['difference']:>+9.4f}  {_interval(row):<18}  {row['p']:.4f}"
            o.say(f"  {names[other]:<{width}}{figures}")


def _interval(row: Mapping[str, Any]) -> str:
    return "none" if row["low"] is None else f"{row['low']:+.4f} to {row['high']:+.4f}"
