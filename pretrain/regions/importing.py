"""Import of feature files into a store: ``capt regions import``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import is_utf8, open_regular
from capt.pretrain.base.parallel import ProgressCallback, usable_cores
from capt.pretrain.base.verification import sha256
from capt.pretrain.regions.manifest import FeatureType, Source, StoreManifest
from capt.pretrain.regions.nlvr1 import FEATURES_OF, read_scenes
from capt.pretrain.regions.picture import Picture
from capt.pretrain.regions.tsv_import import import_tsv
from capt.pretrain.regions.tsv_layout import FileType
from capt.pretrain.regions.writer import write_store

Format = Literal["lxmert", "nlvr1"]


def import_regions(
    out: Path,
    paths: Sequence[Path],
    *,
    format: Format | None = None,
    feature_dtype: FeatureType | None = None,
    workers: int | None = None,
    features_of: str | None = None,
    file_dtype: FileType | None = None,
    skip_damaged: bool = False,
    object_names: Path | None = None,
    attribute_names: Path | None = None,
    progress: ProgressCallback | None = None,
) -> StoreManifest:
    """Write the pictures of feature files, in their order, to the new store ``out``.

    Args:
        out: a folder that does not exist or is empty.
        paths: feature files of LXMERT's kind (`capt.pretrain.regions.tsv_layout`), or files of NLVR v1.
        format: what they are; None = as the first byte of the first file tells.
        feature_dtype: type in which features are stored; None = fp16, and fp32 for NLVR v1, whose features are few.
        workers: processes that decode LXMERT's files; None = one a core.
        features_of: what made the features of LXMERT's files, in words; stores with other words are not mixed with it.
        file_dtype: type of the features in LXMERT's files; None = as the features tell.
        skip_damaged: leave out rows of LXMERT's files that cannot be used and pictures that come again; the store's
            manifest lists them.
        object_names: file of the names of object classes, one a line, which the store keeps.
        attribute_names: the same for attributes.
        progress: called with bytes that are done and all bytes.

    Raises:
        DataError: a file cannot be read or a row of it is not valid, with file and row; or ``out`` holds something.
    """
    for what in (*map(str, paths), str(out), features_of or ""):
        if not is_utf8(what):
            raise DataError(f"{what!a}: not UTF-8 text, which a manifest is written in; rename it")
    if missing := [path for path in paths if not path.is_file()]:
        raise DataError(f"{missing[0]}: {'not a file' if missing[0].exists() else 'no such file'}")
    format = format or told_format(paths[0])
    if format == "nlvr1":
        for option, given in (
            ("features-of", features_of), ("file-dtype", file_dtype), ("objects", object_names),
            ("attributes", attribute_names), ("skip-damaged", skip_damaged or None),
        ):  # fmt: skip
            if given is not None:
                raise DataError(f"the features of NLVR v1 are always the same: leave out --{option}")
        return _import_scenes(out, paths, feature_dtype or "fp32", progress)
    made_by = {"backend": "lxmert", **({} if features_of is None else {"features": features_of})}
    return import_tsv(
        out, paths, feature_dtype=feature_dtype or "fp16", workers=workers or usable_cores(), features_of=made_by,
        file_dtype=file_dtype, skip_damaged=skip_damaged, names_of=(object_names, attribute_names), progress=progress,
    )  # fmt: skip


def told_format(path: Path) -> Format:
    """The format of a file, by its first byte: lines of JSON begin with a brace.

    Raises:
        DataError: it is empty, or packed and not of NLVR v1.
    """
    with open_regular(path) as file:
        start = file.read(2)
    if not start:
        raise DataError(f"{path}: the file is empty")
    if start == b"\x1f\x8b":
        if ".json" in path.name:
            return "nlvr1"
        raise DataError(f"{path}: packed; rows are read from any place of the file, so unpack it first (gunzip)")
    return "nlvr1" if start[:1] == b"{" else "lxmert"


def _import_scenes(
    out: Path, paths: Sequence[Path], dtype: FeatureType, progress: ProgressCallback | None
) -> StoreManifest:
    counts = dict.fromkeys(paths, 0)
    sources: list[Source] = []

    def pictures() -> Iterator[Picture]:
        for path, picture in read_scenes(paths, progress):
            counts[path] += 1
            yield picture
        sources.extend(Source(name=str(path), sha256=sha256(path), pictures=n) for path, n in counts.items())

    return write_store(out, pictures(), feature_dtype=dtype, features_of=FEATURES_OF, sources=sources)
