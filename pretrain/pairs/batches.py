"""Batches of pairs: which rows a step has, what of them each rank takes, and the tokens of their texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int64
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from capt.pretrain.base.randomness import stream_key
from capt.pretrain.data.sampler import MixedSampler, Sampler, micro_batches
from capt.pretrain.pairs.sources import SourceRows


class PaddedTexts(NamedTuple):
    """Texts of a micro-batch, padded on the right; ``padded`` says whether any row is."""

    tokens: Int[Tensor, "n L"]
    padded: bool


@dataclass(frozen=True)
class PairBatch:
    """One micro-batch: ``n`` queries, their positives, and ``k`` hard negatives.

    Attributes:
        tokens: ids of all texts, one behind the other: queries, positives, negatives.
        lengths: tokens of each text.
        ids: row of each query, counted over all sources.
        keys: what the query and its positive are; a document with the same key is no negative of the query.
        negative_keys: what each negative is.
        owners: place of the query in this micro-batch whose negative each is.
        contents: a digest of all texts of each row.
        source: number of the source that the step comes from.
        step_tokens: tokens of the whole step, on all ranks, padding not counted.
    """

    tokens: Int[Tensor, " total"]
    lengths: Int[Tensor, " texts"]
    ids: Int[Tensor, " n"]
    keys: Int[Tensor, " n"]
    negative_keys: Int[Tensor, " k"]
    owners: Int[Tensor, " k"]
    contents: Int[Tensor, " n"]
    source: int
    step_tokens: int

    def texts(self, pad_id: int, device: torch.device) -> tuple[PaddedTexts, PaddedTexts]:
        """The queries, and the positives with the negatives behind them, on ``device``."""
        n = len(self.ids)
        bound = int(self.lengths[:n].sum())
        return (
            _rows(self.tokens[:bound], self.lengths[:n], pad_id, device),
            _rows(self.tokens[bound:], self.lengths[n:], pad_id, device),
        )


def padded(texts: Sequence[np.ndarray], pad_id: int, device: torch.device) -> PaddedTexts:
    """Rows of the tokens of some texts on ``device``."""
    lengths = torch.tensor([len(text) for text in texts])
    return _rows(torch.from_numpy(np.concatenate(texts)), lengths, pad_id, device)


def _rows(tokens: Tensor, lengths: Tensor, pad_id: int, device: torch.device) -> PaddedTexts:
    """Make rows of texts that lie one behind the other, on the host, where their lengths are known."""
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    rows = torch.full(real.shape, pad_id, dtype=torch.int64)
    rows[real] = tokens.long()
    return PaddedTexts(rows.to(device, non_blocking=True), not bool(real.all()))


class Drawn(NamedTuple):
    """Rows of one source as a visit draws them: text numbers, and the place of each negative's query."""

    queries: Int64[np.ndarray, " n"]
    positives: Int64[np.ndarray, " n"]
    negatives: Int64[np.ndarray, " k"]
    owners: Int64[np.ndarray, " k"]


def draw(source: SourceRows, rows: Int64[np.ndarray, " n"], visits: Int64[np.ndarray, " n"], seed: int) -> Drawn:
    """Draw a positive and the hard negatives of each row for its ``visits``-th visit (counted from 0).

    The visits of a row go through its positives one after the other, and through its negatives in groups of
    ``negatives``; each row begins at a place of its own. A row with fewer negatives gives them all.
    """
    begin = stream_key(f"visit/{source.source.name}", seed) % 2**31 + rows
    ones = np.ones(len(rows), dtype=np.int64)
    positives = source.positives.take(rows, begin + visits, ones)
    number = np.minimum(source.negatives.counts[rows], source.source.negatives or 0)
    negatives = source.negatives.take(rows, begin + visits * number, number)
    return Drawn(source.query[rows], positives, negatives, np.repeat(np.arange(len(rows)), number))


def shared_keys(
    queries: Int64[np.ndarray, " n"], positives: Int64[np.ndarray, " n"], negatives: Int64[np.ndarray, " k"]
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " k"]]:
    """Give all samples of a step that share a query or a positive one key, and their documents the same.

    All arguments are keys of texts. The key of a sample that shares nothing is that of its positive, so that a queue
    finds the same document again in other steps.
    """
    n = len(queries)
    texts, place = np.unique(np.concatenate([queries, ~positives]), return_inverse=True)  # ~: a side of its own
    samples = np.tile(np.arange(n), 2)
    edges = coo_array((np.ones(2 * n, dtype=np.int8), (samples, n + place)), shape=(n + len(texts), n + len(texts)))
    _, group = connected_components(edges, directed=False)
    key_of_group = np.full(group.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(key_of_group, group[:n], positives)
    keys = key_of_group[group[:n]]
    documents, first = np.unique(positives, return_index=True)
    found = np.searchsorted(documents, negatives).clip(max=n and len(documents) - 1)
    return keys, np.where(documents[found] == negatives, keys[first[found]], negatives)


class Assembler:
    """Makes this rank's micro-batches of the step that begins at any sample; a pure function of its arguments.

    Args:
        sources: rows of each source.
        sampler: the order of the rows, numbered one source behind the other.
        batch: samples of a step, over all ranks.
        parts: micro-batches of a step; with ``bucketing`` their sizes differ.
        world: number of ranks.
        rank: this one.
        seed: of the draws of positives and negatives.
        bucketing: whether micro-batches hold texts of similar length; their sizes differ then.
    """

    def __init__(
        self, sources: Sequence[SourceRows], sampler: Sampler | MixedSampler, *, batch: int, parts: int, world: int,
        rank: int, seed: int, bucketing: bool,
    ) -> None:  # fmt: skip
        self._sources, self._sampler = sources, sampler
        self._firsts = np.cumsum([0, *map(len, sources)])
        self._shape = (batch, parts, world, rank)
        self._seed, self._bucketing = seed, bucketing

    def __call__(self, start: int) -> list[PairBatch]:
        """The micro-batches of the step whose first sample is ``start``."""
        samples = np.arange(start, start + self._shape[0], dtype=np.int64)
        visits, ids = self._sampler.locate(samples)
        number = int(np.searchsorted(self._firsts, ids[0], side="right")) - 1
        source, first = self._sources[number], int(self._firsts[number])
        drawn = draw(source, ids - first, visits, self._seed)
        keys, negative_keys = shared_keys(
            source.queries.keys[drawn.queries], source.documents.keys[drawn.positives],
            source.documents.keys[drawn.negatives],
        )  # fmt: skip
        lengths = source.queries.lengths[drawn.queries] + source.documents.lengths[drawn.positives]
        np.add.at(lengths, drawn.owners, source.documents.lengths[drawn.negatives])
        parts = [part - start for part in micro_batches(start, *self._shape)]
        if self._bucketing:
            parts = by_length(np.concatenate(parts), lengths, len(parts))
        return [
            batch_of(source, drawn, part, ids, keys, negative_keys, number=number, step_tokens=int(lengths.sum()))
            for part in parts
        ]


def by_length(
    samples: Int64[np.ndarray, " n"], lengths: Int64[np.ndarray, " step"], parts: int
) -> list[Int64[np.ndarray, " _"]]:
    """Divide ``samples`` into ``parts`` that hold texts of similar length and about the same number of tokens."""
    ordered = samples[np.argsort(-lengths[samples], kind="stable")]
    tokens = np.cumsum(lengths[ordered])
    bounds = np.searchsorted(tokens, tokens[-1] * np.arange(1, parts) / parts, side="left") + 1
    n, earlier = len(ordered), 0
    for number, bound in enumerate(bounds.tolist()):  # none is empty
        earlier = bounds[number] = min(max(bound, earlier + 1), n - (parts - 1 - number))
    return np.split(ordered, bounds)


def batch_of(
    source: SourceRows, drawn: Drawn, part: Int64[np.ndarray, " m"], ids: Int64[np.ndarray, " n"],
    keys: Int64[np.ndarray, " n"], negative_keys: Int64[np.ndarray, " k"], *, number: int, step_tokens: int,
) -> PairBatch:  # fmt: skip
    """The micro-batch of the samples at the places ``part`` of what was drawn."""
    place = np.full(len(ids), -1)
    place[part] = np.arange(len(part))
    mine = np.flatnonzero(place[drawn.owners] >= 0)
    mine = mine[np.argsort(place[drawn.owners[mine]], kind="stable")]
    owners = place[drawn.owners[mine]]
    texts = [
        *source.queries.tokens(drawn.queries[part]),
        *source.documents.tokens(drawn.positives[part]),
        *source.documents.tokens(drawn.negatives[mine]),
    ]
    return PairBatch(
        tokens=torch.from_numpy(np.concatenate(texts)),
        lengths=torch.tensor([len(text) for text in texts]),
        ids=torch.from_numpy(ids[part]),
        keys=torch.from_numpy(keys[part]),
        negative_keys=torch.from_numpy(negative_keys[mine]),
        owners=torch.from_numpy(owners),
        contents=torch.from_numpy(_digests(texts, len(part), owners)),
        source=number,
        step_tokens=step_tokens,
    )


def _digests(texts: Sequence[np.ndarray], n: int, owners: Int64[np.ndarray, " k"]) -> Int64[np.ndarray, " n"]:
    """A digest of the tokens of each row, which does not depend on how its micro-batch was padded."""
    hashes = [
        hashlib.blake2b(text.tobytes() + texts[n + i].tobytes(), digest_size=8) for i, text in enumerate(texts[:n])
    ]
    for text, owner in zip(texts[2 * n :], owners.tolist(), strict=True):
        hashes[owner].update(text.tobytes())
    return np.array([int.from_bytes(each.digest(), "little", signed=True) for each in hashes], dtype=np.int64)
