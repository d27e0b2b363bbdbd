r"""Masks: which keys are negatives of which anchors, decided block by block so that no rank holds the whole matrix.

A key :math:`k_j` is a negative of the anchor :math:`q_i` where every condition that is set holds:

- *instance*: it shows another thing, :math:`\mathrm{id}_j \neq \mathrm{id}_i`;
- *known pair*: no list says that the two belong together, :math:`(a_i, b_j) \notin \mathcal{P}` for the texts that they
  are;
- *owner*: it is a hard negative of this very anchor, or of another one, :math:`\mathrm{owner}_j = i` or
  :math:`\mathrm{owner}_j \neq i`;
- *score*: it is not nearer to the anchor than the limit that the positive sets, :math:`s_{ij} \le u_i`. A key above the
  limit is taken for a positive that nobody has labelled. The limit is one number an anchor, and takes no gradient.

The positive is in none of these sums (:mod:`capt.pretrain.contrast.sharded` adds it by itself), so no mask can remove
it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from capt.pretrain.base.traits import traits


class InstanceIds:
    """Instance ids of anchors ``(N,)`` and of keys ``(c,)``; a key with the anchor's id is not a negative."""

    def __init__(self, anchors: Tensor, keys: Tensor) -> None:
        self.anchors, self.keys = anchors, keys
        self._negative_mask: Tensor | None = None

    def block(self, rows: slice, columns: slice) -> InstanceIds:
        """The ids of one block of anchors x keys."""
        return InstanceIds(self.anchors[rows], self.keys[columns])

    def equal(self) -> Tensor:
        """``(N, c)``, true where key and anchor are of one instance."""
        return self.anchors[:, None] == self.keys[None, :]

    def own_keys(self) -> Tensor:
        """``(N,)``, how many keys are of the anchor's instance; no tensor of N x c."""
        keys = self.keys.sort().values
        return torch.searchsorted(keys, self.anchors, right=True) - torch.searchsorted(keys, self.anchors)

    @property
    def negative_mask(self) -> Tensor:
        """``(N, c)``, 1 where the key is a negative and 0 elsewhere: a factor of exponentials.

        In fp32 on a CPU, which multiplies numbers ten times as fast as it fills by a mask, and in bytes on a GPU.
        """
        if self._negative_mask is None:
            dtype = torch.bool if traits().is_gpu(self.anchors.device) else torch.float32
            mask = torch.empty(len(self.anchors), len(self.keys), dtype=dtype, device=self.anchors.device)
            self._negative_mask = torch.ne(self.anchors[:, None], self.keys[None, :], out=mask)
        return self._negative_mask


@dataclass(frozen=True)
class KnownPairs:
    """Pairs of texts that belong together, among anchors ``(N,)`` and keys ``(c,)``: such a key is not a negative.

    Nothing here is as large as anchors times keys, and nothing waits for the device.

    Attributes:
        anchors: the number of each anchor's text, ``texts`` for one of no pair.
        keys: the number of each key's text, likewise.
        pairs: ``(2, p)``, the numbers of the texts of each pair.
        texts: numbers are below this.
    """

    anchors: Tensor
    keys: Tensor
    pairs: Tensor
    texts: int

    @classmethod
    def of(cls, anchor_ids: Tensor, key_ids: Tensor, pairs: Tensor) -> KnownPairs:
        """Find anchors and keys by their ids among ``pairs (p, 2)``, of the id of an anchor's text and of a key's."""
        firsts, seconds = pairs.T.contiguous()
        anchors, keys = _numbers(firsts, anchor_ids), _numbers(seconds, key_ids)
        numbers = torch.stack([_numbers(firsts, firsts), _numbers(seconds, seconds)])
        # The pairs of keys that other ranks hold are left out where that costs no wait for the device.
        if traits().can_read(numbers):
            there = torch.zeros(len(pairs) + 1, dtype=torch.bool).index_fill(0, keys, True)
            numbers = numbers[:, there[numbers[1]]]
        return cls(anchors, keys, numbers, len(pairs))

    def block(self, rows: slice, columns: slice) -> KnownPairs:
        """The pairs of one block of anchors x keys."""
        return KnownPairs(self.anchors[rows], self.keys[columns], self.pairs, self.texts)

    @property
    def negative_mask(self) -> Tensor:
        """``(N, c)``, 1 where the key is a negative and 0 elsewhere, of the types of `InstanceIds.negative_mask`."""
        n, c = len(self.anchors), len(self.keys)
        # One row is that of all anchors of a text, and one column that of all keys of a text.
        row_of, column_of = self._place_of(self.anchors, n), self._place_of(self.keys, c)
        at = row_of[self.pairs[0]], column_of[self.pairs[1]]
        rows, columns = row_of[self.anchors], column_of[self.keys]
        # On a GPU shapes do not depend on values: what is outside has a row and a column more.
        if traits().is_gpu(self.anchors.device):
            mask = torch.ones(n + 1, c + 1, dtype=torch.bool, device=self.anchors.device)
            mask[at] = False
            return mask[rows][:, columns]
        inside = (at[0] < n) & (at[1] < c)
        mask = torch.ones(n, c)
        mask[at[0][inside], at[1][inside]] = 0
        # Most texts come once: only the others are copied.
        again = ((rows != torch.arange(n)) & (self.anchors < self.texts)).nonzero()[:, 0]
        mask[again] = mask[rows[again]]
        again = ((columns != torch.arange(c)) & (self.keys < self.texts)).nonzero()[:, 0]
        mask[:, again] = mask[:, columns[again]]
        return mask

    def _place_of(self, numbers: Tensor, outside: int) -> Tensor:
        """A place of each text among ``numbers``, ``outside`` where it has none."""
        places = numbers.new_full((self.texts + 1,), outside)
        places[numbers] = torch.arange(len(numbers), device=numbers.device)
        return places


def _numbers(texts: Tensor, asked: Tensor) -> Tensor:
    """A number for the text of each of ``asked``: its first place among the sorted ``texts``, or their count."""
    ids = texts.sort().values
    places = torch.searchsorted(ids, asked)
    found = ids[places.clamp(max=len(ids) - 1)] == asked
    return torch.where(found, places, len(ids))


@dataclass(frozen=True)
class NegativeMask:
    """The conditions under which one rank's keys ``(c,)`` are negatives of anchors ``(N,)``.

    Attributes:
        ids: the instance of each anchor and key; equal ones are not negatives. None: all are of different instances.
        known: pairs that belong together, in lists of which each may know another kind of keys.
        owners: the place of each anchor, and the place of the anchor that each key is a hard negative of. None: anybody
            sees the key.
        owned: with owners: an anchor sees its own keys alone, or (False) those of others alone.
        limits: ``(N,)``, the largest logit of a negative; None: any logit.
    """

    ids: InstanceIds | None = None
    known: Sequence[KnownPairs] = ()
    owners: InstanceIds | None = None
    owned: bool = False
    limits: Tensor | None = None

    def block(self, rows: slice, columns: slice) -> NegativeMask:
        """The mask of one block of anchors x keys."""
        return NegativeMask(
            self.ids and self.ids.block(rows, columns),
            [each.block(rows, columns) for each in self.known],
            self.owners and self.owners.block(rows, columns),
            self.owned,
            None if self.limits is None else self.limits[rows],
        )

    def factor(self, logits: Tensor) -> Tensor:
        """``(N, c)``, 1 where the key is a negative and 0 elsewhere, for ``logits`` of that shape."""
        factors = [] if self.ids is None else [self.ids.negative_mask]
        factors += [each.negative_mask for each in self.known]
        if self.owners is not None:
            factors.append(self.owners.equal() if self.owned else self.owners.negative_mask)
        if self.limits is not None:
            factors.append(logits <= self.limits[:, None])
        return functools.reduce(torch.mul, factors)

    def excluded(self, logits: Tensor) -> Tensor:
        """``(N, c)``, true where the key is not a negative."""
        # One condition alone: its comparison is the answer, without a factor in between.
        if self.owners is None and self.limits is None and not self.known and self.ids is not None:
            return self.ids.equal()
        return ~self.factor(logits).bool()
