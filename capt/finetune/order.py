"""Order of the examples: batches of similar lengths, in an order that no rank, worker or restart can change.

Samples are numbered 0, 1, 2, ... over the whole job as in ``capt.pretrain.data.sampler``: sample ``g`` is in epoch
``g // n``, every epoch holds each of the ``n`` examples exactly once, and step ``s`` trains on the samples from
``s * batch`` on. So the step in which an epoch ends also begins the next one, and every step is full.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from jaxtyping import Int64

from capt.pretrain.base.randomness import generator_for

RowNumbers = Int64[np.ndarray, " n"]

POOL = 50
"""Batches that are sorted together: enough of them to leave little padding, few enough to keep batches random."""


class ExampleOrder:
    """The example of every sample, a pure function of (seed, batch, lengths).

    An epoch's shuffled examples are cut into pools of ``POOL`` batches; a pool is sorted by length, cut into batches
    and these are shuffled. Batches are cut where the steps are, so that only the steps between two epochs are mixed.

    Args:
        lengths: tokens of each example.
        batch: examples of an optimizer step, over all ranks.
        seed: seed of the order.
        bucketing: whether batches hold examples of like lengths; False = plain shuffled order.
        shuffle: whether epochs are shuffled; False = the examples' own order in every epoch.
    """

    def __init__(
        self, lengths: RowNumbers, batch: int, seed: int, *, bucketing: bool = True, shuffle: bool = True
    ) -> None:
        self._lengths, self._batch, self._seed = lengths, batch, seed
        self._bucketing, self._shuffle = bucketing, shuffle
        self._epochs: OrderedDict[int, RowNumbers] = OrderedDict()

    def rows(self, start: int) -> RowNumbers:
        """The row numbers of the step whose first sample is ``start``."""
        epochs, places = np.divmod(np.arange(start, start + self._batch, dtype=np.int64), len(self._lengths))
        return np.array([self._epoch(int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)])

    def _epoch(self, epoch: int) -> RowNumbers:
        if epoch not in self._epochs:
            self._epochs[epoch] = self._draw(epoch)
            while len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _draw(self, epoch: int) -> RowNumbers:
        count = len(self._lengths)
        if not self._shuffle:
            return np.arange(count, dtype=np.int64)
        generator = generator_for("finetune/order", self._seed, epoch, 0)
        order = generator.permutation(count)
        if self._bucketing:
            head = min(-epoch * count % self._batch, count)  # what belongs to the step that the last epoch began
            whole = head + (count - head) // self._batch * self._batch
            # Batches of rows of like length, drawn from pools and shuffled again: no epoch goes from short to long.
            for begin in range(head, whole, POOL * self._batch):
                pool = order[begin : min(begin + POOL * self._batch, whole)]
                batches = pool[np.argsort(self._lengths[pool], kind="stable")].reshape(-1, self._batch)
                order[begin : begin + len(pool)] = generator.permutation(batches).reshape(-1)
        return order


def micro_batches_of_rank(
    lengths: Int64[np.ndarray, " batch"], micro: int, world: int, rank: int, *, bucketing: bool
) -> list[Int64[np.ndarray, " micro"]]:
    """Return the places of a step that each micro-batch of ``rank`` takes; ``lengths`` are those of its examples.

    With ``bucketing`` the step is sorted by length first: a micro-batch holds neighbours, and what the ranks compute
    at the same time are neighbours too, so that no rank waits long for another.
    """
    places = np.argsort(lengths, kind="stable") if bucketing else np.arange(len(lengths))
    return list(places.reshape(-1, world, micro)[:, rank])


def chosen_rows(total: int, wanted: int | None) -> RowNumbers:
    """The numbers of the rows that ``data.max_train`` leaves, in order; they do not depend on the seed of the run."""
    if wanted is None or wanted >= total:
        return np.arange(total)
    return np.sort(np.random.default_rng(0).permutation(total)[:wanted])
