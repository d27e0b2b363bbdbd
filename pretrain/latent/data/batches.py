"""Batches of sentences of one length or of similar lengths, the same for any number of ranks.

Sentences are cut into batches once (:mod:`capt.pretrain.latent.data.batches`); each epoch goes through the batches in
another order. Shorter sentences of a batch are filled up with ``<pad>``, which no objective and no representation
sees. Where a batch does not divide evenly over the ranks, a rank repeats one of its rows and gives the copy no weight.
A resumed run finds its place again from the number of sentences that it has seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from capt.pretrain.base.randomness import derive, generator_for
from capt.pretrain.latent.config import LatentJob
from capt.pretrain.latent.data.corpus import Sentences

# Which sentences come into one batch: those of one length, or neighbours when all are ordered by length.


Rule = Literal["auto", "equal", "similar"]

_FULL_ENOUGH = 0.75
"""``auto`` takes batches of one length where they fill this share of their rows: PTB 0.97, 513 reviews 0.09."""


def chosen_rule(lengths: Int64[np.ndarray, " n"], size: int, rule: Rule) -> Literal["equal", "similar"]:
    """Return ``rule``; ``auto`` is ``equal`` where batches of one length would be three quarters full on average."""
    if rule != "auto":
        return rule
    _, counts = np.unique(lengths, return_counts=True)
    batches = int(np.ceil(counts / size).sum())
    return "equal" if len(lengths) >= _FULL_ENOUGH * size * batches else "similar"


def batches_of(
    lengths: Int64[np.ndarray, " n"], size: int, rule: Literal["equal", "similar"]
) -> list[Int64[np.ndarray, " m"]]:
    """Cut the sentences into batches of at most ``size``; returns the numbers of the sentences of each.

    ``equal``: sentences of one length, in file order, are cut into batches of ``size``, as in the released code; the
    last batch of each length may be as small as one sentence. ``similar``: all sentences, ordered by length, are cut
    into the fewest batches, whose sizes differ by one at most. So none holds a single sentence but where ``size`` is 1
    or there is only one.
    """
    by_length = np.argsort(lengths, kind="stable")
    if rule == "similar":
        return np.array_split(by_length, -(-len(lengths) // size))
    ends = np.flatnonzero(np.diff(lengths[by_length])) + 1
    groups = np.split(by_length, ends)
    return [group[first : first + size] for group in groups for first in range(0, len(group), size)]


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a batch.

    Attributes:
        tokens: ``<s> w1 .. wn </s>`` of each row, and ``<pad>`` up to the longest row of the whole batch.
        rows: positions of these rows in the whole batch; they choose the rows' random numbers.
        valid_rows: how many of these rows have weight; they come first.
        total: number of sentences in the whole batch.
        padding: number of ``<pad>`` in the whole batch.
    """

    tokens: Int[Tensor, "n length"]
    rows: Int[Tensor, " n"]
    valid_rows: int
    total: int
    padding: int = 0

    @property
    def scored(self) -> int:
        """Number of predicted words in the whole batch, ends of sentences included."""
        return self.total * (self.tokens.shape[1] - 1) - self.padding

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return replace(self, tokens=self.tokens.to(device))


class Batches:
    """All batches of a set of sentences.

    Args:
        sentences: the whole set.
        size: number of rows of a batch over all ranks, at most.
        seed: decides the order of the batches in each epoch.
        lengths: ``batch.lengths`` of the job.

    Attributes:
        lengths: ``equal`` or ``similar``, also where ``auto`` was asked for.
    """

    def __init__(self, sentences: Sentences, size: int, seed: int, lengths: Rule) -> None:
        self._sentences, self._seed = sentences, seed
        self.lengths = chosen_rule(sentences.lengths, size, lengths)
        self._batches = batches_of(sentences.lengths, size, self.lengths)
        self._sizes = np.array([len(batch) for batch in self._batches])
        self._order: tuple[int, Int64[np.ndarray, " b"]] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def alone(self) -> int:
        """Number of batches that hold a single sentence."""
        return int((self._sizes == 1).sum())

    @property
    def mean_tokens(self) -> float:
        """Number of predicted words of an average batch."""
        return self._sentences.scored / len(self)

    def order(self, epoch: int) -> Int64[np.ndarray, " b"]:
        """The order in which an epoch goes through the batches."""
        if self._order[0] != epoch:
            self._order = (epoch, generator_for("latent/order", self._seed, epoch, 0).permutation(len(self)))
        return self._order[1]

    def locate(self, samples: int) -> tuple[int, int]:
        """The epoch, and the position within it, of the batch that comes after ``samples`` sentences."""
        epoch, done = divmod(samples, len(self._sentences))
        ends = np.cumsum(self._sizes[self.order(epoch)])
        return epoch, int(np.searchsorted(ends, done, side="right"))

    def take(self, number: int, rank: int, world: int) -> Batch:
        """This rank's rows of batch ``number``."""
        batch = self._batches[number]
        per_rank = -(-len(batch) // world)
        rows = np.arange(rank, per_rank * world, world)
        valid_rows = int((rows < len(batch)).sum())
        rows = np.where(rows < len(batch), rows, rows[0] % len(batch))
        lengths = self._sentences.lengths[batch]
        tokens = torch.from_numpy(self._sentences.rows(batch[rows], int(lengths.max())))
        padding = int(lengths.max()) * len(batch) - int(lengths.sum())
        return Batch(tokens, torch.from_numpy(rows), valid_rows, len(batch), padding)

    def train(self, samples: int, rank: int, world: int) -> Iterator[Batch]:
        """This rank's batches after the first ``samples`` sentences, without end."""
        epoch, place = self.locate(samples)
        while True:
            for number in self.order(epoch)[place:]:
                yield self.take(int(number), rank, world)
            epoch, place = epoch + 1, 0

    def evaluation(self, limit: int, rank: int, world: int) -> Iterator[tuple[int, Batch]]:
        """Whole batches for this rank, with their numbers: about ``limit`` sentences over all ranks.

        Every n-th batch is taken, so that short and long sentences are as frequent as in the whole set.
        """
        count = min(len(self), max(1, round(limit / self._sizes.mean())))
        chosen = ((np.arange(count) + 0.5) * len(self) / count).astype(np.int64)
        for number in chosen[rank::world]:
            yield int(number), self.take(int(number), 0, 1)


# Batches of the synthetic clusters (section 4.4 of the paper, and its released toy): one-hot vectors of K classes.


def cluster_batches(job: LatentJob, step: int, rank: int, world: int) -> Iterator[Batch]:
    """This rank's rows of the batch of each step from ``step`` on.

    A batch holds K classes drawn with replacement, each ``data.repeats`` times.
    """
    classes, repeats = job.data.clusters, job.data.repeats
    assert classes is not None
    total = classes * repeats
    rows = torch.arange(rank, total, world)
    while True:
        generator = torch.Generator().manual_seed(derive(job.run.seed, "clusters", step))
        tokens = torch.randint(0, classes, (classes, 1), generator=generator).expand(-1, repeats).reshape(-1, 1)
        yield Batch(tokens[rank::world], rows, len(rows), total)
        step += 1
