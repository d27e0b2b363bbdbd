"""Writing a region store: from any source of pictures, in constant memory, whole or not at all."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Int64

from pretrain.base.atomic import new_folder
from pretrain.base.errors import DataError, counted, shown
from pretrain.base.files import write_text
from pretrain.base.hashing import sha256
from pretrain.regions.arrays import HEADER_BYTES, write_array
from pretrain.regions.checks import checked
from pretrain.regions.class_names import NUMBERS, ClassNames
from pretrain.regions.manifest import MANIFEST, FeatureType, Shape, Source, StoreFile, StoreManifest
from pretrain.regions.picture import Picture

_NAMES_TOGETHER = 4096


def write_store(
    out: Path,
    pictures: Iterable[Picture],
    *,
    feature_dtype: FeatureType = "fp16",
    features_of: Mapping[str, Any],
    sources: Iterable[Source] = (),
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
            `pretrain.regions.checks.checked`), comes twice, or differs from the first in its number of features or in
            whether it has labels.
    """
    with new_folder(out) as folder, _Stream(folder, feature_dtype) as stream:
        for picture in pictures:
            stream.append(checked(picture, feature_dtype))
        shape, offsets = stream.finish()
        return seal(folder, shape, most_regions(offsets), features_of, sources)


class _Stream(ExitStack):
    """Appends pictures to the files of the arrays."""

    def __init__(self, folder: Path, dtype: FeatureType) -> None:
        super().__init__()
        self._folder, self._dtype = folder, dtype
        self._files: dict[str, IO[bytes]] = {}
        self._offsets = array("q", [0])
        self._sizes = array("i")
        self._names: list[np.ndarray] = []
        self._latest: list[bytes] = []
        self._first: Picture | None = None
        self._classes = {"object": 0, "attribute": 0}

    def append(self, picture: Picture) -> None:
        """Append a picture that has been checked."""
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

    def finish(self) -> tuple[Shape, Int64[np.ndarray, " borders"]]:
        """Write what is known at the end only."""
        self._pack_names()
        self.close()
        if self._first is None:
            raise DataError("no pictures: there is nothing to write to the store")
        names = np.concatenate(self._names)
        offsets = np.array(self._offsets, dtype=np.int64)
        shape = Shape(
            pictures=len(names),
            regions=int(offsets[-1]),
            feature_size=self._first.features.shape[1],
            feature_dtype=self._dtype,
            name_bytes=names.dtype.itemsize,
            object_classes=self._classes["object"],
            attribute_classes=self._classes["attribute"],
        )
        for name in self._files:
            with (self._folder / f"{name}.npy").open("r+b") as file:
                file.write(shape.arrays()[name].header())
        write_pictures(self._folder, shape, names, np.array(self._sizes, dtype=np.int32).reshape(-1, 2), offsets)
        return shape, offsets

    def _write(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:
            file = (self._folder / f"{name}.npy").open("xb", buffering=1 << 20)
            self._files[name] = self.enter_context(file)
            file.write(bytes(HEADER_BYTES))
        self._files[name].write(np.ascontiguousarray(values).data)

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
    folder: Path, shape: Shape, names: np.ndarray, sizes: np.ndarray, offsets: Int64[np.ndarray, " borders"]
) -> None:
    """Write the arrays that have one entry a picture. Raises ``DataError`` for a name that comes twice."""
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
    """How many regions the picture with the most has."""
    return int(np.diff(offsets).max())


def seal(
    folder: Path,
    shape: Shape,
    most: int,
    features_of: Mapping[str, Any],
    sources: Iterable[Source],
    names: ClassNames = NUMBERS,
) -> StoreManifest:
    """Hash the files of the arrays in ``folder`` and write the manifest, which makes it a store."""
    files = {
        f"{name}.npy": StoreFile(bytes=layout.length, sha256=sha256(folder / f"{name}.npy"))
        for name, layout in shape.arrays().items()
    }
    manifest = StoreManifest(
        **shape.model_dump(), most_regions=most, features_of=dict(features_of), sources=list(sources), files=files,
        object_names=names.objects or [], attribute_names=names.attributes or [],
    )  # fmt: skip
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    return manifest
