"""Choose among equal documents of all parts: the first one by the order of the corpus stays.

Equal documents have the same hash. Hashes are compared in groups of `_AT_ONCE` by their remainder, so memory is
bounded: some 100 bytes for each of those, and 9 bytes a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from capt.pretrain.base.arrays import map_whole

_AT_ONCE = 1 << 23


@dataclass
class Kept:
    """The documents that stay.

    Attributes:
        mask: over all documents of all parts, in the order of the parts.
        pair: the number of the first document that was left out, and of the one that stays in its place.
    """

    mask: Bool[np.ndarray, " documents"]
    pair: tuple[int, int] | None = None

    @property
    def removed(self) -> int:
        """The number of documents that were left out."""
        return int(len(self.mask) - self.mask.sum())


def choose(parts: Sequence[Path], counts: Sequence[int]) -> Kept:
    """Keep of equal documents of ``parts``, of which there are ``counts``, the first."""
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    kept = Kept(np.ones(first[-1], dtype=np.bool_))
    for documents, begins in _groups(first, parts):
        stays = documents[np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))[~begins]]
        goes = documents[~begins]
        kept.mask[goes] = False
        # The example is the first by number, whatever the order in which groups come.
        if len(goes) and (kept.pair is None or goes.min() < kept.pair[0]):
            kept.pair = (int(goes.min()), int(stays[goes.argmin()]))
    return kept


def _groups(
    first: Int64[np.ndarray, " parts"], parts: Sequence[Path]
) -> Iterator[tuple[Int64[np.ndarray, " documents"], Bool[np.ndarray, " documents"]]]:
    """Documents, sorted by hash and then by number, and whether each is the first of its hash."""
    # One remainder at a time: equal hashes have the same, and memory holds a part of all hashes.
    rounds = -(-int(first[-1]) // _AT_ONCE)
    for remainder in range(rounds):
        numbers, found = [], []
        for part, folder in enumerate(parts):
            # Only the first column decides the round; equal rows are equal in it.
            own: UInt64[np.ndarray, "documents 2"] = map_whole(folder / "hashes", "<u8").reshape(-1, 2)
            wanted = own[:, 0] % np.uint64(rounds) == remainder
            numbers.append(first[part] + np.flatnonzero(wanted))
            found.append(own[wanted])
        documents, rows = np.concatenate(numbers), np.concatenate(found)
        order = np.lexsort(rows.T)  # which is stable
        documents, rows = documents[order], rows[order]
        begins = np.ones(len(documents), dtype=np.bool_)
        begins[1:] = (rows[1:] != rows[:-1]).any(axis=1)
        yield documents, begins
