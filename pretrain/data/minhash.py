"""MinHash signatures of sets of short texts, by ``datasketch``, and the bands by which similar ones are found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np
from jaxtyping import UInt32, UInt64

PERMUTATIONS = 128
"""Numbers of a signature. The standard error of a similarity that is estimated by it is about .04."""
_MARGIN = 0.15
"""How far below the threshold candidates are looked for."""
_AT_ONCE = 10_000
"""Members of a set that are permuted at a time: 5 MB of numbers."""


class Signatures:
    """Makes the signatures of sets whose Jaccard similarity from ``threshold`` on is of interest.

    A signature is cut into ``bands`` of ``rows`` numbers. Sets that share one band are candidates.
    """

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHash, MinHashLSH

        self._empty = MinHash(num_perm=PERMUTATIONS, seed=1, hashfunc=crc32, scheme="affine32")
        self.index = MinHashLSH(threshold=max(threshold - _MARGIN, 0.05), num_perm=PERMUTATIONS, weights=(0.2, 0.8))
        self.bands, self.rows = self.index.b, self.index.r

    def minhash(self, members: Iterable[str]) -> Any:
        """The ``MinHash`` of a set."""
        made = self._empty.copy()
        left = iter(members)
        while some := [member.encode() for member in islice(left, _AT_ONCE)]:
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
