"""``capt glue-submission`` and ``capt glue-validate``: from a sweep over GLUE to the leaderboard's zip."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.commands import options as o


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command("glue-submission", epilog="\b\nExample: capt glue-submission runs/glue --out submission.zip")(
        submission
    )
    app.command("glue-validate", epilog="\b\nExample: capt glue-validate submission.zip")(validate)


def submission(
    context: typer.Context,
    sweep: Annotated[Path, typer.Argument(metavar="SWEEP", help="The folder of a sweep over all tasks of GLUE.")],
    out: Annotated[Path, typer.Option(help="The zip file to write.")] = Path("submission.zip"),
    data: Annotated[
        Path | None, typer.Option(help="A folder with GLUE's files, if the test sets are not with the training data.")
    ] = None,
) -> None:
    """Predict GLUE's test sets with the best checkpoint of each task and write what the leaderboard takes."""
    o.quiet(context)
    from finetune.glue.predictions import predict_tests, prediction_summary
    from finetune.glue.submission import write_submission
    from launcher.progress import progress_bar

    with progress_bar("predicting") as progress:
        predictions = predict_tests(sweep, data, progress)
    typer.echo(write_submission(predictions, out))
    typer.echo(prediction_summary(predictions))


def validate(
    path: Annotated[Path, typer.Argument(metavar="ZIP", help="A submission.")],
) -> None:
    """Check a submission's names, headers, line counts, indices and labels. The exit code is 2 when any is wrong."""
    from finetune.glue.submission import SUBMISSION_FILES, check_submission
    from pretrain.base.errors import DataError

    problems = check_submission(path)
    for problem in problems[:-1]:
        typer.echo(f"error: {problem}", err=True)
    if problems:
        raise DataError(problems[-1])
    rows = sum(output.rows for output in SUBMISSION_FILES.values())
    typer.echo(f"{path}: {len(SUBMISSION_FILES)} files with {rows:,} predictions, as the leaderboard expects them")
