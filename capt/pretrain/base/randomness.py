"""Random numbers that belong to a name and a sample, so that no result depends on who draws them, or in which order."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np
from jaxtyping import UInt64

UInt64Array = UInt64[np.ndarray, "..."]

_SAMPLE_BITS = 40
_EPOCH_BITS = 24
EPOCHS = 1 << _EPOCH_BITS
"""The number of times that a text may be read."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNMIX_1 = np.uint64(pow(0xBF58476D1CE4E5B9, -1, 1 << 64))
_UNMIX_2 = np.uint64(pow(0x94D049BB133111EB, -1, 1 << 64))


def mix64(x: UInt64Array) -> UInt64Array:
    """The finaliser of SplitMix64 (Steele et al. 2014): every input bit moves every output bit; a bijection."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    x = x ^ (x >> np.uint64(31))
    return x


def unmix64(x: UInt64Array) -> UInt64Array:
    """The inverse of `mix64`."""
    # x ^ (x >> 31) is undone by the shifts 31 and 62, since 93 is beyond the word; the others likewise.
    x = x ^ (x >> np.uint64(31)) ^ (x >> np.uint64(62))
    x = x * _UNMIX_2
    x = x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))
    x = x * _UNMIX_1
    x = x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))
    return x


def derive(seed: int, *names: int | str) -> int:
    """A 63-bit seed that depends on all of ``names`` (stable across Python versions and machines)."""
    text = "/".join(str(name) for name in (seed, *names))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=1024)
def stream_key(name: str, seed: int) -> int:
    """A 64-bit key for the random stream ``name`` of a job with seed ``seed``; the same on every machine."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def generator_for(name: str, seed: int, epoch: int, sample: int) -> np.random.Generator:
    """The generator of one sample: Philox-4x64 keyed with ``(name, seed)`` and ``(epoch, sample)``.

    Counter-based (Salmon et al. 2011): different keys are independent streams, and making one costs microseconds, so
    every sample of every epoch owns its stream, whatever rank or worker handles it. ``epoch < 2**24``,
    ``sample < 2**40``.
    """
    if not (0 <= epoch < 1 << _EPOCH_BITS and 0 <= sample < 1 << _SAMPLE_BITS):
        raise AssertionError(f"epoch {epoch} or sample {sample} is outside 2**{_EPOCH_BITS} x 2**{_SAMPLE_BITS}")
    key = np.array([stream_key(name, seed), epoch << _SAMPLE_BITS | sample], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
