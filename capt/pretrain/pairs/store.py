"""The rows of a source on disk, which all ranks of a host map.

A folder holds one file for each array of `SourceRows`, and ``rows.json``. Ranks share the pages that they read, so that
a source may be larger than memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from capt.pretrain.base.arrays import ArrayFile, map_array
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.records import Count, Record, read_record
from capt.pretrain.base.verification import Verifier
from capt.pretrain.pairs.data_config import PairSource
from capt.pretrain.pairs.known import KnownPositives
from capt.pretrain.pairs.sources import EncodedTexts, Lists, SourceRows

RECORD = "rows.json"
VERSION = 2
INDEX = ("queries", "starts", "documents")
"""The arrays of `KnownPositives`."""


class RowsRecord(Record):
    """The content of ``rows.json``: the arrays beside it, and what was found while they were written."""

    version: int = VERSION
    digest: str = Field(max_length=64)
    arrays: dict[str, Annotated[tuple[str, Count], Field(strict=False)]]
    """Name -> the type of the numbers, and how many there are."""
    cut: Annotated[tuple[Count, Count], Field(strict=False)]
    """Queries and documents that are longer than allowed."""
    notes: dict[str, Count]
    remarks: list[str]
    unscored: str | None = None
    """The place of the first row without a teacher's scores, where others have them."""
    launch: str = ""
    """The start that has written it, where the content of the source is not known before it is read."""
    unused: Count = 0
    """Hard negatives that the rows have and the source does not use."""


def _hashed(arrays: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """The arrays that the digest of rows is of: the others follow from the texts, and are not always there."""
    return {name: kind for name, kind in arrays.items() if not name.startswith("known_") and "_hashes" not in name}


def digest_of_rows(arrays: Mapping[str, tuple[str, int]], hashes: Mapping[str, str]) -> str:
    """Return a SHA-256 of the types, the lengths and the hashes of the arrays of some rows."""
    listed = (f"{name} {dtype} {length} {hashes[name]}" for name, (dtype, length) in sorted(_hashed(arrays).items()))
    return hashlib.sha256("".join(listed).encode()).hexdigest()


def require_digest(folder: Path, record: RowsRecord, verifier: Verifier) -> None:
    """Refuse arrays that are not those of the record; all ranks of ``verifier`` hash them together."""
    names = list(_hashed(record.arrays))
    found = verifier.digests([folder / f"{name}.bin" for name in names])
    with verifier.ranks.synchronize_errors():
        if digest_of_rows(record.arrays, dict(zip(names, found, strict=True))) != record.digest:
            raise DataError(f"{folder}: damaged: remove {folder.parent}, it is then written anew")


def source_rows(source: PairSource, arrays: Mapping[str, np.ndarray], record: RowsRecord | None) -> SourceRows:
    """The rows of some arrays; without a record those that are not indexed yet."""
    queries, documents = (
        EncodedTexts(
            arrays[f"{name}_ids"], arrays[f"{name}_starts"], arrays[f"{name}_keys"], cut, arrays.get(f"{name}_hashes")
        )
        for name, cut in zip(("queries", "documents"), (0, 0) if record is None else record.cut, strict=True)
    )
    index = None
    if "known_queries" in arrays:
        index = KnownPositives(*(arrays[f"known_{name}"] for name in INDEX))
    return SourceRows(
        source=source,
        queries=queries,
        documents=documents,
        query=arrays["query"],
        positives=Lists(arrays["positives"], arrays["positive_starts"]),
        negatives=Lists(arrays["negatives"], arrays["negative_starts"]),
        scores=arrays.get("scores"),
        positive_scores=arrays.get("positive_scores"),
        negative_scores=arrays.get("negative_scores"),
        digest="" if record is None else record.digest,
        index=index,
    )


def map_rows(folder: Path, arrays: Mapping[str, tuple[str, int]]) -> dict[str, np.ndarray]:
    """The arrays in ``folder``, mapped. Raises ``DataError`` where a file is missing or of another size."""
    remedy = f": remove {folder}, it is then written anew"
    return {
        name: map_array(folder / f"{name}.bin", ArrayFile(dtype, (length,), has_header=False), remedy)
        for name, (dtype, length) in arrays.items()
    }


def open_rows(folder: Path, source: PairSource) -> tuple[SourceRows, RowsRecord]:
    """The rows in ``folder``, mapped. Raises ``DataError`` where a file is missing or of another size."""
    record = read_record(RowsRecord, folder / RECORD, "; remove the folder", error=DataError)
    return source_rows(source, map_rows(folder, record.arrays), record), record
