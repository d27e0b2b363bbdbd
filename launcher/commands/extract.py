"""``capt regions extract``: a region store of one's own pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capt.launcher.commands import options as o

_EPILOG = (
    "\b\nExample: capt regions extract photos/ --backend grid --model microsoft/resnet-50 --out store/\n\n"
    "After an interruption give the same command again: it continues where it stopped."
)


def register(app: typer.Typer) -> None:
    """Add the command to ``capt regions``."""
    app.command(epilog=_EPILOG)(extract)


def extract(
    context: typer.Context,
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGES...", help="Folders (with those below), files, .tar archives.")
    ],
    model: Annotated[str, typer.Option(metavar="DIR", help="A Hugging Face folder or hub id. No code in it is run.")],
    out: Annotated[Path, typer.Option(help="New folder for the store.")],
    backend: Annotated[
        str,
        typer.Option(
            help="grid: cells of a convolutional network's last map (ResNet, ConvNeXt, ...); "
            "vit: patches of a vision transformer (CLIP, SigLIP, DINOv2, ViT, ...); "
            "detr: what a detector finds, with boxes, classes and confidences (DETR, RT-DETR, ...)."
        ),
    ] = "grid",
    grid: Annotated[
        int | None,
        typer.Option(help="Rows and columns of the grid of regions (default: 6 for grid; each patch for vit)."),
    ] = None,
    fit: Annotated[
        str,
        typer.Option(
            help="whole: the whole picture is resized to the model's input. crop: as the model's own preprocessing has "
            "it, which often sees only a square in the middle. (grid, vit)"
        ),
    ] = "whole",
    threshold: Annotated[
        float, typer.Option(help="Least confidence of a region; the best is always kept (detr).")
    ] = 0.2,
    most: Annotated[int, typer.Option(help="Regions of a picture at most, the most confident (detr).")] = 36,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto: a GPU if there is one.")] = "auto",
    precision: Annotated[str, typer.Option(help="In which the model computes: fp32 or bf16.")] = "fp32",
    batch: Annotated[int, typer.Option(help="Pictures in one forward pass.")] = 8,
    dtype: Annotated[str, typer.Option(help="In which features are stored: fp16 or fp32.")] = "fp16",
    names: Annotated[
        str,
        typer.Option(help="A picture is called by its file's name (stem), or with the folders below IMAGES (path)."),
    ] = "stem",
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out what cannot be read, and name it, instead of stopping.")
    ] = False,
    most_pixels: Annotated[
        int, typer.Option(help="A picture with more is taken for a decompression bomb and not decoded.")
    ] = 89_478_485,
    json: o.Json = False,
) -> None:
    """Make a region store of one's own pictures with a vision model."""
    o.quiet(context)
    from capt.launcher.progress import progress_bar
    from capt.pretrain.regions.extract.parts import Options
    from capt.pretrain.regions.extract.run import extract_regions

    options = Options(
        backend=backend,
        model=o.source_path(model),
        grid=grid,
        fit=fit,
        threshold=threshold,
        most=most,
        device=device,
        precision=precision,
        batch=batch,
        dtype=dtype,
        names=names,
        skip_damaged=skip_damaged,
        most_pixels=most_pixels,
    )
    with progress_bar("extracting") as progress:
        manifest, damage = extract_regions(images, out, options, progress)
    if json:
        o.echo_json({"folder": str(out), "key": manifest.key, "left_out": damage.skipped, **manifest.model_dump()})
        return
    typer.echo(
        f"{out}: {manifest.pictures} pictures, {manifest.regions} regions of {manifest.feature_size} features "
        f"({manifest.feature_dtype})"
    )
    if damage.skipped:
        typer.echo(damage.summary(), err=True)
    if not manifest.object_classes:
        typer.echo("no object labels: losses on objects and attributes are off when this store is trained on")
