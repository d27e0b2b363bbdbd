"""Random sources of pairs in which queries and documents come again, and copies of them, as sets of texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from capt.pretrain.data.sampler import BlockMixtureSampler, Sampler
from capt.pretrain.pairs.data_config import PairSource
from capt.pretrain.pairs.sources import EncodedTexts, Lists, SourceRows, text_key

Row = tuple[str, list[str], list[str]]


def _texts(names: Sequence[str]) -> EncodedTexts:
    keys = np.array([text_key(name) for name in names], dtype=np.int64)
    return EncodedTexts(np.full(2 * len(names), 5, np.int32), np.arange(len(names) + 1) * 2, keys, 0)


@dataclass
class Bipartite:
    """Sources with their rows of texts; ``given`` holds every pair that a row of any source gives, without copies."""

    sources: list[SourceRows]
    rows: list[list[Row]]

    @classmethod
    def draw(cls, generator: random.Random, sizes: Sequence[int], kinds: int, *, alone: int = -1) -> Bipartite:
        """Rows of up to three positives and two hard negatives, out of ``kinds`` queries and ``kinds`` documents.

        The source of number ``alone`` compares a query with its own hard negatives alone.
        """

        def text(side: str) -> str:
            name = f"{side} {generator.randrange(kinds)}"
            return generator.choice([name, name.upper(), f" {name.replace(' ', '   ')}"])

        rows = [
            [
                (text("query"), list(dict.fromkeys(text("document") for _ in range(generator.randint(1, 3)))),
                 [text("document") for _ in range(generator.randint(number == alone, 2))])
                for _ in range(size)
            ]
            for number, size in enumerate(sizes)
        ]  # fmt: skip
        return cls([source_of(f"s{i}", each, in_batch=i != alone) for i, each in enumerate(rows)], rows)

    @property
    def given(self) -> set[tuple[int, int]]:
        """Keys of query and document."""
        return {
            (text_key(query), text_key(text))
            for rows in self.rows for query, positives, _ in rows for text in positives
        }  # fmt: skip

    def sampler(self, batch: int, *, mixed: bool) -> Sampler | BlockMixtureSampler:
        """The order of the rows."""
        if len(self.sources) == 1:
            return Sampler(len(self.sources[0]), 3)
        sizes = tuple(map(len, self.sources))
        return BlockMixtureSampler(sizes, (1.0,) * len(sizes), batch, seed=3, mixed=mixed)


def source_of(name: str, rows: Sequence[Row], *, in_batch: bool = True) -> SourceRows:
    """Rows whose texts are all apart, so that equal ones are known by their keys alone."""
    documents = [text for _, positives, negatives in rows for text in (*positives, *negatives)]
    positives, negatives, first = [], [], 0
    for _, own, others in rows:
        positives.append(range(first, first + len(own)))
        negatives.append(range(first + len(own), first + len(own) + len(others)))
        first += len(own) + len(others)
    source = PairSource(name=name, files=["x"], negatives=2, in_batch=in_batch)
    return SourceRows(
        source, _texts([query for query, _, _ in rows]), _texts(documents), np.arange(len(rows), dtype=np.int64),
        Lists.of(positives), Lists.of(negatives),
    )  # fmt: skip
