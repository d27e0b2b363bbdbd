"""Choose among equal and similar documents of all parts: the first one by the order of the corpus stays.

Equal documents have the same hash. Similar ones share a band of their MinHash signatures, and agree in a share of the
numbers that is the threshold or more; those that are linked by similar ones form a group. Keys are compared in groups
of `_AT_ONCE` by their remainder, so memory is bounded: some 100 bytes for each of those, and 9 bytes a document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from jaxtyping import Bool, Int64, UInt32, UInt64

from capt.pretrain.data.filters import DocumentFilters

PERMUTATIONS = 128
"""Numbers of a signature. The standard error of a similarity that is estimated by it is about .04."""
_MARGIN = 0.15
"""How far below the threshold candidates are looked for."""
_PERMUTED = 10_000
"""Members of a set that are permuted at a time: 5 MB of numbers."""


class Signatures:
    """Makes the signatures of sets whose Jaccard similarity from ``threshold`` on is of interest.

    A signature is cut into ``bands`` of ``rows`` numbers. Sets that share one band are candidates.
    """

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHash, MinHashLSH

        self._empty = MinHash(num_perm=PERMUTATIONS, seed=1, hashfunc=crc32, scheme="affine32")
        # A missed pair counts more than a candidate too many, which `_verified` drops.
        self.index = MinHashLSH(threshold=max(threshold - _MARGIN, 0.05), num_perm=PERMUTATIONS, weights=(0.2, 0.8))
        self.bands, self.rows = self.index.b, self.index.r

    def minhash(self, members: Iterable[str]) -> Any:
        """The ``MinHash`` of a set."""
        made = self._empty.copy()
        left = iter(members)
        while some := [member.encode() for member in islice(left, _PERMUTED)]:
            made.update_batch(some)
        return made

    def signature(self, members: Iterable[str]) -> UInt32[np.ndarray, " numbers"]:
        """The signature of a set."""
        return np.asarray(self.minhash(members).hashvalues, dtype="<u4")

    def in_bands(self, signature: UInt32[np.ndarray, " numbers"]) -> UInt64[np.ndarray, " bands"]:
        """A number for each band: equal where the bands are."""
        rows = (signature[band * self.rows : (band + 1) * self.rows] for band in range(self.bands))
        digests = (blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
        return np.frombuffer(b"".join(digests), dtype="<u8")


def words_in_a_row(words: list[str], n: int = 5) -> Iterator[str]:
    """Every sequence of n words; the whole text where it has fewer."""
    return (" ".join(words[i : i + n]) for i in range(max(1, len(words) - n + 1)))


_AT_ONCE = 1 << 23
_EDGES = 1 << 16

Keys = Callable[[int], UInt64[np.ndarray, "documents columns"]]
"""The keys of the documents of a part, by its number."""


@dataclass
class Kept:
    """Which documents stay (``mask``, over all parts), and of each step how many do not, and a pair as an example.

    A pair holds the number of the first document that was left out, and of the one that stays in its place.
    """

    mask: Bool[np.ndarray, " documents"]
    removed: dict[str, int] = field(default_factory=dict)
    pairs: dict[str, tuple[int, int]] = field(default_factory=dict)


def choose(parts: Sequence[Path], counts: Sequence[int], filters: DocumentFilters) -> Kept:
    """Decide for the documents of ``parts``, of which there are ``counts``, by ``filters.exact`` and ``filters.near``.

    With ``near`` equal documents are similar, so these are left out with or without ``exact``.
    """
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    kept = Kept(np.ones(first[-1], dtype=np.bool_))
    if filters.exact:
        _leave_out(kept, "exact", _equal(kept, first, lambda part: _hashes(parts[part])))
    if filters.near is not None:
        _leave_out(kept, "near", _similar(kept, first, parts, filters.near))
    return kept


def _leave_out(kept: Kept, step: str, pairs: Iterator[Int64[np.ndarray, "2 documents"]]) -> None:
    first: tuple[int, int] | None = None
    before = int(kept.mask.sum())
    for stays, goes in pairs:
        if len(goes):
            kept.mask[goes] = False
            at = int(goes.argmin())
            # The example is the first by number, whatever the order in which pairs come.
            if first is None or goes[at] < first[0]:
                first = (int(goes[at]), int(stays[at]))
    kept.removed[step] = before - int(kept.mask.sum())
    if first is not None:
        kept.pairs[step] = first


def _equal(kept: Kept, first: Int64[np.ndarray, " parts"], keys: Keys) -> Iterator[Int64[np.ndarray, "2 documents"]]:
    """The first document of each group of equal keys with each later one."""
    for documents, begins in _groups(kept, first, keys):
        place = np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))
        yield np.stack([documents[place[~begins]], documents[~begins]])


def _groups(
    kept: Kept, first: Int64[np.ndarray, " parts"], keys: Keys
) -> Iterator[tuple[Int64[np.ndarray, " documents"], Bool[np.ndarray, " documents"]]]:
    """Documents that stay so far, sorted by key and then by number, and whether each is the first of its key."""
    # One remainder at a time: equal keys have the same, and memory holds a part of all keys.
    rounds = -(-len(kept.mask) // _AT_ONCE)
    for remainder in range(rounds):
        numbers, found = [], []
        for part in range(len(first) - 1):
            # Only the first column decides the round; equal rows are equal in it.
            own = keys(part)
            wanted = (own[:, 0] % np.uint64(rounds) == remainder) & kept.mask[first[part] : first[part + 1]]
            numbers.append(first[part] + np.flatnonzero(wanted))
            found.append(own[wanted])
        documents, rows = np.concatenate(numbers), np.concatenate(found)
        order = np.lexsort(rows.T)  # which is stable
        documents, rows = documents[order], rows[order]
        begins = np.ones(len(documents), dtype=np.bool_)
        begins[1:] = (rows[1:] != rows[:-1]).any(axis=1)
        yield documents, begins


def _similar(
    kept: Kept, first: Int64[np.ndarray, " parts"], parts: Sequence[Path], threshold: float
) -> Iterator[Int64[np.ndarray, "2 documents"]]:
    """The first document of each group of similar ones with each later one."""
    from scipy.sparse import coo_array  # a twentieth of the start of every rank, which compares no documents
    from scipy.sparse.csgraph import connected_components

    links: list[Int64[np.ndarray, "2 links"]] = [np.zeros((2, 0), dtype=np.int64)]
    # Band by band: pairs that share any of them are candidates.
    for band in range(Signatures(threshold).bands):
        for documents, begins in _groups(kept, first, partial(_band, parts, first, band)):
            place = np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))
            later = np.flatnonzero(~begins)
            candidates = np.concatenate(
                [
                    np.stack([documents[place[later]], documents[later]]),  # with the first one that shares the band
                    np.stack([documents[later - 1], documents[later]]),  # and with the one before
                ],
                axis=1,
            )
            links.append(_verified(np.unique(candidates, axis=1), first, parts, threshold))
    # Similar documents form a group through each other, of which the first stays.
    linked = np.unique(np.concatenate(links, axis=1), axis=1)
    members, ends = np.unique(linked, return_inverse=True)
    ends = ends.reshape(2, -1)
    graph = coo_array((np.ones(ends.shape[1], dtype=np.int8), (ends[0], ends[1])), shape=(len(members), len(members)))
    _, group = connected_components(graph, directed=False)
    _, begin = np.unique(group, return_index=True)  # members are sorted, so that is the first one
    stays = members[begin[group]]
    yield np.stack([stays[members != stays], members[members != stays]])


def _verified(
    candidates: Int64[np.ndarray, "2 pairs"],
    first: Int64[np.ndarray, " parts"],
    parts: Sequence[Path],
    threshold: float,
) -> Int64[np.ndarray, "2 links"]:
    """The candidates whose signatures agree in a share of ``threshold`` or more."""
    agree = [np.zeros(0, dtype=np.bool_)]
    for begin in range(0, candidates.shape[1], _EDGES):
        one, other = (_signatures(numbers, first, parts) for numbers in candidates[:, begin : begin + _EDGES])
        agree.append((one == other).mean(axis=1) >= threshold)
    return candidates[:, np.concatenate(agree)]


def _signatures(
    numbers: Int64[np.ndarray, " documents"], first: Int64[np.ndarray, " parts"], parts: Sequence[Path]
) -> np.ndarray:
    rows = np.empty((len(numbers), PERMUTATIONS), dtype="<u4")
    part_of = np.searchsorted(first, numbers, side="right") - 1
    for part in np.unique(part_of):
        here = part_of == part
        # Only the rows that are asked for are read from the mapped file.
        stored = np.memmap(parts[part] / "signatures", dtype="<u4", mode="r").reshape(-1, PERMUTATIONS)
        rows[here] = stored[numbers[here] - first[part]]
    return rows


def _hashes(part: Path) -> UInt64[np.ndarray, "documents columns"]:
    return np.fromfile(part / "hashes", dtype="<u8").reshape(-1, 2)


def _band(
    parts: Sequence[Path], first: Int64[np.ndarray, " parts"], band: int, part: int
) -> UInt64[np.ndarray, "documents one"]:
    count = int(first[part + 1] - first[part])
    return np.fromfile(parts[part] / "bands", dtype="<u8", count=count, offset=8 * count * band).reshape(-1, 1)
