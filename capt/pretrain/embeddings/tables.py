"""The two tables of word vectors, each rank holding a range of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.base.randomness import generator_for
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.engines.places import RowShard, row_range

# Rows of a table that is divided over the ranks: fetched from their owners by number, gradients sent back to them.
#
# Rank ``r`` of ``W`` owns about ``V / W`` consecutive rows, from a multiple of `ALIGNMENT` on. Only rows that a batch
# uses travel, each once for each rank that uses it. A rank alone copies nothing: it works on its table itself.


ALIGNMENT = 32
"""Rows that are never divided: a float32 sum over them is the same to the last bit on any number of ranks."""


@dataclass(frozen=True)
class Borrowed:
    """Rows that a batch uses: row ``i`` of what was asked for is ``rows[place[i]]``.

    ``asked_by`` are the own rows that each rank has asked for, and ``counts`` how many rows each rank has lent.
    """

    rows: Float[Tensor, "u d"]
    place: Int64[Tensor, " k"]
    asked_by: tuple[Int64[Tensor, " a"], ...] = ()
    counts: tuple[int, ...] = ()


class RowExchange:
    """Exchange of ``rows`` rows, of which each rank owns some. Every method is called by all ranks together."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        world = distributed.world_size()
        self.share = row_range(rows, 0, world, ALIGNMENT)[1]
        self.start, self.end = row_range(rows, distributed.rank(), world, ALIGNMENT)

    def borrow(self, table: Float[Tensor, "r d"], ids: Int64[Tensor, " k"]) -> Borrowed:
        """The rows ``ids`` of the whole table, of which ``table`` is this rank's part. They must not be written to."""
        world = distributed.world_size()
        if world == 1:
            return Borrowed(table, ids)
        wanted, place = torch.unique(ids, return_inverse=True)
        # Rank r has the rows from r times the share on.
        counts = torch.bincount(wanted // self.share, minlength=world)
        # First how many rows each rank wants, then which, then the rows themselves.
        asked = distributed.all_to_all(counts, [1] * world, [1] * world).tolist()
        mine = counts.tolist()
        requests = distributed.all_to_all(wanted, asked, mine) - self.start
        rows = distributed.all_to_all(table[requests], mine, asked)
        return Borrowed(rows, place, requests.split(asked), tuple(mine))

    def give_back(
        self, borrowed: Borrowed, *gradients: Float[Tensor, "k _d"]
    ) -> tuple[Int64[Tensor, " m"], tuple[Float[Tensor, "m _d"], ...]]:
        """The gradients of this rank's rows from all ranks, as own rows and values; a row may occur repeatedly.

        Each of ``gradients`` belongs to what was asked for, in the same order; they travel together. The order of the
        result is that of the ranks.
        """
        if distributed.world_size() == 1:
            return borrowed.place, gradients
        widths = [part.shape[1] for part in gradients]
        sums = gradients[0].new_zeros(len(borrowed.rows), sum(widths))
        for total, part in zip(sums.split(widths, dim=1), gradients, strict=True):
            total.index_add_(0, borrowed.place, part)
        # A row that this rank used several times travels once, as a sum.
        received = distributed.all_to_all(sums, [len(asked) for asked in borrowed.asked_by], list(borrowed.counts))
        return torch.cat(borrowed.asked_by), received.split(widths, dim=1)


WordTable = Literal["input", "context"]
_DRAWN_AS_ONE = 4096
"""Rows of a table that one random generator fills, on whatever rank they are."""
LONGEST = 8.0
"""Limit of a row's step, as learning rate times curvature: far more than one word's pairs have."""
_SUMMED_AS_ONE = 512
"""Rows of gradients that are made float64 in one pass: few enough that they stay in the cache."""


class EmbeddingTables(nn.Module):
    r"""``input[x] . context[y]`` is the score of word x with word y; the rows of ``input`` are the embeddings.

    As in word2vec the rows of ``input`` start uniform in :math:`\pm 1 / 2d`, those of ``context`` at zero. The whole
    tables are the same for any number of ranks.

    Args:
        words: rows of a whole table.
        dim: width of the vectors.
        seed: what the random numbers are drawn from.
        name: of the module: tables of another name start with other numbers.
        random_context: ``context`` starts like ``input``: a generator whose scores were all zero would not learn.
    """

    def __init__(
        self, words: int, dim: int, seed: int, name: str = "discriminator", *, random_context: bool = False
    ) -> None:
        super().__init__()
        self.exchange = RowExchange(words)
        rows = self.exchange.end - self.exchange.start
        self.input = nn.Parameter(torch.empty(rows, dim))
        self.context = nn.Parameter(torch.zeros(rows, dim))
        for table in (self.input, self.context):
            table.rows_of = RowShard(self.exchange.start, words)  # type: ignore[attr-defined]
        self._lent: list[tuple[WordTable, Borrowed, Tensor]] = []
        if not self.input.is_meta:
            self._fill(self.input.data, f"{name}/input", seed)
            if random_context:
                self._fill(self.context.data, f"{name}/context", seed)

    def _fill(self, table: Tensor, name: str, seed: int) -> None:
        dim = table.shape[1]
        start, end = self.exchange.start, self.exchange.end
        for block in range(start // _DRAWN_AS_ONE, -(-end // _DRAWN_AS_ONE)):
            first = block * _DRAWN_AS_ONE
            # Blocks are drawn whole, so that no number depends on which ranks share one.
            generator = generator_for(f"init/{name}", seed, 0, block)
            drawn = (generator.random((_DRAWN_AS_ONE, dim), dtype=np.float32) - np.float32(0.5)) / np.float32(dim)
            low, high = max(first, start), min(first + _DRAWN_AS_ONE, end)
            table[low - start : high - start].copy_(torch.from_numpy(drawn[low - first : high - first]))

    def rows(self, table: WordTable, ids: Int64[Tensor, " k"]) -> Float[Tensor, "k d"]:
        """Fetch rows by number as a leaf that collects their gradient. All ranks call this together.

        Under ``torch.no_grad`` nothing is collected.
        """
        borrowed = self.exchange.borrow(getattr(self, table).data, ids)
        leaf = borrowed.rows[borrowed.place]
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            self._lent.append((table, borrowed, leaf))
        return leaf

    def apply_gradients(self, engine: Engine, curvatures: Sequence[Tensor | None] = ()) -> None:
        r"""Update the rows fetched since the last call, by the optimizer of ``engine``. All ranks call this together.

        The gradients of all ranks are summed, not averaged: the loss is a sum over pairs. They are summed in float64,
        so that the sum does not depend on which ranks its terms come from.

        Args:
            engine: of the module.
            curvatures: for plain SGD of each call of :meth:`rows`, in their order, an upper bound of the loss's
                curvature :math:`h` along each row, one element for each row asked for; None for a call whose
                rows were not collected. A row whose step is longer than `LONGEST` :math:`= \eta h` is shortened to it.
        """
        known = [bend.flatten()[:, None] for bend in curvatures if bend is not None]
        bends = known or [leaf.new_zeros(len(leaf), 0) for *_, leaf in self._lent]
        parts: dict[WordTable, list[tuple[Tensor, Tensor]]] = {"input": [], "context": []}
        for (table, borrowed, leaf), bend in zip(self._lent, bends, strict=True):
            gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            alone = distributed.world_size() == 1  # then there is nothing to be summed before it travels
            # The curvature travels as one more column of the gradient.
            sent = torch.cat([gradient, bend], dim=1)
            ids, (sums,) = self.exchange.give_back(borrowed, sent if alone else sent.double())
            parts[table].append((ids, sums))
        self._lent.clear()
        for name, found in parts.items():
            if found:
                parameter: nn.Parameter = getattr(self, name)
                rows, place = torch.unique(torch.cat([ids for ids, _ in found]), return_inverse=True)
                width = found[0][1].shape[1]
                total = torch.zeros(len(rows), width, dtype=torch.float64, device=rows.device)
                for part, (_, sums) in zip(place.split([len(ids) for ids, _ in found]), found, strict=True):
                    for some, values in zip(part.split(_SUMMED_AS_ONE), sums.split(_SUMMED_AS_ONE), strict=True):
                        total.index_add_(0, some, values.double())
                total, length = total[:, : parameter.shape[1]], total[:, parameter.shape[1] :] * engine.learning_rate()
                if width > parameter.shape[1]:
                    total = total * (LONGEST / length).clamp(max=1)
                # Sparse, so that the optimizer moves these rows alone; sorted and distinct, hence coalesced.
                parameter.grad = torch.sparse_coo_tensor(
                    rows[None], total.to(parameter.dtype), parameter.shape, check_invariants=False, is_coalesced=True
                )
        engine.step()
