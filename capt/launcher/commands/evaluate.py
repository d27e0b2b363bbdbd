"""``capt evaluate``: one verb for every evaluation; each declares its options, and refuses those of the others.

The options of a task's evaluation are the fields of ``EvaluateOptions`` in the module ``options`` of its package, where
it has one, beside those that tasks share (`TaskOptions`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from capt.launcher.commands import options as o
from capt.launcher.commands.retrieval import RankOptions, Store, VectorOptions, carry_out, shared_folder
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import require_writable
from capt.pretrain.registry import FOREIGN_TASK, TASKS, task_module
from capt.pretrain.retrieval.options import DocumentPrompt, EncoderOptions, QueryPrompt

Result = tuple[Any, Callable[[Any], str]]
"""The measurements, and the function that writes them for people."""


@dataclass(frozen=True)
class TaskOptions:
    """Options that the evaluations of several tasks take."""

    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="The data folder of a GLUE or latent checkpoint, if it has moved; another file of labelled texts for "
            "one of your own labels; the files of any split for a visual one, held-out pairs for one of pairs (may be "
            "repeated)."
        ),
    ] = None
    out: Annotated[Path | None, typer.Option(help="JSON file to write the result to as well.")] = None
    pooler: Annotated[
        list[str] | None,
        typer.Option("--pooler", "--pooling", help="cls, mean or head (may be repeated); default all."),
    ] = None
    samples: Annotated[int | None, typer.Option(min=1, help="Largest number of windows per text; default 512.")] = None
    length: Annotated[int | None, typer.Option(min=8, help="Tokens per window; default as in training.")] = None
    batch: Annotated[int | None, typer.Option(min=1, help="Windows or sentences per forward pass; default 32.")] = None
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed for the choice of windows and the corruption; default 1.")
    ] = None


@dataclass(frozen=True)
class RetrievalOptions:
    """Options of ``--retrieval``, beside those of vectors and ranks."""

    retrieval: Annotated[
        list[Path] | None,
        typer.Option(
            help="A BEIR folder, a folder of NanoBEIR's parquet files, or a file of pairs (may be repeated): measure "
            "retrieval instead. The model may be a sentence-transformers folder as well."
        ),
    ] = None
    dims: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Also by the first N numbers of each vector. (--retrieval)")
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="What vectors are compared in: float, int8, binary. (--retrieval)"),
    ] = None
    rescore: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="Also score this many times the usual number of int8's and binary's first documents again, by queries "
            "in float. (--retrieval)",
        ),
    ] = None
    bm25: Annotated[bool, typer.Option("--bm25", help="BM25 beside the model. (--retrieval)")] = False
    fusion: Annotated[
        bool,
        typer.Option("--fusion", help="BM25, and both fused by reciprocal ranks, with the difference. (--retrieval)"),
    ] = False
    per_query: Annotated[
        Path | None,
        typer.Option(help="JSON lines with the figures of each query, for capt compare. (--retrieval, --rerank)"),
    ] = None
    documents_by: Annotated[
        Path | None,
        typer.Option(
            parser=o.source_path,
            metavar="MODEL",
            help="Another model for the documents, as a teacher whose vectors the model has learnt. (--retrieval)",
        ),
    ] = None
    query_prompt: QueryPrompt = None
    document_prompt: DocumentPrompt = None
    store: Store = None


@dataclass(frozen=True)
class RerankOptions:
    """Options of ``--rerank``, beside those of vectors and ranks."""

    rerank: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="SET",
            help="The same data (may be repeated): measure a reranker, a run or a folder with one score for a pair of "
            "texts, on the candidates of a first stage.",
        ),
    ] = None
    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="The first stage: bm25 (default), a run file in TREC's form, or an encoder as for capt encode. "
            "(--rerank)",
        ),
    ] = None
    depth: Annotated[
        int | None, typer.Option(min=1, help="Candidates of a query that are scored; default 100. (--rerank)")
    ] = None


@dataclass(frozen=True)
class MtebOptions:
    """Options of ``--mteb``."""

    mteb: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK", help="A task of the package mteb, which brings its data (may be repeated)."),
    ] = None


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that an option chooses in the place of that of the checkpoint's task.

    Attributes:
        chosen_by: the option.
        measure: measures a model with the options that were given.
        options: the classes of its options.
        shared: further options that it takes.
    """

    chosen_by: str
    measure: Callable[[Path, Mapping[str, Any]], Result]
    options: tuple[type, ...]
    shared: tuple[str, ...]

    @property
    def names(self) -> set[str]:
        """The names of all options that it takes."""
        return {each.name for kind in self.options for each in fields(kind)} | set(self.shared)


def _retrieval(model: Path, given: Mapping[str, Any]) -> Result:
    per_query, out = given.get("per_query"), given.get("out")
    store = o.chosen(VectorOptions, given).stored(given.get("store"))
    work = {
        "command": "evaluate", "model": str(model),
        "sets": [str(path.absolute()) for path in given["retrieval"]],
        "settings": {
            "dims": _dims(given.get("dims")), "precisions": _names(given.get("precision")),
            "rescore": given.get("rescore", 0), "bm25": given.get("bm25", False), "fusion": given.get("fusion", False),
            "split": given.get("split"),
            "documents_by": str(given["documents_by"]) if "documents_by" in given else None,
            "per_query": str(per_query.absolute()) if per_query else None,
        },
        "encoder": asdict(_encoder(given, "--retrieval")), "store": store, "out": str(out.absolute()) if out else None,
    }  # fmt: skip
    return carry_out(work, _folder_of(store), o.chosen(RankOptions, given)), _as_text


def _rerank(model: Path, given: Mapping[str, Any]) -> Result:
    per_query, out = given.get("per_query"), given.get("out")
    store = o.chosen(VectorOptions, given).stored(given.get("store"))
    candidates = given.get("candidates", "bm25")
    work = {
        "command": "rerank", "model": str(model), "sets": [str(path.absolute()) for path in given["rerank"]],
        "settings": {
            "candidates": candidates if candidates == "bm25" else _source(candidates),
            "depth": given.get("depth", 100), "split": given.get("split"),
            "per_query": str(per_query.absolute()) if per_query else None,
        },
        "store": store, "out": str(out.absolute()) if out else None,
    }  # fmt: skip
    return carry_out(work, _folder_of(store), o.chosen(RankOptions, given), what="scoring"), _as_text


def _source(given: str) -> str:
    """A file as an absolute path, for ranks on other hosts, and what is no file as a model is named."""
    return str(Path(given).absolute()) if Path(given).is_file() else str(o.source_path(given))


def _folder_of(store: Mapping[str, Any]) -> Path:
    from capt.pretrain.base.cache import default_cache

    return shared_folder(store["store"] or str(default_cache() / "vectors"))


def _as_text(result: Any) -> str:
    from capt.pretrain.retrieval.results import as_text  # imports torch, which JSON does not need here

    return as_text(result)


def _mteb(model: Path, given: Mapping[str, Any]) -> Result:
    from capt.pretrain.retrieval.mteb_tasks import as_text, evaluate_mteb

    return evaluate_mteb(model, given["mteb"], _encoder(given, "--mteb"), out=given.get("out")), as_text


EVALUATIONS = (
    Evaluation(
        "retrieval", _retrieval, (RetrievalOptions, VectorOptions, RankOptions), ("out", "pooler", "length", "split")
    ),
    Evaluation("rerank", _rerank, (RerankOptions, VectorOptions, RankOptions), ("out", "split", "per_query", "store")),
    Evaluation("mteb", _mteb, (MtebOptions,), ("out", "pooler", "length", "query_prompt", "document_prompt")),
)


def evaluate_options() -> tuple[Any, list[str]]:
    """Return a class with the options of all evaluations, and the names of those of tasks."""
    modules = [task_module(task, "options") for task in TASKS]
    kinds = [TaskOptions, *(module.EvaluateOptions for module in modules if module is not None)]
    of_tasks = [each.name for kind in kinds for each in fields(kind)]
    kinds += dict.fromkeys(kind for each in EVALUATIONS for kind in each.options)
    return o.one_class("capt evaluate", kinds), of_tasks


def measure_model(
    checkpoint: Path, given: Mapping[str, Any], of_tasks: Sequence[str], assignments: Sequence[str] = ()
) -> Result:
    """Measure a model with the options that were given: by its task, or as one of them chooses.

    Args:
        checkpoint: a checkpoint, a run, a folder or a hub id.
        given: options and their values.
        of_tasks: the names of options of tasks.
        assignments: options of the checkpoint's task, ``NAME=VALUE`` each.

    Raises:
        UserError: an option has no meaning, or as the evaluation.
    """
    _refuse_overwriting(given)
    chosen = _chosen({**given, **({"option": assignments} if assignments else {})}, of_tasks)
    for path in filter(None, map(given.get, ("out", "per_query"))):
        require_writable(path)
    if chosen is not None:
        return chosen.measure(checkpoint, given)
    return _of_task(checkpoint, {name: given.get(name) for name in of_tasks}, assignments)


def register(app: typer.Typer) -> None:
    """Add the command, with the options of all evaluations, to the command line."""
    every: Any
    every, of_tasks = evaluate_options()

    def evaluate(
        context: typer.Context,
        checkpoint: Annotated[
            Path,
            typer.Argument(
                metavar="CHECKPOINT",
                parser=o.source_path,
                help="A checkpoint, a run (its best checkpoint, else its newest), a Hugging Face folder, USER/NAME of "
                "the hub, or a file of word vectors.",
            ),
        ],
        *,
        options: every,
        option: o.OwnOptions = None,
        json: o.Json = False,
    ) -> None:
        """Measure a checkpoint of any task. An encoder: text, similarity, retrieval; others: their own tasks.

        Which options have a meaning depends on the task that the checkpoint was trained on.
        """
        o.quiet(context)
        given = {name: value for name, value in vars(options).items() if value not in (None, [], getattr(every, name))}
        result, as_text = measure_model(checkpoint, given, of_tasks, option or ())
        o.answer(result, lambda: as_text(result), json=json)

    evaluate.__annotations__["options"] = every  # a name of this function alone, which typer would look up
    app.command(epilog="\b\nExample: capt evaluate runs/first --text held_out.txt --sts STS-B --out evaluation.json")(
        evaluate
    )


def _chosen(given: Mapping[str, Any], of_tasks: Iterable[str]) -> Evaluation | None:
    """Return the evaluation that the options choose; None is that of the task. Others' options are refused."""
    from capt.pretrain.commands import flag

    chosen = [each for each in EVALUATIONS if each.chosen_by in given]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(flag(each.chosen_by) for each in chosen)}: give one of them")
    takes = chosen[0].names if chosen else {*of_tasks, "option"}
    for name in given:
        if name not in takes:
            chooses = chosen[0].chosen_by if chosen else next(e.chosen_by for e in EVALUATIONS if name in e.names)
            raise ConfigError(f"{flag(name)} has no meaning {'with' if chosen else 'without'} {flag(chooses)}")
    return chosen[0] if chosen else None


def _of_task(checkpoint: Path, options: Mapping[str, Any], assignments: Sequence[str]) -> Result:
    from capt.pretrain.commands import accepted_options, command_module, task_of
    from capt.pretrain.models.hf_config import local_folder
    from capt.pretrain.models.hf_folder import is_hf

    checkpoint = local_folder(checkpoint)
    task = FOREIGN_TASK if is_hf(checkpoint) else task_of(checkpoint)
    module = command_module(checkpoint, task, "evaluate")
    accepted = accepted_options(module.command, task, options, assignments)
    with o.progress_bar("measuring") as progress:
        if "progress" in inspect.signature(module.command).parameters:
            accepted["progress"] = progress
        return module.command(checkpoint, **accepted), module.as_text


def _dims(text: str | None) -> list[int]:
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 1 << 20 for word in words):
        raise ConfigError(f"--dims {text}: whole numbers separated by commas are expected, such as 256,64")
    return list(dict.fromkeys(map(int, words)))


def _names(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",")] if text else []


def _encoder(given: Mapping[str, Any], option: str) -> EncoderOptions:
    poolers = given.get("pooler", [])
    if len(poolers) > 1:
        raise ConfigError(f"--pooler may be given once with {option}")
    return o.chosen(EncoderOptions, {**given, "pooling": next(iter(poolers), None)})


def _refuse_overwriting(given: Mapping[str, Any]) -> None:
    """Refuse to write what is measured into the file that it is measured on."""
    written = ("predictions", "out", "per_query")
    outputs = [given[name] for name in written if name in given]
    inputs = (value if isinstance(value, list) else [value] for name, value in given.items() if name not in written)
    read = [path for path in chain.from_iterable(inputs) if isinstance(path, Path) and path.exists()]
    for out in outputs:
        if out.exists() and any(out.samefile(path) for path in read):
            raise ConfigError(f"{out} is read, and would be overwritten: name another file to write")
