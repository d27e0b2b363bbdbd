"""``capt regions microworld``: a synthetic world whose every answer is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capt.launcher.commands import options as o


def microworld(
    out: Annotated[Path, typer.Option(help="New folder to write.")],
    pictures: Annotated[int, typer.Option(min=3, help="Pictures of the three splits together.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another world.")] = 1,
    feature_size: Annotated[int, typer.Option(min=1, help="Numbers that describe a region.")] = 64,
    noise: Annotated[float, typer.Option(min=0, help="Standard deviation of the noise of the features.")] = 0.5,
    json: o.Json = False,
) -> None:
    """Write a synthetic world as LXMERT feature files, captions, and files of VQA, GQA and NLVR2."""
    from capt.launcher.progress import progress_bar
    from capt.pretrain.base.errors import quoted
    from capt.pretrain.vision_language.microworld.generate import World, write_world

    world = World(pictures, seed, feature_size, noise)
    with progress_bar("drawing") as progress:
        write_world(out, world, progress)
    counts = {split: len(numbers) for split, numbers in world.numbers.items()}
    if json:
        o.echo_json({"out": str(out), "synthetic": True, "pictures": counts})
        return
    splits = ", ".join(f"{number:,} {split}" for split, number in counts.items())
    typer.echo(f"{out}: synthetic microworld of {pictures:,} pictures ({splits})")
    typer.echo(f"import: capt regions import {quoted(out)}/pictures/*.tsv {quoted(out)}/nlvr2/*.tsv --out STORE")


def register(app: typer.Typer) -> None:
    """Add the command to ``capt regions``."""
    app.command(epilog="\b\nExample: capt regions microworld --out world --pictures 2000 --seed 1")(microworld)
