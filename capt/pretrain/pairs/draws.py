"""Draws of a visit of rows: the positive and the hard negatives of each, and the corruption of their texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from capt.pretrain.base.randomness import generator_for, mix64, stream_key
from capt.pretrain.data.corruption import IGNORE, Corruptor
from capt.pretrain.pairs.sources import EncodedTexts, Lists, SourceRows

Tokens = list[np.ndarray]
"""Ids of some texts."""


class Drawn(NamedTuple):
    """Rows of one source as a visit draws them: text numbers, and the place of each negative's query.

    ``positive_places`` and ``negative_places`` are where these lie among the source's values, as the scores do.
    """

    queries: Int64[np.ndarray, " n"]
    positives: Int64[np.ndarray, " n"]
    negatives: Int64[np.ndarray, " k"]
    owners: Int64[np.ndarray, " k"]
    positive_places: Int64[np.ndarray, " n"]
    negative_places: Int64[np.ndarray, " k"]


def draw(source: SourceRows, rows: Int64[np.ndarray, " n"], visits: Int64[np.ndarray, " n"], seed: int) -> Drawn:
    """Draw a positive and the hard negatives of each row for its ``visits``-th visit (counted from 0).

    The visits of a row go through its positives one after the other, and through its negatives in groups of
    ``negatives``; each row begins at a place of its own. With ``draw`` random a visit has any of its negatives, as the
    seed, the row and the visit decide. A row with fewer negatives gives them all.
    """
    begin = stream_key(f"visit/{source.source.name}", seed) % 2**31 + rows
    ones = np.ones(len(rows), dtype=np.int64)
    positives = source.positives.places(rows, begin + visits, ones)
    number = np.minimum(source.negatives.counts(rows), source.source.negatives)
    if source.source.draw == "random":
        negatives = any_of(source.negatives, rows, visits, number, stream_key(f"draw/{source.source.name}", seed))
    else:
        negatives = source.negatives.places(rows, begin + visits * number, number)
    return Drawn(
        source.query[rows],
        source.positives.values[positives],
        source.negatives.values[negatives],
        np.repeat(np.arange(len(rows)), number),
        positives,
        negatives,
    )


def any_of(
    lists: Lists, rows: Int64[np.ndarray, " n"], visits: Int64[np.ndarray, " n"], number: Int64[np.ndarray, " n"],
    key: int,
) -> Int64[np.ndarray, " taken"]:  # fmt: skip
    """The places of ``number`` values of each row, drawn without replacement: those of the lowest hashes."""
    counts = lists.counts(rows)
    owners = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    of_visit = mix64(mix64(np.uint64(key) ^ mix64(rows.astype(np.uint64))) + visits.astype(np.uint64))
    hashes = mix64(of_visit[owners] ^ mix64(within.astype(np.uint64)))
    order = np.lexsort((hashes, owners))
    # `order` keeps the values of a row together, so that `within` is also the rank of a value in its row.
    taken = order[within < number[owners]]
    found: Int64[np.ndarray, " taken"] = lists.starts[rows][owners[taken]] + within[taken]
    return found


class Noise:
    """Corrupts texts of a source; what is drawn depends on the row and its visit alone.

    Args:
        corruptor: makes the corruptor of texts of a length.
        pad_id: fills shorter texts up.
        seed: of the draws.
    """

    def __init__(self, corruptor: Callable[[int], Corruptor], pad_id: int, seed: int) -> None:
        self._corruptor, self._pad_id, self._seed = corruptor, pad_id, seed
        self._known: dict[tuple[str, str], tuple[Corruptor, int]] = {}

    def __call__(
        self, name: str, side: str, texts: EncodedTexts, numbers: Int64[np.ndarray, " n"],
        rows: Int64[np.ndarray, " n"], visits: Int64[np.ndarray, " n"], rate: float | None,
    ) -> tuple[Tokens, Tokens]:  # fmt: skip
        """Corrupted ids of the texts ``numbers`` of a side of a source, and labels (-100 where nothing is chosen).

        ``rate`` is that of the step; None = that of validation.
        """
        # A corruptor is made for one width, and so for each side of each source.
        if (name, side) not in self._known:
            self._known[name, side] = self._corruptor(texts.longest), texts.longest
        corruptor, width = self._known[name, side]
        plain = texts.tokens(numbers)
        tokens = np.full((len(plain), width), self._pad_id, dtype=np.int32)
        for place, text in enumerate(plain):
            tokens[place, : len(text)] = text
        stream = f"corruption/{name}/{side}"
        generators = [
            generator_for(stream, self._seed, visit, row)
            for visit, row in zip(visits.tolist(), rows.tolist(), strict=True)
        ]
        corrupted = corruptor(tokens, generators, rate)
        # From label slots back to one label a token, as texts of a micro-batch have different lengths.
        labels = np.full_like(tokens, IGNORE)
        where, slot = np.nonzero(corrupted.labels != IGNORE)
        labels[where, corrupted.positions[where, slot]] = corrupted.labels[where, slot]
        return tuple(  # type: ignore[return-value]
            [values[place, : len(text)] for place, text in enumerate(plain)] for values in (corrupted.tokens, labels)
        )
