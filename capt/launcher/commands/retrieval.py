"""``capt encode``, ``capt mine``, ``capt compare``, and ``capt evaluate --retrieval``: work that ranks share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capt.launcher.commands import options as o
from capt.pretrain.base.errors import ConfigError, counted, quoted
from capt.pretrain.base.files import read_json, write_json
from capt.pretrain.base.stores import is_url
from capt.pretrain.retrieval.options import EncoderOptions, Rules

if TYPE_CHECKING:
    from capt.launcher.plan import Options

Store = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="Folder of the vectors, here or in a store (s3://, gs://, az://; read only: hf://, https://); default in "
        "this host's cache.",
    ),
]
_LAUNCHERS = ("local", "ssh", "srun")


@dataclass(frozen=True)
class VectorOptions:
    """Options of the vectors that are stored."""

    dtype: Annotated[
        str, typer.Option(help="What vectors are stored in: fp32, fp16, or (not to mine) int8 or binary.")
    ] = "fp32"
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a batch at most, with padding; default 2,048, on a GPU 65,536."),
    ] = None
    cache_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="What vectors of a store may take of this host's cache, as 200GB; default 100GB."
        ),
    ] = None

    def stored(self, store: str | None) -> dict[str, Any]:
        """Return the values of `capt.pretrain.retrieval.encode.EncodeOptions`. Raises ``ConfigError``."""
        size = o.number_of_bytes(self.cache_bytes, "--cache-bytes") if self.cache_bytes else None
        return {**asdict(self), "store": o.place(store) if store else None, "cache_bytes": size}


@dataclass(frozen=True)
class RankOptions:
    """Options of work that ranks share."""

    nproc: o.Nproc = None
    hostfile: o.Hostfile = None
    launcher: Annotated[
        str | None, typer.Option(help=f"{', '.join(_LAUNCHERS)} (default: local; ssh with --hostfile).")
    ] = None


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
    ranks: RankOptions,
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
    work = {
        "command": "encode", "model": str(model), "text": [o.place(each) for each in texts],
        "run": str(run.absolute()) if run else None, "column": text_column, "role": role,
        "encoder": asdict(encoder), "store": vectors.stored(out),
    }  # fmt: skip
    result = carry_out(work, shared_folder(out), ranks)
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
    store: Store = None,
    vectors: VectorOptions,
    ranks: RankOptions,
    json: o.Json = False,
) -> None:
    """Mine hard negatives for pairs. The search is exact, filters follow, and an audit refuses bad output."""
    o.quiet(context)
    audit = mine_pairs(pairs, model, out, corpus, rules, cross_encoder, encoder, store, vectors, ranks)
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
    store: str | None,
    vectors: VectorOptions,
    ranks: RankOptions,
) -> dict[str, Any]:
    """Mine hard negatives on the ranks that are asked for, and return the audit; arguments are those of `mine`."""
    work = {
        "command": "mine", "model": str(model),
        "pairs": _paths(pairs), "corpus": _paths([corpus])[0] if corpus else None,
        "out": _paths([out])[0], "rules": asdict(rules), "cross_encoder": str(cross_encoder) if cross_encoder else None,
        "encoder": asdict(encoder), "store": vectors.stored(store),
    }  # fmt: skip
    return carry_out(work, out.absolute().parent, ranks)


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


def shared_folder(store: str) -> Path:
    """Return the folder in which ranks are given work: that of the vectors, or of a store the working folder."""
    return Path.cwd() if is_url(store) else Path(store)


def _paths(paths: Sequence[Path]) -> list[str]:
    """Absolute paths: ranks on other hosts may have another working folder."""
    return [str(path.absolute()) for path in paths]


def carry_out(work: Mapping[str, Any], folder: Path, ranks: RankOptions, what: str = "encoding") -> dict[str, Any]:
    """Return ``capt.pretrain.retrieval.work.perform(work)``, done in this process or on the ranks that are asked for.

    Ranks read what to do from a file in ``folder``, which all hosts must see, and rank 0 writes the result beside it.
    ``what`` is written before the bar of this process.

    Raises:
        UserError: as the command; or the options are wrong. `typer.Exit` with the code of the ranks where these failed.
    """
    from capt.launcher.plan import Options

    options = Options.given(**vars(ranks))
    if options == Options():
        from capt.pretrain.retrieval.work import perform

        with o.progress_bar(what, lines=False) as progress:
            return perform(work, progress)
    return _on_ranks(work, folder.absolute(), options)


def _on_ranks(work: Mapping[str, Any], folder: Path, options: Options) -> dict[str, Any]:
    from capt.launcher.backends import backend
    from capt.launcher.plan import Launch
    from capt.launcher.preflight.run import before_launch
    from capt.pretrain.config.schema import Job

    name = options.launcher or ("ssh" if options.hostfile else "local")
    if name not in _LAUNCHERS:
        raise ConfigError(f"--launcher {name}: such work is started by {', '.join(_LAUNCHERS)}")
    task = folder / f".work-{secrets.token_hex(8)}.json"
    # Launchers start jobs: this one brings them the folder, and a batch of one row for each rank.
    job = Job.model_validate(
        {
            "task": {"type": "retrieval"}, "run": {"dir": str(folder)},
            "supervise": {"restarts": 0, "stall": None}, "batch": {"global": 1, "micro": 1},
        }
    )  # fmt: skip
    launch = Launch("capt.pretrain.retrieval", (str(task),), job, options.model_copy(update={"launcher": name}))
    chosen = backend(name)
    plan = chosen.plan(launch)
    if plan.blocked_reason:
        raise ConfigError(plan.blocked_reason)
    job = job.model_copy(update={"batch": job.batch.model_copy(update={"global_": plan.world})})
    launch = replace(launch, job=job)
    before_launch(launch, plan, switch="")
    result = task.with_suffix(".out")
    try:
        write_json(task, dict(work), private=True)
        end = chosen.start(launch, plan)
        if end.code:
            raise typer.Exit(end.code)
        found: dict[str, Any] = read_json(result)
        return found
    finally:
        for path in (task, result):
            with suppress(OSError):
                path.unlink(missing_ok=True)
