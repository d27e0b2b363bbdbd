"""Digests of the rows of a step that do not depend on how ranks and micro-batches share them.

The digest of a set of rows is the sum modulo 2^64 of a hash of each, so the digests of parts add up to that of the
whole. The hash of an id is a bijection of 64 bits: where one id is missing, one too many, or in the place of another,
the difference of two digests tells which (`find_exchange`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int64, UInt64

from pretrain.base.randomness import GOLDEN, UInt64Array, mix64, unmix64

Ids = Int64[np.ndarray, "..."]


def hash_ids(ids: Ids) -> UInt64Array:
    """The hash of each id."""
    return mix64(np.asarray(ids).astype(np.uint64) + GOLDEN)


def digest_ids(ids: Ids) -> int:
    """``sum_i hash(ids_i) mod 2^64``: the same for the same ids in any order; an id that comes twice counts twice."""
    return int(hash_ids(ids).sum(dtype=np.uint64))


def digest_contents(ids: Ids, arrays: Sequence[np.ndarray]) -> int:
    """A digest, modulo 2^32, of rows: of each its id and its row of each array, whose values are compared bit by bit.

    A row of an array enters by a linear hash with random odd factors, which a change of one element always changes.
    """
    rows = hash_ids(ids)
    for number, array in enumerate(arrays):
        bits = _bits(array.reshape(len(rows), -1))
        rows = mix64(rows ^ (bits @ _factors(number, bits.shape[1])))
    return int(rows.sum(dtype=np.uint64)) & 0xFFFFFFFF


def _bits(array: np.ndarray) -> UInt64[np.ndarray, "n k"]:
    if array.dtype.kind == "f":
        array = array.view(f"u{array.dtype.itemsize}")
    return array.astype(np.uint64)


@lru_cache(maxsize=64)
def _factors(number: int, width: int) -> UInt64[np.ndarray, " k"]:
    places = np.arange(width, dtype=np.uint64) + np.uint64(number << 40)
    return mix64(places * GOLDEN + GOLDEN) | np.uint64(1)


def find_exchange(
    planned: Int64[np.ndarray, " n"], rows: int, digest: int, samples: int
) -> tuple[int | None, int | None] | None:
    """Which id of ``0 .. samples - 1`` was used that was not ``planned``, and which planned one was not.

    ``rows`` ids of this ``digest`` were used. Either is None where an id was only added or only left out. None is
    returned where more ids differ than one, which cannot be told from digests.
    """
    difference = np.uint64((digest - digest_ids(planned)) % (1 << 64))
    hashes = hash_ids(planned)
    if rows == len(planned) - 1:
        lost = np.flatnonzero(hashes + difference == 0)
        return (None, int(planned[lost[0]])) if len(lost) else None
    if rows == len(planned) + 1:
        hashes = np.zeros(1, dtype=np.uint64)
    elif rows != len(planned):
        return None
    candidates = unmix64(hashes + difference) - GOLDEN
    found = np.flatnonzero(candidates < samples)
    if not len(found) or (rows == len(planned) and difference == 0):
        return None
    used = int(candidates[found[0]])
    return used, (int(planned[found[0]]) if rows == len(planned) else None)
