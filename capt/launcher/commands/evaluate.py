"""``capt evaluate``: hands a checkpoint to the ``evaluate`` module of its task."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from capt.launcher.commands import options as o
from capt.launcher.commands import retrieval as r


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="\b\nExample: capt evaluate runs/first --text held_out.txt --sts STS-B --out evaluation.json")(
        evaluate
    )


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            parser=o.source_path,
            help="A checkpoint, a run (its best checkpoint, else its newest), a Hugging Face folder, USER/NAME of the "
            "hub, or a file of word vectors.",
        ),
    ],
    text: Annotated[list[Path] | None, typer.Option(help="Held-out text (may be repeated).")] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="The data folder of a GLUE or latent checkpoint, if it has moved; another file of labelled texts for "
            "one of your own labels; the files of any split for a visual one, held-out pairs for one of pairs (may be "
            "repeated)."
        ),
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Result file of a visual checkpoint, in the benchmark's own format.")
    ] = None,
    sts: Annotated[Path | None, typer.Option(help="A folder with STS sets.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the result to as well.")] = None,
    pooler: Annotated[
        list[str] | None,
        typer.Option("--pooler", "--pooling", help="cls, mean or head (may be repeated); default all."),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Largest number of windows per text; default 512.")] = None,
    length: Annotated[int | None, typer.Option(min=8, help="Tokens per window; default as in training.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows or sentences per forward pass; default 32.")] = None,
    split: Annotated[
        str | None, typer.Option(help="The split for a latent checkpoint: train, validation or test (default).")
    ] = None,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Draws from each posterior of a latent checkpoint; default 128.")
    ] = None,
    weighted: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Draws of each proposal for importance-weighted bounds of a latent checkpoint; default 100, 0 = none.",
        ),
    ] = None,
    weighted_sentences: Annotated[
        int | None,
        typer.Option(min=1, help="About how many sentences for these bounds, in whole batches; default all."),
    ] = None,
    bridge: Annotated[
        int | None,
        typer.Option(
            min=0, help="Sentences whose bound is checked by annealed importance sampling; default 0, 20 take minutes."
        ),
    ] = None,
    generated: Annotated[
        str | None,
        typer.Option(
            help="Forward and reverse PPL of generated text: builtin (default for the test text), kenlm or none.",
        ),
    ] = None,
    word_similarity: Annotated[
        Path | None, typer.Option(help="A file of scored word pairs, or a folder of them, for word vectors.")
    ] = None,
    analogies: Annotated[
        Path | None, typer.Option(help="Analogies for word vectors, in the form of questions-words.txt.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed for the choice of windows and the corruption; default 1.")
    ] = None,
    before: Annotated[
        bool | None,
        typer.Option("--before", help="The model.init of the run as well, and what has changed."),
    ] = None,
    retrieval: Annotated[
        list[Path] | None,
        typer.Option(
            help="A BEIR folder, a folder of NanoBEIR's parquet files, or a file of pairs (may be repeated): measure "
            "retrieval instead. The model may be a sentence-transformers folder as well."
        ),
    ] = None,
    mteb: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK", help="A task of the package mteb, which brings its data (may be repeated)."),
    ] = None,
    dims: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Also by the first N numbers of each vector. (--retrieval)")
    ] = None,
    bm25: Annotated[bool, typer.Option("--bm25", help="BM25 beside the model. (--retrieval)")] = False,
    per_query: Annotated[
        Path | None, typer.Option(help="JSON lines with the figures of each query, for capt compare. (--retrieval)")
    ] = None,
    query_prompt: r.QueryPrompt = None,
    document_prompt: r.DocumentPrompt = None,
    store: r.Store = None,
    dtype: r.DType = "fp32",
    tokens: r.Tokens = None,
    cache_bytes: r.CacheBytes = None,
    nproc: o.Nproc = None,
    hostfile: o.Hostfile = None,
    launcher: r.Launcher = None,
    option: o.OwnOptions = None,
    json: o.Json = False,
) -> None:
    """Measure a checkpoint of any task. An encoder: text, similarity, retrieval; others: their own tasks.

    Which options have a meaning depends on the task that the checkpoint was trained on.
    """
    o.quiet(context)
    _refuse_overwriting(
        (predictions, out, per_query), (*(text or ()), *(data or ()), *(retrieval or ()), word_similarity, analogies)
    )
    given = {
        "text": text, "data": data, "predictions": predictions, "sts": sts, "out": out, "pooler": pooler,
        "samples": samples, "length": length, "batch": batch, "split": split, "draws": draws, "weighted": weighted,
        "weighted_sentences": weighted_sentences, "bridge": bridge, "generated": generated, "seed": seed,
        "word_similarity": word_similarity, "analogies": analogies, "before": before,
    }  # fmt: skip
    ranks = {"nproc": nproc, "hostfile": hostfile, "launcher": launcher}
    of_retrieval = {
        "dims": dims, "bm25": bm25 or None, "per_query": per_query, "query_prompt": query_prompt,
        "document_prompt": document_prompt, "store": store, "cache_bytes": cache_bytes, **ranks,
    }  # fmt: skip
    if mteb:
        if retrieval:
            from capt.pretrain.base.errors import ConfigError

            raise ConfigError("--retrieval and --mteb: give one of them")
        _refuse_options({**given, **of_retrieval}, ("out", "pooler", "length", "query_prompt", "document_prompt"),
                        "with --mteb")  # fmt: skip
        encoder = r.encoder_options(_one(pooler, "--mteb"), length, query_prompt, document_prompt)
        _evaluate_mteb(checkpoint, mteb, encoder, out, json)
        return
    if retrieval:
        _refuse_options(given, ("out", "pooler", "length", "split"), "with --retrieval")
        settings = {
            "dims": _dims(dims), "bm25": bm25, "split": split, "per_query": per_query and str(per_query.absolute())
        }  # fmt: skip
        _evaluate_retrieval(checkpoint, retrieval, settings, pooler, length, out, query_prompt, document_prompt,
                            r.store_options(store, dtype, tokens, cache_bytes), ranks, json)  # fmt: skip
        return
    _refuse_options(of_retrieval, (), "without --retrieval")
    from capt.pretrain.base.files import require_writable
    from capt.pretrain.commands import accepted_options, command_module
    from capt.pretrain.models.hf_config import local_folder

    checkpoint = local_folder(checkpoint)
    task = _task_of(checkpoint)
    module = command_module(checkpoint, task, "evaluate")
    chosen = accepted_options(module.command, task, given, option or ())
    if out is not None:
        require_writable(out)
    with o.progress_bar("measuring") as progress:
        if "progress" in inspect.signature(module.command).parameters:
            chosen["progress"] = progress
        result = module.command(checkpoint, **chosen)
    if json:
        o.echo_json(result)
    else:
        o.say(module.as_text(result))


def _refuse_options(given: Mapping[str, object], allowed: Iterable[str], where: str) -> None:
    from capt.pretrain.base.errors import ConfigError

    wrong = [name for name, value in given.items() if value not in (None, []) and name not in allowed]
    if wrong:
        raise ConfigError(f"--{wrong[0].replace('_', '-')} has no meaning {where}")


def _dims(text: str | None) -> list[int]:
    from capt.pretrain.base.errors import ConfigError

    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 1 << 20 for word in words):
        raise ConfigError(f"--dims {text}: whole numbers separated by commas are expected, such as 256,64")
    return list(dict.fromkeys(map(int, words)))


def _one(pooler: list[str] | None, option: str) -> str | None:
    from capt.pretrain.base.errors import ConfigError

    if pooler and len(pooler) > 1:
        raise ConfigError(f"--pooler may be given once with {option}")
    return pooler[0] if pooler else None


def _evaluate_mteb(model: Path, tasks: list[str], encoder: dict[str, Any], out: Path | None, json: bool) -> None:
    from capt.pretrain.base.files import require_writable
    from capt.pretrain.retrieval.encoders import EncoderOptions
    from capt.pretrain.retrieval.mteb_tasks import as_text, evaluate_mteb

    if out is not None:
        require_writable(out)
    result = evaluate_mteb(model, tasks, EncoderOptions(**encoder), out=out)
    if json:
        o.echo_json(result)
    else:
        o.say(as_text(result))


def _evaluate_retrieval(
    model: Path,
    sets: list[Path],
    settings: dict[str, Any],
    pooler: list[str] | None,
    length: int | None,
    out: Path | None,
    query_prompt: str | None,
    document_prompt: str | None,
    store: dict[str, Any],
    ranks: dict[str, Any],
    json: bool,
) -> None:
    from capt.pretrain.base.cache import default_cache
    from capt.pretrain.base.files import require_writable

    for path in (out, settings["per_query"]):
        if path is not None:
            require_writable(Path(path))
    work = {
        "command": "evaluate", "model": str(model),
        "sets": [str(path.absolute()) for path in sets], "settings": settings,
        "encoder": r.encoder_options(_one(pooler, "--retrieval"), length, query_prompt, document_prompt),
        "store": store, "out": str(out.absolute()) if out else None,
    }  # fmt: skip
    result = r.carry_out(work, r.shared_folder(store["store"] or str(default_cache() / "vectors")), **ranks)
    if json:
        o.echo_json(result)
        return
    from capt.pretrain.retrieval.evaluate import as_text

    o.say(as_text(result))


def _refuse_overwriting(outputs: Iterable[Path | None], inputs: Iterable[Path | None]) -> None:
    """Refuse to write what is measured into the file that it is measured on."""
    from capt.pretrain.base.errors import ConfigError

    read = [path for path in inputs if path is not None and path.exists()]
    for out in outputs:
        if out is not None and out.exists() and any(out.samefile(path) for path in read):
            raise ConfigError(f"{out} is read, and would be overwritten: name another file to write")


def _task_of(path: Path) -> str:
    from capt.pretrain.commands import task_of
    from capt.pretrain.models.hf_folder import is_hf
    from capt.pretrain.registry import FOREIGN_TASK

    return FOREIGN_TASK if is_hf(path) else task_of(path)
