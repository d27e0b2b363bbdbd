"""``capt regions``: region features of pictures, from feature files or from one's own pictures, in one store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from launcher.commands import extract, microworld
from launcher.commands import options as o

app = typer.Typer(help="Import, extract and inspect region features of pictures.", rich_markup_mode=None)
extract.register(app)
microworld.register(app)

Out = Annotated[Path, typer.Option(help="New folder to write.")]


@app.command("import", epilog="\b\nExample: capt regions import train2014_obj36.tsv val2014_obj36.tsv --out store")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="LXMERT's TSV files, or files of NLVR v1.")],
    out: Out,
    format: Annotated[str | None, typer.Option(help="lxmert or nlvr1 (default: as the first file tells).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the stored features: fp16 or fp32 (default: fp16; nlvr1: fp32).")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that decode (default: one a core).")] = None,
    features_of: Annotated[
        str | None,
        typer.Option(help="What made the features, in words. Stores of which this differs are not mixed."),
    ] = None,
    json: o.Json = False,
) -> None:
    """Write the pictures of feature files to a store. After an interruption, the same command continues."""
    from launcher.progress import progress_bar
    from pretrain.base.errors import ConfigError
    from pretrain.regions.importing import Format, import_regions
    from pretrain.regions.manifest import FeatureType

    for option, given, known in (("format", format, ("lxmert", "nlvr1")), ("dtype", dtype, ("fp16", "fp32"))):
        if given is not None and given not in known:
            raise ConfigError(f"--{option} {given[:100]!r}: it is {known[0]} or {known[1]}")
    with progress_bar("importing") as progress:
        manifest = import_regions(
            out,
            files,
            format=cast(Format | None, format),
            feature_dtype=cast(FeatureType | None, dtype),
            workers=workers,
            features_of=features_of,
            progress=progress,
        )
    if json:
        o.echo_json({"folder": str(out), **manifest.model_dump()})
    else:
        typer.echo(
            f"{out}: {manifest.pictures:,} pictures, {manifest.regions:,} regions of {manifest.feature_size} features "
            f"({manifest.feature_dtype})"
        )
