"""Writing a region store: from any source of pictures, in constant memory, whole or not at all."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from capt.pretrain.base.arrays import HEADER_BYTES, Column, write_array
from capt.pretrain.base.atomic import new_folder, require_new
from capt.pretrain.base.errors import DataError, counted, shown
from capt.pretrain.base.files import open_regular, require_own_folder, write_text
from capt.pretrain.base.locks import file_lock
from capt.pretrain.base.verification import FileState, file_state, sha256
from capt.pretrain.regions.class_names import NUMBERS, ClassNames
from capt.pretrain.regions.manifest import MANIFEST, ArrayRecord, FeatureType, PictureSource, StoreManifest, StoreShape
from capt.pretrain.regions.picture import Picture, checked
from capt.pretrain.regions.tsv import decode, parse_row
from capt.pretrain.regions.tsv_index import LENGTH, NUMBER, REGIONS, START, IndexRecord, TsvIndex

# Where a store is made until it is whole, so that an interrupted making continues where it stopped.


@contextmanager
def unfinished(out: Path, kind: str) -> Iterator[Path]:
    """The folder ``.NAME.kind`` beside the new store ``out``, locked for the block; neither made nor removed here.

    Raises:
        DataError: ``out`` holds something, another process makes it, or the folder is somebody else's.
    """
    require_new(out)
    work, lock = (out.parent / f".{out.name}.{what}" for what in (kind, f"{kind}.lock"))
    require_own_folder(work)
    out.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(lock, refusal=f"{out}: another process {kind}s to it", remove=True, error=DataError):
        yield work


_NAMES_TOGETHER = 4096


def write_store(
    out: Path,
    pictures: Iterable[Picture],
    *,
    feature_dtype: FeatureType = "fp16",
    features_of: Mapping[str, Any],
    sources: Iterable[PictureSource] = (),
) -> StoreManifest:
    """Write ``pictures``, in their order, to the new store ``out``. It appears whole, or not at all.

    Args:
        out: a folder that does not exist or is empty.
        pictures: read once, one at a time.
        feature_dtype: type in which the features are stored.
        features_of: what made the features: ``backend`` and whatever decides its output.
        sources: what the pictures were read from; looked at when all pictures were.

    Raises:
        DataError: ``out`` holds something; there are no pictures; a picture is not valid (see
            `capt.pretrain.regions.picture.checked`), comes twice, or differs from the first in its number of features
            or in whether it has labels.
    """
    with new_folder(out) as folder:
        stream = _Stream(folder, feature_dtype)
        for picture in pictures:
            stream.append(checked(picture, feature_dtype))
        shape, offsets = stream.finish()
        return seal(folder, shape, most_regions(offsets), features_of, sources)


class _Stream:
    """Appends pictures to the files of the arrays."""

    def __init__(self, folder: Path, dtype: FeatureType) -> None:
        self._folder, self._dtype = folder, dtype
        self._columns: dict[str, Column] = {}
        self._offsets = array("q", [0])
        self._sizes = array("i")
        self._names: list[np.ndarray] = []
        self._latest: list[bytes] = []
        self._first: Picture | None = None
        self._classes = {"object": 0, "attribute": 0}

    def append(self, picture: Picture) -> None:
        """Append a picture that has been checked."""
        # One row of features is kept, to compare the number of columns with.
        self._first = first = self._first or picture._replace(features=picture.features[:1].copy())
        require_like(picture, first)
        self._write("features", picture.features)
        self._write("boxes", picture.boxes)
        for what, labels in (("object", picture.objects), ("attribute", picture.attributes)):
            if labels is not None:
                self._write(f"{what}_ids", labels.ids)
                self._write(f"{what}_scores", labels.scores)
                self._classes[what] = max(self._classes[what], int(labels.ids.max()) + 1)
        self._offsets.append(self._offsets[-1] + len(picture.features))
        self._sizes.extend((picture.width, picture.height))
        self._latest.append(picture.id.encode())
        if len(self._latest) == _NAMES_TOGETHER:
            self._pack_names()

    def finish(self) -> tuple[StoreShape, Int64[np.ndarray, " borders"]]:
        """Write what is known at the end only."""
        self._pack_names()
        if self._first is None:
            raise DataError("no pictures: there is nothing to write to the store")
        names = np.concatenate(self._names)
        offsets = np.array(self._offsets, dtype=np.int64)
        shape = StoreShape(
            pictures=len(names),
            regions=int(offsets[-1]),
            feature_size=self._first.features.shape[1],
            feature_dtype=self._dtype,
            name_bytes=names.dtype.itemsize,
            object_classes=self._classes["object"],
            attribute_classes=self._classes["attribute"],
        )
        for column in self._columns.values():
            column.finish()
        write_pictures(self._folder, shape, names, np.array(self._sizes, dtype=np.int32).reshape(-1, 2), offsets)
        return shape, offsets

    def _write(self, name: str, values: np.ndarray) -> None:
        if name not in self._columns:
            self._columns[name] = Column(self._folder / f"{name}.npy", values.dtype, values.shape[1:], has_header=True)
        self._columns[name].append(values)

    def _pack_names(self) -> None:
        if self._latest:
            self._names.append(np.array(self._latest, dtype=bytes))
        self._latest = []


def require_like(picture: Picture, first: Picture) -> None:
    """Refuse a picture that differs from the first in its number of features or in whether it has labels."""
    size, expected = picture.features.shape[1], first.features.shape[1]
    if size != expected:
        raise DataError(
            f"picture {shown(picture.id)}: {size} features a region, and {expected} in {shown(first.id)}; "
            "a store holds features of one size"
        )
    for what in ("objects", "attributes"):
        has = getattr(picture, what) is not None
        if has != (getattr(first, what) is not None):
            one, other = (picture, first) if has else (first, picture)
            raise DataError(
                f"picture {shown(one.id)} has {what} and {shown(other.id)} has none: all pictures of a store "
                "have them, or none has"
            )


def write_pictures(
    folder: Path, shape: StoreShape, names: np.ndarray, sizes: np.ndarray, offsets: Int64[np.ndarray, " borders"]
) -> None:
    """Write the arrays that have one entry a picture. Raises ``DataError`` for a name that comes twice."""
    # Names are sorted for the search, with the row of each; rows keep the order of the pictures.
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    if (twice := np.flatnonzero(ordered[1:] == ordered[:-1])).size:
        shown_names = ", ".join(shown(name.decode()) for name in dict.fromkeys(ordered[twice[:10]].tolist()))
        raise DataError(
            f"{counted(len(twice), 'picture')} more than once: {shown_names}{', ...' if len(twice) > 10 else ''}; "
            "each may be there once"
        )
    values = {"offsets": offsets, "sizes": sizes, "names": ordered, "name_rows": order}
    for name, content in values.items():
        write_array(folder / f"{name}.npy", shape.arrays()[name], content)


def most_regions(offsets: Int64[np.ndarray, " borders"]) -> int:
    """The number of regions of the picture with the most."""
    return int(np.diff(offsets).max())


def seal(
    folder: Path,
    shape: StoreShape,
    most: int,
    features_of: Mapping[str, Any],
    sources: Iterable[PictureSource],
    names: ClassNames = NUMBERS,
) -> StoreManifest:
    """Hash the files of the arrays in ``folder`` and write the manifest, which makes it a store."""
    files = {
        f"{name}.npy": ArrayRecord(bytes=layout.length, sha256=sha256(folder / f"{name}.npy"))
        for name, layout in shape.arrays().items()
    }
    manifest = StoreManifest(
        **shape.model_dump(), most_regions=most, features_of=dict(features_of), sources=list(sources), files=files,
        object_names=names.objects or [], attribute_names=names.attributes or [],
    )  # fmt: skip
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    return manifest


# Blocks of rows of feature files, decoded and written to their places in the arrays of a store.


_ROWS = 64


class Block(NamedTuple):
    """Rows of one file that are written together.

    Attributes:
        number: among all blocks.
        source: which file.
        first_region: where its first region belongs in the store.
        rows: of the file's index.
    """

    number: int
    source: int
    first_region: int
    rows: Int64[np.ndarray, "rows 6"]

    @property
    def size(self) -> int:
        """Bytes of its rows in the file."""
        return int(self.rows[:, LENGTH].sum())


def blocks_of(indexes: Sequence[TsvIndex]) -> Iterator[Block]:
    """The blocks of all files, one after the other."""
    number = region = 0
    for source, index in enumerate(indexes):
        for first_row in range(0, len(index.rows), _ROWS):
            rows = np.array(index.rows[first_row : first_row + _ROWS])
            yield Block(number, source, region, rows)
            number += 1
            region += int(rows[:, REGIONS].sum())


def count_blocks(indexes: Sequence[TsvIndex]) -> int:
    """The number of blocks."""
    return sum(-(-len(index.rows) // _ROWS) for index in indexes)


class BlockWriter:
    """Decodes and writes blocks, in whatever process it is called.

    Args:
        folder: holds the arrays' files in full length.
        shape: of the store; a number of classes other than 0 only says that there are labels.
        sources: the records of the files' indexes.
    """

    def __init__(self, folder: Path, shape: StoreShape, sources: Sequence[IndexRecord]) -> None:
        self._folder, self._shape, self._sources = folder, shape, list(sources)
        self._layouts = shape.arrays()
        self._files: dict[str, int] = {}

    def __call__(self, block: Block) -> tuple[int, int]:
        """Write a block; its number, and the bytes of its rows.

        Raises:
            DataError: a row is not valid, with file and row; or the file is no longer that of its index.
        """
        source = self._sources[block.source]
        path, region = Path(source.path), block.first_region
        with open_regular(path) as file:
            # Rows are read from where the index says, so the file must be the one that was indexed.
            state = file_state(os.fstat(file.fileno()))
            if state != FileState(*source.state):
                raise DataError(f"{path} has changed since its rows were counted: start again")
            for row in block.rows:
                line = os.pread(file.fileno(), int(row[LENGTH]), int(row[START]))
                try:
                    picture = checked(decode(parse_row(line, source.layout)), self._shape.feature_dtype)
                except DataError as problem:
                    raise DataError(f"{path}, row {row[NUMBER]}: {problem}") from None
                if len(picture.features) != row[REGIONS]:
                    raise DataError(f"{path} has changed since its rows were counted: start again")
                self._write(picture, region)
                region += len(picture.features)
        return block.number, block.size

    def _write(self, picture: Picture, region: int) -> None:
        arrays = {"features": picture.features, "boxes": picture.boxes}
        for what, labels in (("object", picture.objects), ("attribute", picture.attributes)):
            if labels is not None:
                arrays |= {f"{what}_ids": labels.ids, f"{what}_scores": labels.scores}
        for name, values in arrays.items():
            layout = self._layouts[name]
            # Blocks have places of their own, so processes write at the same time without a lock.
            left = np.ascontiguousarray(values, dtype=layout.dtype).data.cast("B")
            place = HEADER_BYTES + region * layout.row_bytes
            while left:  # not through a map: a full disk would be a signal that kills, and not an error
                written = os.pwrite(self._file(name), left, place)
                left, place = left[written:], place + written

    def _file(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(self._folder / f"{name}.npy", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self._files[name]
