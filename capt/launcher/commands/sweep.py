"""``capt sweep``: many trials of a job on Ray Tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from capt.launcher.commands import options as o
from capt.pretrain.base.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="\b\nExample: capt sweep capt_tiny_sweep data.files=my.txt 'sweep.seeds=[1,2]'")(sweep)


def sweep(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A sweep file, or the name of a shipped one.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[a.b=c ...]", help="Keys of every trial's job; sweep.a.b=c sets a key of the sweep itself."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a Ray cluster to join, or auto (also RAY_ADDRESS); otherwise one is started here."
        ),
    ] = None,
    resume: Annotated[
        Literal["always", "auto"] | None,
        typer.Option(
            metavar="[auto]",
            help="Continue the sweep in sweep.dir; finished trials do not run again. "
            "auto: begin it where there is none (sweep.resume).",
        ),
    ] = None,
    launcher: Annotated[
        Literal["ray", "kubernetes"],
        typer.Option(help="kubernetes: hand the sweep over as a RayJob (KubeRay), as --cluster says."),
    ] = "ray",
    cluster: o.Cluster = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the sweep and its trials, or the RayJob; start nothing.")
    ] = False,
) -> int:
    """Search hyperparameters with Ray Tune. Grid, random, Optuna, ASHA or population based training."""
    from capt.launcher.kubernetes.settings import load_kubernetes
    from capt.launcher.sweep.run import run_sweep

    if cluster is not None and launcher != "kubernetes":
        raise ConfigError("--cluster goes with --launcher kubernetes; a Ray cluster is named by --address")
    if address is not None and launcher == "kubernetes":
        raise ConfigError("--address does not go with --launcher kubernetes, which makes a Ray cluster of its own")
    return run_sweep(
        config,
        [*(overrides or []), *["sweep.resume=auto"] * (resume == "auto")],
        address=address,
        resume=resume == "always",
        show=typer.echo if dry_run else None,
        cluster=load_kubernetes(cluster or Path("kubernetes")) if launcher == "kubernetes" else None,
    )
