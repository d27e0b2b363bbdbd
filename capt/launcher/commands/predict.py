"""``capt predict``: what a trained model says of new rows.

The options of a task are the fields of ``PredictOptions`` in the module ``options`` of its package, beside those that
tasks share (`SharedOptions`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from capt.launcher.commands import options as o
from capt.pretrain.base.files import require_writable
from capt.pretrain.registry import TASKS, task_module


@dataclass(frozen=True)
class SharedOptions:
    """Options that the predictions of several tasks take."""

    text: Annotated[
        str | None, typer.Option(help="Column of the text; default as in the training data, or a usual name.")
    ] = None
    second: Annotated[str | None, typer.Option(help="Column of the second text of a pair.")] = None
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a forward pass; default 32.")] = None


def register(app: typer.Typer) -> None:
    """Add the command, with the options of all tasks, to the command line."""
    modules = [task_module(task, "options") for task in TASKS]
    kinds = [
        SharedOptions,
        *(module.PredictOptions for module in modules if module and hasattr(module, "PredictOptions")),
    ]
    every: Any = o.one_class("capt predict", kinds)

    def predict(
        context: typer.Context,
        model: Annotated[
            Path,
            typer.Argument(
                metavar="MODEL",
                parser=o.source_path,
                help="A run that was fine-tuned (its best checkpoint), a checkpoint, or a Hugging Face folder or "
                "USER/NAME with a sequence classifier.",
            ),
        ],
        file: Annotated[
            Path,
            typer.Argument(
                metavar="FILE", help="A table of texts or pairs of texts; for pictures a file of questions."
            ),
        ],
        *,
        out: Annotated[Path, typer.Option(help="The table to write: .csv, .jsonl or .parquet.")],
        options: every,
        ranks: o.RankOptions,
        json: o.Json = False,
    ) -> None:
        """Predict labels, scores or answers for new rows.

        After an interruption give the same command again.
        """
        o.quiet(context)
        require_writable(out)
        given = {each.name: getattr(options, each.name) for each in fields(every)}
        arguments = {
            "model": model, "file": file.absolute(), "out": out.absolute(),
            "options": {name: str(each.absolute()) if isinstance(each, Path) else each for name, each in given.items()},
        }  # fmt: skip
        call = "capt.pretrain.retrieval.work:predict_rows"
        result = o.carry_out(call, out.absolute().parent, ranks, arguments, "predicting")
        o.answer(result, lambda: counts_of_classes(result), json=json)

    predict.__annotations__["options"] = every  # a name of this function alone, which typer would look up
    app.command(epilog="\b\nExample: capt predict runs/mine new.csv --out predictions.csv")(predict)


def counts_of_classes(result: dict[str, Any]) -> str:
    """Return the result for people."""
    counts = ", ".join(f"{name}: {count:,}" for name, count in sorted(result["counts"].items())[:20])
    return f"{result['out']}: {result['rows']:,} rows" + (f" ({counts})" if counts else "")
