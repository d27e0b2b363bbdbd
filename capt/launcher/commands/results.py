"""``capt glue-submission``: the predictions of a sweep as the leaderboard takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capt.launcher.commands import options as o


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("glue-submission", epilog="\b\nExample: capt glue-submission runs/glue --out submission.zip")(
        submission
    )


def submission(
    context: typer.Context,
    sweep: Annotated[Path, typer.Argument(metavar="SWEEP", help="The folder of a sweep over all tasks of GLUE.")],
    out: Annotated[Path, typer.Option(help="The zip file to write.")] = Path("submission.zip"),
    data: Annotated[
        Path | None, typer.Option(help="A folder with GLUE's files, if the test sets are not with the training data.")
    ] = None,
) -> None:
    """Write GLUE's predictions for the leaderboard. The best checkpoint of each task makes them."""
    o.quiet(context)
    from capt.finetune.glue.submission import predict_tests, prediction_summary, write_submission

    with o.progress_bar("predicting") as progress:
        predictions = predict_tests(sweep, data, progress)
    typer.echo(write_submission(predictions, out))
    typer.echo(prediction_summary(predictions))
