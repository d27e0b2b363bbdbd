"""``capt pretrain``, ``capt finetune`` and ``capt resume``: the commands that start processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from capt.launcher.commands import options as o


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(
        "pretrain", epilog="\b\nExample: capt pretrain capt_tiny data.files=my.txt run.dir=runs/first --nproc 2"
    )(_command("Pretrain an encoder. On this host, on several, or on a cluster."))
    app.command("finetune", epilog="\b\nExample: capt finetune mine data.train=reviews.csv model.init=runs/first")(
        _command("Fine-tune an encoder on a task. model.init names it; launched as capt pretrain is.", finetunes=True)
    )
    app.command(epilog="\b\nExample: capt resume runs/first --nproc 4")(resume)


def _command(help_text: str, *, finetunes: bool = False) -> Callable[..., int]:
    """Make the function of a command that starts a new run; all such commands take the same options."""

    def begin(
        context: typer.Context,
        *,
        config: o.Config,
        overrides: o.Overrides = None,
        launch: o.LaunchOptions,
        preflight: o.Preflight = True,
        resume: o.Resume = None,
        dry_run: o.DryRun = False,
    ) -> int:
        from capt.launcher.start import begin as start

        # The command only adapts: capt.launcher.start checks the options and the job, for all commands alike.
        return start(
            "capt.pretrain",
            config,
            [*(overrides or []), *([] if resume is None else [f"run.resume={resume}"])],
            launch.checked(),
            debug=o.debug(context),
            show=typer.echo if dry_run else None,
            finetunes=finetunes,
            preflight=preflight,
        )

    begin.__doc__ = help_text
    return begin


def resume(
    context: typer.Context,
    *,
    run: o.Run,
    overrides: o.Overrides = None,
    launch: o.LaunchOptions,
    preflight: o.Preflight = True,
    checkpoint: Annotated[
        str | None, typer.Option(help="An older checkpoint: a folder name under RUN/checkpoints.")
    ] = None,
    dry_run: o.DryRun = False,
) -> int:
    """Continue a run from its newest checkpoint. The number of processes may be another one.

    Without options it is launched as it was before.
    """
    from capt.launcher.start import resume as resume_run

    return resume_run(
        "capt.pretrain",
        run,
        overrides or [],
        launch.checked(),
        checkpoint=checkpoint,
        debug=o.debug(context),
        show=typer.echo if dry_run else None,
        preflight=preflight,
    )
