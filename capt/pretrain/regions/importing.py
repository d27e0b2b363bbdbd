"""Import of feature files into a store: ``capt regions import``."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
from jaxtyping import Int64

from capt.pretrain.base.arrays import map_array
from capt.pretrain.base.atomic import rename_to_new, sync
from capt.pretrain.base.errors import DataError, UserError, counted, shown
from capt.pretrain.base.files import is_utf8, open_for_append, open_regular, read_json, read_text, write_json
from capt.pretrain.base.parallel import ProgressCallback, ordered_map
from capt.pretrain.base.process import usable_cores
from capt.pretrain.regions.class_names import ClassNames, read_names
from capt.pretrain.regions.manifest import FeatureType, PictureSource, StoreManifest, StoreShape
from capt.pretrain.regions.tsv import TsvLayout
from capt.pretrain.regions.tsv_index import HEIGHT, NUMBER, REGIONS, WIDTH, TsvIndex, index_tsv
from capt.pretrain.regions.tsv_layout import FileType, infer_layout
from capt.pretrain.regions.writer import (
    BlockWriter,
    blocks_of,
    count_blocks,
    most_regions,
    seal,
    unfinished,
    write_pictures,
)

logger = logging.getLogger(__name__)


_SYNC_SECONDS = 10.0
"""Between two entries in the journal: what was written since the last one is written again after a power cut."""
_FREE = 64 << 20
"""Bytes that are left free on the disk."""


def import_tsv(
    out: Path,
    paths: Sequence[Path],
    *,
    feature_dtype: FeatureType,
    workers: int,
    features_of: Mapping[str, Any],
    file_dtype: FileType | None = None,
    skip_damaged: bool = False,
    names_of: tuple[Path | None, Path | None] = (None, None),
    progress: ProgressCallback | None = None,
) -> StoreManifest:
    """Write the pictures of TSV feature files, in their order, to the new store ``out``.

    Memory grows by some hundred bytes a picture. The same call continues where an interrupted one has stopped; files
    that have changed meanwhile begin it anew. The bytes are the same for any number of ``workers``.

    Raises:
        DataError: a row is not valid, with file and row; pictures come twice; files differ in their number of features
            or in whether they have labels; the disk is too small; or ``out`` holds something.
    """
    names = ClassNames(*(None if file is None else read_names(file) for file in names_of))
    with unfinished(out, "import") as work:
        work.mkdir(exist_ok=True)
        try:
            # Twice the bytes: a pass that indexes, and one that decodes.
            meter = _Meter(progress, 2 * sum(path.stat().st_size for path in paths if path.is_file()))
            layouts = {path: infer_layout(path, file_dtype) for path in paths}
            indexes = _indexes(layouts, paths, work / "index", feature_dtype, skip_damaged, workers, meter)
            if skip_damaged:
                indexes = _without_repeated(indexes)
            shape, offsets = _prepare(work, indexes, feature_dtype)
            _write_blocks(work, shape, indexes, workers, meter)
            sources = [
                PictureSource(
                    name=r.path, sha256=r.sha256, pictures=r.pictures, read_as=str(r.layout), left_out=r.left_out
                )
                for r, *_ in indexes
            ]
            # Classes are known when all rows are decoded, and names are compared with their number.
            shape = _with_classes(work, shape)
            names.require(shape, *names_of)
            manifest = seal(work, shape, most_regions(offsets), features_of, sources, names)
        except UserError:  # of what cannot continue as it is, nothing is kept
            shutil.rmtree(work)
            raise
        _finish(work, out)
    return manifest


class _Meter:
    """Adds up what several threads have done. Once stopped, it ends them at their next step."""

    def __init__(self, progress: ProgressCallback | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock, self.stopped = Lock(), Event()

    def advance(self, size: int) -> None:
        """Count ``size`` bytes more."""
        if self.stopped.is_set():
            raise DataError("another file could not be read")
        with self._lock:
            self._done += size
            if self._progress is not None:
                self._progress(self._done, self._total)


def _indexes(
    layouts: Mapping[Path, TsvLayout],
    paths: Sequence[Path],
    folder: Path,
    dtype: FeatureType,
    skip_damaged: bool,
    workers: int,
    meter: _Meter,
) -> list[TsvIndex]:
    """The index of each file. Reading and hashing leave other threads alone, so threads suffice."""
    with ThreadPoolExecutor(min(workers, len(paths))) as threads:
        once = {path.absolute(): path for path in paths}  # a file named twice has one index, which one thread writes
        named = {
            place: threads.submit(index_tsv, path, folder, layouts[path], dtype, skip_damaged, meter.advance)
            for place, path in once.items()
        }
        futures = [named[path.absolute()] for path in paths]
        try:
            failed = [future for future in wait(futures, return_when=FIRST_EXCEPTION).done if future.exception()]
            indexes = [future.result() for future in failed or futures]
        finally:
            # One file that fails stops the passes over the others; the error is that of the first.
            meter.stopped.set()
            for future in futures:
                future.cancel()
    meter.stopped.clear()
    first = indexes[0].record
    for record in (index.record for index in indexes):
        if (record.size, record.labels) != (first.size, first.labels):
            raise DataError(
                f"{record.path}: {record.size} features a region, labels of objects and attributes: {record.labels}; "
                f"{first.path} has {first.size} and {first.labels}; a store holds features of one kind"
            )
    return indexes


def _prepare(
    work: Path, indexes: Sequence[TsvIndex], dtype: FeatureType
) -> tuple[StoreShape, Int64[np.ndarray, " borders"]]:
    """Make the arrays in full length, unless they are there from an interrupted import of the same."""
    first = indexes[0].record
    counts = np.concatenate([index.rows[:, REGIONS] for index in indexes])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    names = np.concatenate([index.names for index in indexes])
    _require_unique(names, indexes)
    has_objects, has_attributes = first.labels
    shape = StoreShape(
        pictures=len(names), regions=int(offsets[-1]), feature_size=first.size, feature_dtype=dtype,
        name_bytes=names.dtype.itemsize, object_classes=int(has_objects), attribute_classes=int(has_attributes),
    )  # fmt: skip
    # The plan holds all that decides the bytes of the store: other files or another type begin it anew.
    read = [[r.sha256, str(r.layout), r.layout.types, len(r.left_out)] for r, *_ in indexes]
    plan = {"sources": read, **shape.model_dump()}
    if _is_begun(work, shape, plan):
        return shape, offsets
    if (work / "plan.json").exists():
        logger.warning("%s: begun with other files or another type, or damaged; beginning anew", work)
    # Nothing of another plan may stay behind.
    for path in [*work.glob("*.npy"), work / "plan.json", work / "journal"]:
        path.unlink(missing_ok=True)
    _require_space(work, shape)
    sizes = np.concatenate([index.rows[:, [WIDTH, HEIGHT]] for index in indexes])
    write_pictures(work, shape, names, sizes, offsets)
    for name, layout in shape.arrays().items():
        if layout.shape[0] == shape.regions and not (work / f"{name}.npy").exists():
            with (work / f"{name}.npy").open("xb") as file:
                file.write(layout.header())
                file.truncate(layout.length)
    write_json(work / "plan.json", plan)  # last: it says that the arrays are there
    return shape, offsets


def _require_unique(names: np.ndarray, indexes: Sequence[TsvIndex]) -> None:
    """Refuse a picture that comes twice, naming the rows of the first."""
    order = np.argsort(names, kind="stable")
    twice = np.flatnonzero(names[order[1:]] == names[order[:-1]])
    if not twice.size:
        return
    # The first repetition in the order of the files, to be named.
    first = twice[np.argmin(order[twice + 1])]
    one, other = int(order[first]), int(order[first + 1])
    raise DataError(
        f"{_place(indexes, other)}: picture {shown(names[one].decode())} is in {_place(indexes, one)} already; "
        f"{counted(len(twice), 'picture')} more than once, and each may be there once; --skip-damaged takes the first"
    )


def _place(indexes: Sequence[TsvIndex], number: int) -> str:
    """File and row of a picture by its number among those of all files."""
    for index in indexes:
        if number < len(index.rows):
            return f"{index.record.path}, row {index.rows[number, NUMBER]}"
        number -= len(index.rows)
    raise AssertionError(number)


def _without_repeated(indexes: Sequence[TsvIndex]) -> list[TsvIndex]:
    """The indexes without the rows of pictures that came before, which are named."""
    places: dict[bytes, str] = {}
    kept = []
    for index in indexes:
        path, left_out = index.record.path, []
        good = np.ones(len(index.rows), dtype=bool)
        for place, (name, number) in enumerate(zip(index.names.tolist(), index.rows[:, NUMBER].tolist(), strict=True)):
            if name in places:
                good[place] = False
                left_out.append(f"row {number}: picture {shown(name.decode())} is in {places[name]} already")
                logger.warning("left out: %s, %s", path, left_out[-1])
            else:
                places[name] = f"{path}, row {number}"
        if not good.any():
            raise DataError(f"{path}: no row can be used: {left_out[0]}")
        listed = sorted([*index.record.left_out, *left_out], key=_row_number)
        record = index.record.model_copy(update={"pictures": int(good.sum()), "left_out": listed})
        kept.append(TsvIndex(record, index.rows[good], index.names[good]))
    return kept


def _row_number(left_out: str) -> int:
    return int(left_out.removeprefix("row ").split(":")[0])


def _is_begun(work: Path, shape: StoreShape, plan: dict[str, Any]) -> bool:
    try:
        same = bool(read_json(work / "plan.json") == plan)
        for name, layout in shape.arrays().items():
            map_array(work / f"{name}.npy", layout)
    except (FileNotFoundError, DataError):
        return False
    return same


def _require_space(work: Path, shape: StoreShape) -> None:
    needed, free = sum(layout.length for layout in shape.arrays().values()), shutil.disk_usage(work).free
    if needed + _FREE > free:
        raise DataError(
            f"{work.parent}: the store needs {needed + _FREE:,} bytes ({_FREE:,} of them stay free) and {free:,} "
            "are free: take another disk"
        )


def _write_blocks(work: Path, shape: StoreShape, indexes: Sequence[TsvIndex], workers: int, meter: _Meter) -> None:
    """Write the blocks that the journal does not name, and name them there once they are on the disk."""
    done, total = _journal(work), count_blocks(indexes)
    left = (block for block in blocks_of(indexes) if block.number not in done)
    if done:
        logger.info("%s: %d of %d blocks are there from an interrupted import", work, len(done), total)
        meter.advance(sum(block.size for block in blocks_of(indexes) if block.number in done))
    writer = BlockWriter(work, shape, [index.record for index in indexes])
    written: list[int] = []
    latest = time.monotonic()
    try:
        for number, size in ordered_map(writer, left, max(1, min(workers, total - len(done)))):
            written.append(number)
            meter.advance(size)
            if time.monotonic() - latest > _SYNC_SECONDS:
                _record(work, shape, written)
                written, latest = [], time.monotonic()
    finally:
        # Also after an error: what is on the disk need not be written again.
        _record(work, shape, written)


def _journal(work: Path) -> set[int]:
    """Numbers of blocks that are on the disk; the last line may have been cut off."""
    try:
        lines = read_text(work / "journal").split("\n")[:-1]
    except (FileNotFoundError, DataError):
        return set()
    return {int(line) for line in lines if line.isdecimal() and len(line) < 15}


def _record(work: Path, shape: StoreShape, written: Sequence[int]) -> None:
    # The values are on the disk before the journal says so.
    for name in shape.arrays():
        sync(work / f"{name}.npy")
    with open_for_append(work / "journal") as file:
        file.write("".join(f"{number}\n" for number in written))
    sync(work / "journal")


def _with_classes(work: Path, shape: StoreShape) -> StoreShape:
    """The shape with the numbers of classes, which are known when all is written."""
    classes = {}
    for name, layout in shape.arrays().items():
        if name.endswith("_ids"):
            ids = map_array(work / f"{name}.npy", layout)
            # In pieces: the array may be larger than memory.
            largest = max(int(ids[start : start + (1 << 20)].max()) for start in range(0, len(ids), 1 << 20))
            classes[f"{name.removesuffix('_ids')}_classes"] = largest + 1
    return shape.model_copy(update=classes)


def _finish(work: Path, out: Path) -> None:
    for path in work.glob("*.*"):
        sync(path)
    shutil.rmtree(work / "index")
    for name in ("plan.json", "journal"):
        (work / name).unlink()
    sync(work)
    rename_to_new(work, out)


# TSV feature files to a store: indexed, then decoded by several processes, and resumed after an interruption.
#
# The store grows in a folder beside its place, ``.NAME.import``:
#
#     index/        where the rows of each file begin (`capt.pretrain.regions.tsv_index`)
#     plan.json     what is written: files and their hashes, types
#     journal       the numbers of the blocks of rows that are written, once they are on the disk
#     *.npy         the store's arrays in full length; processes write each block where it belongs
#
# Which process writes what does not show in the result.


def import_regions(
    out: Path,
    paths: Sequence[Path],
    *,
    feature_dtype: FeatureType = "fp16",
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
        paths: feature files of LXMERT's kind (`capt.pretrain.regions.tsv_layout`).
        feature_dtype: type in which features are stored.
        workers: processes that decode; None = one a core.
        features_of: what made the features, in words; stores with other words are not mixed with it.
        file_dtype: type of the features in the files; None = inferred from the features.
        skip_damaged: leave out rows that cannot be used and pictures that come again; the store's manifest lists them.
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
    for path in paths:
        _require_plain(path)
    made_by = {"backend": "lxmert", **({} if features_of is None else {"features": features_of})}
    return import_tsv(
        out, paths, feature_dtype=feature_dtype, workers=workers or usable_cores(), features_of=made_by,
        file_dtype=file_dtype, skip_damaged=skip_damaged, names_of=(object_names, attribute_names), progress=progress,
    )  # fmt: skip


def _require_plain(path: Path) -> None:
    """Raise ``DataError`` where a file is empty or packed."""
    with open_regular(path) as file:
        start = file.read(2)
    if not start:
        raise DataError(f"{path}: the file is empty")
    if start == b"\x1f\x8b":
        raise DataError(f"{path}: packed; rows are read from any place of the file, so unpack it first (gunzip)")
