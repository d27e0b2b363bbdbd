"""``capt predictions``: result files of VQA, GQA and NLVR, checked as the benchmarks would."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capt.launcher.commands import options as o

app = typer.Typer(help="Check result files of VQA, GQA and NLVR.", rich_markup_mode=None)


@app.callback()
def _group() -> None: ...


@app.command(epilog="\b\nExample: capt predictions check answers.json --data questions.json --data annotations.json")
def check(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A result file in the benchmark's format.")],
    data: Annotated[
        list[Path],
        typer.Option(help="The questions it answers (several times: VQA's annotations, GQA's choices as well)."),
    ],
    json: o.Json = False,
) -> None:
    """Check that a result file answers each question of a split once, and score it if the split has answers.

    The figures are those of the official evaluator; of one that is missing, the reason is said.

    The exit code is 2 when anything is wrong.
    """
    from capt.finetune.visual.dumps import check_predictions
    from capt.pretrain.base.errors import DataError

    checked = check_predictions(path, data)
    if checked.problems:
        raise DataError(f"{path}: {'; '.join(checked.problems)}")
    if json:
        counts = {name: getattr(checked, name) for name in ("task", "questions", "predictions", "unasked")}
        figures = checked.figures
        o.echo_json({**counts, **figures.scores, "missing": figures.missing, "details": figures.details})
        return
    asked = "" if checked.predictions == checked.questions else f" of {checked.questions:,} questions"
    typer.echo(f"{path}: {checked.predictions:,} predictions{asked}, as {checked.task} expects them")
    if checked.unasked:
        typer.echo(f"  {checked.unasked:,} more answer questions that were not asked, and do not count")
    for name, value in checked.scores.items():
        typer.echo(f"  {name:<20}{f'{value:8.4f} (lower is better)' if name == 'distribution' else f'{value:8.2%}'}")
    for name, reason in checked.figures.missing.items():
        typer.echo(f"  {name:<20}       - ({reason})")
    for what, groups in checked.figures.details.items():
        typer.echo(f"by {what}:")
        for name, (value, count) in groups.items():
            typer.echo(f"  {name:<20}{value:8.2%} ({count:,} questions)")
