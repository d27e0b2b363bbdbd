"""Encode texts into a store: sorted by length, shared by all ranks, nothing twice."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float

from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.distributed import barrier, device, gather_objects, rank, synchronize_errors, world_size
from capt.pretrain.base.errors import counted
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.base.parallel import ProgressCallback, batched
from capt.pretrain.base.stores import is_url
from capt.pretrain.engine.task import Role
from capt.pretrain.retrieval.bucket import BucketVectors
from capt.pretrain.retrieval.encoders import TextEncoder
from capt.pretrain.retrieval.options import EncodeOptions, default_store
from capt.pretrain.retrieval.quantize import FEW, Ranges
from capt.pretrain.retrieval.search import unit_rows
from capt.pretrain.retrieval.store import (
    DTYPES,
    FLOATS,
    DType,
    Pair,
    VectorIdentity,
    Vectors,
    VectorStore,
    require_dtype,
)

logger = logging.getLogger(__name__)

WINDOW = 1 << 14
"""Texts that are sorted by length together, and in memory at the same time."""
TOKENS = {"cpu": 2048, "cuda": 65_536}
"""Tokens of a batch at most, padding included, by kind of device."""
_OUTSIDE = 0.01
"""Share of the numbers outside of the ranges of int8, above which it is said."""
_TELL = 10.0
"""Seconds between two lines of the log."""

Item = TypeVar("Item", str, Pair)
RowItem = TypeVar("RowItem", str, Pair, contravariant=True)


@runtime_checkable
class RowEncoder(Protocol[RowItem]):
    """A model that makes a row of numbers of a text (`TextEncoder`), or of a pair of texts (`PairScorer`)."""

    def identity(self, role: Role, dtype: DType = "fp32") -> VectorIdentity:
        """Everything beside the text that decides its row."""
        ...

    def lengths(self, texts: Sequence[RowItem], role: Role) -> list[int]:
        """The number of tokens of each."""
        ...

    def encode(self, texts: Sequence[RowItem], role: Role) -> Float[np.ndarray, "n d"]:
        """The row of each."""
        ...


def stored_vectors(options: EncodeOptions, identity: VectorIdentity) -> Vectors:
    """The vectors of ``identity`` in the store that is chosen, else in that of this host. Raises ``DataError``."""
    root = options.store or default_store()
    if isinstance(root, str) and is_url(root):
        return BucketVectors(root, identity, default_cache(), options.cache_limit)
    return VectorStore(Path(root), identity)


def embed(
    encoder: RowEncoder[Item],
    texts: Iterable[Item],
    role: Role,
    options: EncodeOptions,
    progress: ProgressCallback | None = None,
    total: int = 0,
) -> Vectors:
    """A store with a vector of every text. Collective; every rank brings the same texts.

    Batches are made of a window of texts whatever is stored already, and dealt to the ranks in turn. So a vector does
    not depend on the number of ranks or on kills, which take whole batches. Stored vectors are compared with their
    checksums first: a damaged one is said, and encoded again. Vectors of a model of cosines are quantized at length 1;
    the ranges of int8 are those of the first window that the store gets.

    Args:
        encoder: the model.
        texts: texts or pairs, as the model takes them, in any order, any of them several times.
        role: decides the prompt.
        options: where and how.
        progress: called with texts done and ``total``.
        total: their number, as far as it is known.

    Raises:
        DataError: a vector is not finite, or the store is damaged.
    """
    with synchronize_errors(patient=True):
        store = stored_vectors(options, encoder.identity(role, require_dtype(options.dtype, DTYPES)))
    seen: set[bytes] = set()
    pace = _Pace(total, progress)
    tokens = options.tokens or TOKENS[device().type]
    # Before anything is encoded: a text whose vector is damaged must not count as done.
    _repair(store)
    windows = batched(texts, WINDOW)
    first: list[Item] = []
    held: list[_Batch] = []
    # Another process may have calibrated the store after one rank has opened it and before another one has.
    if options.dtype == "int8" and any(gather_objects(store.ranges is None)):
        with synchronize_errors(patient=True):
            store.require_ranges()
            first = next(windows, [])
            distinct = {text_hash(text): text for text in first}
            held = list(_encoded(encoder, distinct, role, tokens, store))
            seen.update(distinct)
        _calibrate([rows for _, rows in held], store.identity.dimension, store)
    with synchronize_errors(patient=True):
        try:
            for names, rows in held:
                store.add(names, rows)
            if first:
                pace.done(len(first))
            for window in windows:
                distinct = {name: text for text in window if (name := text_hash(text)) not in seen}
                seen.update(distinct)
                _embed_window(encoder, distinct, role, tokens, store)
                pace.done(len(window))
        # Also after an error: what was encoded until then is kept.
        finally:
            store.close()
    # All ranks have closed their files, so that each finds what the others have written.
    barrier()
    added = sum(gather_objects(store.added))
    _tell_outside(store, added)
    with synchronize_errors(patient=True):
        store.reload()
        # Every rank knows what is in the store; one writes the list of it.
        if rank() == 0:
            store.finish(added)
    pace.end(added)
    return store


def _repair(store: Vectors) -> None:
    with synchronize_errors(patient=True):
        damaged = store.repair(rank(), world_size())
    total = sum(gather_objects(damaged))
    if total:
        if rank() == 0:
            logger.warning("%s: %s stored vectors were damaged, and are encoded again", store.folder, f"{total:,}")
        store.reread()


def _calibrate(blocks: Sequence[Float[np.ndarray, "_ d"]], dimension: int, store: Vectors) -> None:
    """Write the ranges of the vectors of all ranks into the store; ``blocks`` are those of this rank. Collective."""
    ranges = Ranges.of(blocks, dimension).gathered()
    if not ranges.count:
        return
    if rank() == 0 and ranges.count < FEW:
        logger.warning(
            "%s: the ranges of int8 come from %s alone, which says little of others: remove the folder and begin with "
            "a hundred or more",
            store.folder, counted(ranges.count, "text"),
        )  # fmt: skip
    # One rank writes; then all take what is in the store, which another process may have written first.
    for mine in (rank() == 0, rank() != 0):
        with synchronize_errors(patient=True):
            if mine:
                store.calibrate(ranges)


def _tell_outside(store: Vectors, added: int) -> None:
    """Warn where many numbers lay outside of the ranges of int8: their extremes are lost. Collective."""
    outside, numbers = sum(gather_objects(store.outside)), added * store.identity.dimension
    if rank() == 0 and outside > _OUTSIDE * numbers:
        assert store.ranges is not None, "without ranges nothing is outside"
        logger.warning(
            "%s: %.1f %% of the numbers of these vectors lie outside of the ranges of int8, which come from %s: remove "
            "the folder and begin with texts of all kinds",
            store.folder, 100 * outside / numbers, counted(store.ranges.count, "text"),
        )  # fmt: skip


def _embed_window(
    encoder: RowEncoder[Item], distinct: dict[bytes, Item], role: Role, tokens: int, store: Vectors
) -> None:
    if all(name in store for name in distinct):  # nothing to tokenize
        return
    for names, rows in _encoded(encoder, distinct, role, tokens, store):
        store.add(names, rows)


_Batch = tuple[list[bytes], Float[np.ndarray, "_ d"]]
"""The hashes of some texts, and their vectors."""


def _encoded(
    encoder: RowEncoder[Item], distinct: dict[bytes, Item], role: Role, tokens: int, store: Vectors
) -> Iterator[_Batch]:
    """The vectors of this rank's part of the texts, without those that the store has."""
    names = list(distinct)
    lengths = encoder.lengths(list(distinct.values()), role)
    # Names break ties, so that the order does not depend on that of the texts.
    order = sorted(range(len(names)), key=lambda i: (lengths[i], names[i]), reverse=True)
    for number, batch in enumerate(batches(order, lengths, tokens)):
        if number % world_size() != rank():
            continue
        # A batch keeps its place, but loses the texts that are there: kills and ranks do not move the others.
        missing = [names[i] for i in batch if names[i] not in store]
        if missing:
            rows = encoder.encode([distinct[name] for name in missing], role)
            # The steps of int8 are those of directions, where directions are compared.
            if store.identity.dtype not in FLOATS and isinstance(encoder, TextEncoder):
                rows = encoder.scoring.rows(rows)
            yield missing, rows


def encode_in_batches(encoder: TextEncoder, texts: Sequence[str], role: Role) -> Float[np.ndarray, "n d"]:
    """Return the vectors of texts in their order, computed by this rank alone and stored nowhere.

    They are as long as the export of the model has them.
    """
    out = rows_in_batches(encoder, texts, role, encoder.dimension)
    return unit_rows(out) if encoder.exports_unit_rows else out


def rows_in_batches(
    encoder: RowEncoder[Item], texts: Sequence[Item], role: Role, dimension: int
) -> Float[np.ndarray, "n d"]:
    """Return the row of each text or pair as `encode` gives it, computed by this rank alone and stored nowhere."""
    out = np.empty((len(texts), dimension), dtype=np.float32)
    lengths = encoder.lengths(texts, role)
    order = sorted(range(len(texts)), key=lengths.__getitem__, reverse=True)
    for batch in batches(order, lengths, TOKENS[device().type]):
        out[batch] = encoder.encode([texts[i] for i in batch], role)
    return out


def batches(order: Sequence[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Cut ``order``, which goes from long to short, into batches of at most ``tokens`` with their padding."""
    batch: list[int] = []
    for i in order:
        # The first text is the longest, and all are padded to it.
        if batch and lengths[batch[0]] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def rows_of(store: Vectors, texts: Iterable[Item]) -> Float[np.ndarray, "n d"]:
    """The vectors of texts, or the scores of pairs, that are in the store."""
    return store.vectors([text_hash(text) for text in texts])


class _Pace:
    """Says how many texts are done, how many a second, and how long the rest takes."""

    def __init__(self, total: int, progress: ProgressCallback | None) -> None:
        self._total, self._progress = total, progress
        self._begin = self._logged = time.monotonic()
        self._count = 0

    def done(self, count: int) -> None:
        self._count += count
        if self._progress is not None:
            self._progress(self._count, max(self._total, self._count))
        now = time.monotonic()
        if rank() == 0 and now - self._logged > _TELL:
            self._logged = now
            rate = self._count / (now - self._begin)
            left = f", {(self._total - self._count) / rate:,.0f} s left" if self._total > self._count else ""
            logger.info("%s texts, %.0f a second%s", f"{self._count:,}", rate, left)

    def end(self, encoded: int) -> None:
        """Say how many texts all ranks have encoded."""
        if rank() == 0 and encoded:
            seconds = time.monotonic() - self._begin
            logger.info("encoded %s in %.1f s (%.0f a second)", counted(encoded, "text"), seconds, encoded / seconds)
