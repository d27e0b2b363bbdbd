"""``capt predictions``: result files of VQA, GQA and NLVR, checked as the benchmarks would."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.commands import options as o

app = typer.Typer(help="Check result files of VQA, GQA and NLVR.", rich_markup_mode=None)


@app.callback()
def _group() -> None: ...


@app.command(epilog="\b\nExample: capt predictions check answers.json --data questions.json --data annotations.json")
def check(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A result file in the benchmark's format.")],
    data: Annotated[
        list[Path], typer.Option(help="The questions it answers (several times: VQA's questions and annotations).")
    ],
    json: o.Json = False,
) -> None:
    """Check that a result file answers each question of a split once, and score it if the split has answers.

    The exit code is 2 when anything is wrong.
    """
    from finetune.visual.check import check_predictions
    from pretrain.base.errors import DataError

    checked = check_predictions(path, data)
    if checked.problems:
        raise DataError(f"{path}: {'; '.join(checked.problems)}")
    if json:
        o.echo_json({"task": checked.task, "questions": checked.questions, **checked.scores})
        return
    typer.echo(f"{path}: {checked.questions:,} predictions, as {checked.task} expects them")
    for name, value in checked.scores.items():
        typer.echo(f"  {name:<20}{value:8.2%}")
