"""Batches of sentences of one length: never padded, the same for any number of ranks, found again from a count.

Membership is fixed, as in the released code: sentences of one length, in file order, are cut into batches; each epoch
goes through the batches in an order of its own. Where a batch does not divide over the ranks, a rank repeats one of
its rows and gives it no weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from pretrain.base.randomness import generator_for
from pretrain.latent.data.corpus import Sentences


@dataclass(frozen=True)
class Batch:
    """A rank's rows of a batch of ``total`` sentences of one length.

    ``rows`` are their places in the whole batch (they choose the noise); only the first ``counted`` rows count.
    """

    tokens: Int[Tensor, "n length"]
    rows: Int[Tensor, " n"]
    counted: int
    total: int

    @property
    def scored(self) -> int:
        """Words and ends of sentences in the whole batch."""
        return self.total * (self.tokens.shape[1] - 1)

    def to(self, device: torch.device) -> Batch:
        """On a device."""
        return Batch(self.tokens.to(device), self.rows, self.counted, self.total)


class Batches:
    """The batches of a set of sentences.

    Args:
        sentences: the whole set.
        size: rows of a batch over all ranks; the last of each length may be smaller.
        seed: of the order.
    """

    def __init__(self, sentences: Sentences, size: int, seed: int) -> None:
        self._sentences, self._seed = sentences, seed
        by_length = np.argsort(sentences.lengths, kind="stable")
        ends = np.flatnonzero(np.diff(sentences.lengths[by_length])) + 1
        self._batches = [
            group[first : first + size] for group in np.split(by_length, ends) for first in range(0, len(group), size)
        ]
        self._sizes = np.array([len(batch) for batch in self._batches])
        self._order: tuple[int, Int64[np.ndarray, " b"]] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def mean_tokens(self) -> float:
        """Scored tokens of an average batch."""
        return self._sentences.scored / len(self)

    def order(self, epoch: int) -> Int64[np.ndarray, " b"]:
        """The order in which an epoch takes the batches."""
        if self._order[0] != epoch:
            self._order = (epoch, generator_for("latent/order", self._seed, epoch, 0).permutation(len(self)))
        return self._order[1]

    def locate(self, samples: int) -> tuple[int, int]:
        """Epoch and place in it of the batch that holds the sentence that comes after ``samples`` others."""
        epoch, done = divmod(samples, len(self._sentences))
        ends = np.cumsum(self._sizes[self.order(epoch)])
        return epoch, int(np.searchsorted(ends, done, side="right"))

    def take(self, number: int, rank: int, world: int) -> Batch:
        """This rank's rows of batch ``number``."""
        batch = self._batches[number]
        share = -(-len(batch) // world)
        rows = np.arange(rank, share * world, world)
        counted = int((rows < len(batch)).sum())
        rows = np.where(rows < len(batch), rows, rows[0] % len(batch))
        tokens = torch.from_numpy(self._sentences.rows(batch[rows]))
        return Batch(tokens, torch.from_numpy(rows), counted, len(batch))

    def train(self, samples: int, rank: int, world: int) -> Iterator[Batch]:
        """This rank's batches from the count ``samples`` on, without end."""
        epoch, place = self.locate(samples)
        while True:
            for number in self.order(epoch)[place:]:
                yield self.take(int(number), rank, world)
            epoch, place = epoch + 1, 0

    def evaluation(self, limit: int, rank: int, world: int) -> Iterator[tuple[int, Batch]]:
        """Whole batches for this rank, with their numbers: evenly over all lengths, ``limit`` sentences or so.

        Every n-th batch, so that each sentence is as likely to be among them as any other.
        """
        count = min(len(self), max(1, round(limit / self._sizes.mean())))
        chosen = ((np.arange(count) + 0.5) * len(self) / count).astype(np.int64)
        for number in chosen[rank::world]:
            yield int(number), self.take(int(number), 0, 1)
