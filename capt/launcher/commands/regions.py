"""``capt regions``: region features of pictures, from feature files or from one's own pictures, in one store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from capt.launcher.commands import options as o

if TYPE_CHECKING:
    from PIL import Image

    from capt.pretrain.regions.summary import PictureSummary, StoreSummary

app = typer.Typer(help="Import, extract and inspect region features of pictures.", rich_markup_mode=None)

_MOST_BYTES, _MOST_PIXELS = 256 << 20, 100_000_000

Out = Annotated[Path, typer.Option(help="New folder to write.")]
Objects = Annotated[Path | None, typer.Option(metavar="FILE", help="Names of object classes, one a line.")]
Attributes = Annotated[Path | None, typer.Option(metavar="FILE", help="Names of attribute classes, one a line.")]


_EPILOG = (
    "\b\nExample: capt regions extract photos/ --backend grid --model microsoft/resnet-50 --out store/\n\n"
    "After an interruption give the same command again: it continues where it stopped."
)


@app.command(epilog=_EPILOG)
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
    from capt.pretrain.regions.extract.parts import ExtractOptions
    from capt.pretrain.regions.extract.run import extract_regions

    options = ExtractOptions(
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
    with o.progress_bar("extracting") as progress:
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


@app.command("import", epilog="\b\nExample: capt regions import train2014_obj36.tsv val2014_obj36.tsv --out store")
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="TSV feature files (LXMERT's and their like)."),
    ],
    out: Out,
    dtype: Annotated[str, typer.Option(help="Type of the stored features: fp16 or fp32.")] = "fp16",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that decode (default: one a core).")] = None,
    features_of: Annotated[
        str | None,
        typer.Option(help="What made the features, in words. Stores of which this differs are not mixed."),
    ] = None,
    file_dtype: Annotated[
        str | None, typer.Option(help="Type of the features in a TSV file: fp16, fp32 or fp64 (default: inferred).")
    ] = None,
    skip_damaged: Annotated[
        bool,
        typer.Option("--skip-damaged", help="Leave out rows that cannot be used, and name them, instead of stopping."),
    ] = False,
    objects: Objects = None,
    attributes: Attributes = None,
    json: o.Json = False,
) -> None:
    """Write the pictures of feature files to a store. After an interruption, the same command continues."""
    from capt.pretrain.base.errors import ConfigError
    from capt.pretrain.regions.importing import import_regions
    from capt.pretrain.regions.manifest import FeatureType
    from capt.pretrain.regions.store import RegionStore
    from capt.pretrain.regions.summary import summarize
    from capt.pretrain.regions.tsv_layout import FileType

    for option, given, known in (
        ("dtype", dtype, ("fp16", "fp32")),
        ("file-dtype", file_dtype, ("fp16", "fp32", "fp64")),
    ):
        if given is not None and given not in known:
            raise ConfigError(f"--{option} {given[:100]!r}: it is {' or '.join(known)}")
    with o.progress_bar("importing") as progress:
        manifest = import_regions(
            out,
            files,
            feature_dtype=cast(FeatureType, dtype),
            workers=workers,
            features_of=features_of,
            file_dtype=cast(FileType | None, file_dtype),
            skip_damaged=skip_damaged,
            object_names=objects,
            attribute_names=attributes,
            progress=progress,
        )
    if json:
        o.echo_json({"folder": str(out), **manifest.model_dump()})
    else:
        typer.echo(
            f"{out}: {manifest.pictures:,} pictures, {manifest.regions:,} regions of {manifest.feature_size} features "
            f"({manifest.feature_dtype})"
        )
        _show_figures(summarize(RegionStore.open(out)))


@app.command(epilog="\b\nExample: capt regions inspect store --picture COCO_train2014_000000458752 --draw boxes.png")
def inspect(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A region store.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all files and compare their hashes.")] = False,
    picture: Annotated[str | None, typer.Option(metavar="NAME", help="Show the regions of this picture.")] = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw its boxes (without --picture: of the first name).")
    ] = None,
    image: Annotated[Path | None, typer.Option(metavar="FILE", help="The picture itself, to draw over.")] = None,
    objects: Objects = None,
    attributes: Attributes = None,
    json: o.Json = False,
) -> None:
    """Show what a region store holds, and the regions of one of its pictures."""
    from dataclasses import asdict

    from capt.pretrain.base.errors import ConfigError
    from capt.pretrain.base.files import write_bytes
    from capt.pretrain.base.verification import Verifier
    from capt.pretrain.regions.class_names import ClassNames
    from capt.pretrain.regions.store import RegionStore
    from capt.pretrain.regions.summary import describe, summarize

    if image is not None and draw is None:
        raise ConfigError("--image is what boxes are drawn over: give --draw FILE.png as well")
    opened = RegionStore.open(store, Verifier(again=True) if verify else None)
    summary = summarize(opened)
    shown = None
    if picture is not None or draw is not None:
        name = picture if picture is not None else opened.names(0, 1)[0]
        shown = describe(opened, name, ClassNames.of(opened.manifest, objects, attributes))
    if draw is not None and shown is not None:
        from capt.pretrain.regions.summary import draw as draw_boxes

        write_bytes(draw, draw_boxes(shown, None if image is None else _read_image(image)))
    if json:
        o.echo_json({**asdict(summary), "verified": verify, "picture": None if shown is None else asdict(shown)})
        return
    _show_store(summary, verify)
    if shown is not None:
        _show_picture(shown)
    if draw is not None:
        typer.echo(f"wrote {draw}")


def _read_image(path: Path) -> Image.Image:
    from capt.pretrain.base.errors import DataError
    from capt.pretrain.base.files import read_bytes
    from capt.pretrain.regions.extract.prepare import decode

    content = read_bytes(path, limit=_MOST_BYTES)
    try:
        return decode(content, _MOST_PIXELS)
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from None


def _show_store(summary: StoreSummary, verified: bool) -> None:
    typer.echo(
        f"{summary.pictures:,} pictures, {summary.regions:,} regions of {summary.feature_size} features "
        f"({summary.feature_dtype}), {summary.bytes:,} bytes"
    )
    typer.echo(f"classes: {summary.object_classes:,} of objects, {summary.attribute_classes:,} of attributes")
    sizes = [" x ".join(map(str, size)) for size in (summary.smallest, summary.largest)]
    typer.echo(f"pictures have from {sizes[0]} to {sizes[1]} pixels, and regions:")
    # At most 20 lines.
    step = -(-(summary.most_regions - summary.fewest_regions + 1) // 20)
    for first in range(summary.fewest_regions, summary.most_regions + 1, step):
        count = sum(summary.histogram.get(number, 0) for number in range(first, first + step))
        label = str(first) if step == 1 else f"{first} to {first + step - 1}"
        typer.echo(f"  {label:>12} {count:>12,}")
    _show_figures(summary)
    typer.echo("features of:")
    for key, value in summary.features_of.items():
        typer.echo(f"  {key}: {value}")
    typer.echo("sources:")
    for source in summary.sources:
        typer.echo(f"  {source['name']}: {source['pictures']:,} pictures, SHA-256 {source['sha256']}")
    typer.echo(f"hashes of {len(summary.files)} files: {'as in the manifest' if verified else 'not read (--verify)'}")


def _show_figures(summary: StoreSummary) -> None:
    """Print the figures by which a person sees whether files were read rightly."""
    for source in summary.sources:
        if source["read_as"]:
            typer.echo(f"{source['name']}: read as {source['read_as']}")
        if left_out := source["left_out"]:
            typer.echo(f"{source['name']}: {len(left_out):,} rows LEFT OUT:")
            typer.echo("\n".join(f"  {text}" for text in left_out[:20]))
            if len(left_out) > 20:
                typer.echo(f"  ... (all are in {summary.folder}/manifest.json)")
    boxes = [" x ".join(f"{length:.4g}" for length in size) for size in (summary.box_smallest, summary.box_largest)]
    typer.echo(
        f"in {summary.features.pictures:,} pictures: boxes from {boxes[0]} to {boxes[1]} pixels; features: "
        f"{summary.features}"
    )


def _show_picture(picture: PictureSummary) -> None:
    typer.echo(f"{picture.name}: {picture.width} x {picture.height} pixels; features: {picture.features}")
    edges = " ".join(f"{edge:>8}" for edge in ("left", "top", "right", "bottom"))
    labelled = any(region.label for region in picture.regions)
    typer.echo(f"  {'':4}  {edges}  |features|{'  attribute, object (confidence)' if labelled else ''}")
    for number, region in enumerate(picture.regions, 1):
        box = " ".join(f"{edge:8.1f}" for edge in region.box)
        labels = [f"{label[0]} ({label[1]:.2f})" for label in (region.attribute, region.object) if label is not None]
        typer.echo(f"  {number:>4}  {box}  {region.feature_norm:10.2f}  {', '.join(labels)}")


@app.command(epilog="\b\nExample: capt regions microworld --out world --pictures 2000 --seed 1")
def microworld(
    out: Annotated[Path, typer.Option(help="New folder to write.")],
    pictures: Annotated[int, typer.Option(min=3, help="Pictures of the three splits together.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another world.")] = 1,
    feature_size: Annotated[int, typer.Option(min=1, help="Numbers that describe a region.")] = 64,
    noise: Annotated[float, typer.Option(min=0, help="Standard deviation of the noise of the features.")] = 0.5,
    json: o.Json = False,
) -> None:
    """Write a synthetic world as LXMERT feature files, captions, and files of VQA, GQA and NLVR2."""
    from capt.pretrain.base.errors import quoted
    from capt.pretrain.vision_language.microworld.generate import World, write_world

    world = World(pictures, seed, feature_size, noise)
    with o.progress_bar("drawing") as progress:
        write_world(out, world, progress)
    counts = {split: len(numbers) for split, numbers in world.numbers.items()}
    if json:
        o.echo_json({"out": str(out), "synthetic": True, "pictures": counts})
        return
    splits = ", ".join(f"{number:,} {split}" for split, number in counts.items())
    typer.echo(f"{out}: synthetic microworld of {pictures:,} pictures ({splits})")
    typer.echo(f"import: capt regions import {quoted(out)}/pictures/*.tsv {quoted(out)}/nlvr2/*.tsv --out STORE")
