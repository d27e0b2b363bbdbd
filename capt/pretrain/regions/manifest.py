"""``manifest.json`` of a region store, which says what arrays a store has."""

from __future__ import annotations

import json
import logging
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from capt.pretrain.base.arrays import ArrayFile
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import file_in, write_bytes
from capt.pretrain.base.locks import make_folder_once
from capt.pretrain.base.records import Count, Record, read_record
from capt.pretrain.base.stores import copy_to, look_up, read_small, without_secrets
from capt.pretrain.base.verification import ExpectedFile

logger = logging.getLogger(__name__)

_LARGEST_MANIFEST = 64 << 20
"""Bytes: class names and sources of any store that was seen have less than one."""


MANIFEST = "manifest.json"
LONGEST_NAME = 1024
"""Bytes of a picture's name."""

FeatureType = Literal["fp16", "fp32"]


class ArrayRecord(Record):
    """A file of the store: its length in bytes and its SHA-256."""

    bytes: Count
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class PictureSource(Record):
    """A file or folder that pictures were read from.

    Attributes:
        name: its path.
        sha256: of a file, or of the names and files of a folder's pictures.
        pictures: that are in the store.
        read_as: what the fields of a feature file were taken for.
        left_out: rows or pictures that could not be used, each with the reason.
    """

    name: Annotated[str, Field(max_length=4096)]
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    pictures: Count
    read_as: str = ""
    left_out: list[str] = Field(default=[])


class StoreShape(Record):
    """The numbers from which the types and shapes of a store's arrays follow.

    Attributes:
        pictures: how many there are.
        regions: how many all pictures have together.
        feature_size: columns of the features.
        feature_dtype: type in which features are stored.
        name_bytes: bytes of the longest name of a picture.
        object_classes: one more than the largest object class; 0 without object labels.
        attribute_classes: the same for attributes.
    """

    pictures: Annotated[int, Field(gt=0, le=1 << 40)]
    regions: Annotated[int, Field(gt=0, le=1 << 40)]
    feature_size: Annotated[int, Field(gt=0, le=1 << 20)]
    feature_dtype: FeatureType
    name_bytes: Annotated[int, Field(gt=0, le=LONGEST_NAME)]
    object_classes: Annotated[int, Field(ge=0, le=1 << 31)]
    attribute_classes: Annotated[int, Field(ge=0, le=1 << 31)]

    def arrays(self) -> dict[str, ArrayFile]:
        """The arrays by name; each is the file ``NAME.npy``."""
        feature = {"fp16": "<f2", "fp32": "<f4"}[self.feature_dtype]
        found = {
            "offsets": ArrayFile("<i8", (self.pictures + 1,)),
            "sizes": ArrayFile("<i4", (self.pictures, 2)),
            "names": ArrayFile(f"|S{self.name_bytes}", (self.pictures,)),
            "name_rows": ArrayFile("<i8", (self.pictures,)),
            "boxes": ArrayFile("<f4", (self.regions, 4)),
            "features": ArrayFile(feature, (self.regions, self.feature_size)),
        }
        for what, classes in (("object", self.object_classes), ("attribute", self.attribute_classes)):
            if classes:
                found[f"{what}_ids"] = ArrayFile("<i4", (self.regions,))
                found[f"{what}_scores"] = ArrayFile("<f4", (self.regions,))
        return found


class StoreManifest(StoreShape):
    """``manifest.json`` of a store.

    Attributes:
        format: the layout's version.
        most_regions: how many the picture with the most has.
        features_of: what made the features: ``backend`` and whatever decides its output (weights' hash, preprocessing).
            Stores whose ``features_of`` differ are never mixed.
        sources: what was imported.
        files: by name.
        object_names: of object classes in the order of their numbers; empty where they are not known.
        attribute_names: the same for attributes.
    """

    format: Literal[1] = 1
    most_regions: Count
    features_of: dict[str, Any]
    sources: list[PictureSource]
    files: dict[str, ArrayRecord]
    object_names: list[str] = Field(default=[])
    attribute_names: list[str] = Field(default=[])

    @property
    def key(self) -> str:
        """A digest of the content: equal for stores that hold the same."""
        files = {name: file.sha256 for name, file in sorted(self.files.items())}
        return sha256(json.dumps([self.features_of, files], sort_keys=True).encode()).hexdigest()

    def records(self) -> dict[str, ExpectedFile]:
        """The files of the arrays, as `capt.pretrain.base.verification.Verifier` takes them."""
        return {name: ExpectedFile(file.bytes, file.sha256) for name, file in self.files.items()}


def read_manifest(folder: Path) -> StoreManifest:
    """The manifest of the store in ``folder``.

    Raises:
        DataError: there is no store, the manifest is damaged, or the files that it lists are not those of its shape.
    """
    try:
        path = file_in(folder, MANIFEST)
    except OSError:
        path = None
    if path is None:
        raise DataError(f"{folder}: no region store (no {MANIFEST}); capt regions import makes one")
    # Each file has one possible length by the counts of the manifest.
    manifest = read_record(StoreManifest, path, error=DataError)
    wanted = {f"{name}.npy": array.length for name, array in manifest.arrays().items()}
    listed = {name: file.bytes for name, file in manifest.files.items()}
    for name in sorted({*wanted, *listed}):
        if wanted.get(name) != listed.get(name):
            raise DataError(
                f"{path}: damaged: {name[:100]!r} should have {wanted.get(name, 'no')} bytes by the counts and has "
                f"{listed.get(name, 'none')} by the list of files; import the store again"
            )
    return manifest


def fetched(url: str, cache: Path) -> Path:
    """Return this host's copy of the region store at the address ``url``, made once for all its jobs and processes.

    A copy is kept as ``regions/DIGEST`` of the cache by the digest of its manifest, so that a store that was made again
    is fetched again. Its files are memory-mapped: the whole store must fit on the host's disk.

    Raises:
        DataError: there is no region store, or the store gives other bytes than the manifest says.
    """
    url = url.rstrip("/")
    # The digest of the manifest names the copy: it holds the hashes of all other files.
    content = read_small(f"{url}/{MANIFEST}", limit=_LARGEST_MANIFEST)
    copy = cache / "regions" / sha256(content).hexdigest()

    def write(partial: Path) -> None:
        write_bytes(partial / MANIFEST, content)
        # The manifest is read as that of any store, with the same checks, before a large file is fetched.
        records = read_manifest(partial).records()
        size = sum(record.size for record in records.values())
        logger.info("fetching the region store %s, %s bytes, into %s", without_secrets(url), f"{size:,}", copy)
        for name, record in records.items():
            file = look_up(f"{url}/{name}")
            with (partial / name).open("wb") as out:
                digest = copy_to(file, out)
            if (file.size, digest) != (record.size, record.sha256):
                raise DataError(
                    f"{file}: expected {record.size:,} bytes of SHA-256 {record.sha256}, the store gave "
                    f"{file.size:,} of {digest}: it was changed or damaged; copy the region store there again"
                )

    make_folder_once(copy, write)
    return copy
