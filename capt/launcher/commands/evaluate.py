"""``capt evaluate``: one verb for every evaluation; each declares its options, and refuses those of the others.

The options of a task's evaluation are the fields of ``EvaluateOptions`` in the module ``options`` of its package, where
it has one, beside those that tasks share (`TaskOptions`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from capt.launcher.commands import options as o
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import require_writable
from capt.pretrain.registry import FOREIGN_TASK, TASKS, task_module
from capt.pretrain.retrieval.options import (
    DocumentPrompt,
    EncodeOptions,
    EncoderOptions,
    QueryPrompt,
    RerankSettings,
    RetrievalSettings,
    default_store,
)

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
class RetrievalSets:
    """The option ``--retrieval``."""

    retrieval: Annotated[
        list[Path] | None,
        typer.Option(
            help="A BEIR folder, a folder of NanoBEIR's parquet files, or a file of pairs (may be repeated): measure "
            "retrieval instead. The model may be a sentence-transformers folder as well."
        ),
    ] = None


@dataclass(frozen=True)
class RetrievalOptions:
    """Options of ``--retrieval`` beside its settings."""

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


@dataclass(frozen=True)
class RerankSets:
    """The option ``--rerank``."""

    rerank: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="SET",
            help="The same data (may be repeated): measure a reranker, a run or a folder with one score for a pair of "
            "texts, on the candidates of a first stage.",
        ),
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
    chosen = {
        "encoder_options": _encoder(given, "--retrieval"), "settings": o.chosen(RetrievalSettings, given),
        "documents_by": given.get("documents_by"),
    }  # fmt: skip
    return _by_ranks("capt.pretrain.retrieval.evaluate:evaluate", model, given["retrieval"], given, chosen)


def _rerank(model: Path, given: Mapping[str, Any]) -> Result:
    settings = o.chosen(RerankSettings, given)
    if settings.candidates not in (None, "bm25"):
        settings = replace(settings, candidates=_source(settings.candidates))
    call = "capt.pretrain.retrieval.rerank_evaluate:evaluate_reranker"
    return _by_ranks(call, model, given["rerank"], given, {"settings": settings}, "scoring")


def _by_ranks(
    call: str,
    model: Path,
    sets: Sequence[Path],
    given: Mapping[str, Any],
    chosen: Mapping[str, Any],
    what: str = "encoding",
) -> Result:
    options = o.with_place(o.chosen(EncodeOptions, given))
    # Ranks on other hosts may have another working folder.
    files = {name: given[name].absolute() for name in ("per_query", "out") if name in given}
    arguments = {
        "model": model, "sets": [path.absolute() for path in sets], "options": options, "split": given.get("split"),
        **files, **chosen,
    }  # fmt: skip
    folder = o.shared_folder(options.store or str(default_store()))
    return o.carry_out(call, folder, o.chosen(o.RankOptions, given), arguments, what), _as_text


def _source(given: str) -> str:
    """A file as an absolute path, for ranks on other hosts, and what is no file as a model is named."""
    return str(Path(given).absolute()) if Path(given).is_file() else str(o.source_path(given))


def _as_text(result: Any) -> str:
    from capt.pretrain.retrieval.results import as_text  # imports torch, which JSON does not need here

    return as_text(result)


def _mteb(model: Path, given: Mapping[str, Any]) -> Result:
    from capt.pretrain.retrieval.mteb_tasks import as_text, evaluate_mteb

    return evaluate_mteb(model, given["mteb"], _encoder(given, "--mteb"), out=given.get("out")), as_text


EVALUATIONS = (
    Evaluation(
        "retrieval", _retrieval, (RetrievalSets, RetrievalSettings, RetrievalOptions, EncodeOptions, o.RankOptions),
        ("out", "pooler", "length", "split"),
    ),
    Evaluation(
        "rerank", _rerank, (RerankSets, RerankSettings, EncodeOptions, o.RankOptions), ("out", "split", "per_query"),
    ),
    Evaluation("mteb", _mteb, (MtebOptions,), ("out", "pooler", "length", "query_prompt", "document_prompt")),
)  # fmt: skip


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
