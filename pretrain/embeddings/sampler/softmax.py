r"""The generator's softmax over a vocabulary whose rows are divided over ranks: draws, entropy, normalisers.

One row :math:`G(\cdot | x) = \mathrm{softmax}(C\,v_x)` costs a product with the whole table :math:`C`, and gives any
number of samples. All ranks hold the same centre words and look at their own columns; what crosses the wire is a few
numbers for each row and each draw, never a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.embeddings.tables import ALIGNMENT

Precision = Literal["fp32", "bf16"]

_BLOCK = ALIGNMENT
"""Columns whose probabilities are summed before the inverse of the CDF is looked up among them.

The sums are in float32 (in float64 they would take a quarter of the time of the whole sweep) and added up in float64.
As no block is divided between ranks, the same numbers draw the same words on any number of ranks.
"""
_CHUNK_BYTES = 64 << 20
"""Logits that are held in memory at a time."""
_DRAWS = 1 << 14
"""Draws that are looked up in one pass."""


@dataclass(frozen=True)
class Rows:
    """What is known of the softmax rows of ``u`` centre words, the same on every rank.

    Attributes:
        log_normaliser: logarithm of the sum of the exponentials of the logits.
        entropy: in nats.
        greedy: the most probable word.
        log_greedy: its log-probability.
    """

    log_normaliser: Float64[Tensor, " u"]
    entropy: Float64[Tensor, " u"]
    greedy: Int64[Tensor, " u"]
    log_greedy: Float64[Tensor, " u"]


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Cut ``rows`` so that the logits of a part take at most 64 MiB.

    Long parts are multiples of 16 rows: the rows that matrix products treat apart are the last ones of all, wherever
    the cuts are.
    """
    size = max(1, _CHUNK_BYTES // (4 * max(columns, 1)))
    size -= size % 16 if size > 16 else 0
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def sweep(
    inputs: Float[Tensor, "u d"],
    context: Float[Tensor, "v d"],
    first: int,
    vocabulary: int,
    row: Int64[Tensor, " m"],
    uniform: Float64[Tensor, " m"],
    precision: Precision = "fp32",
) -> tuple[Rows, Int64[Tensor, " m"]]:
    """Compute the softmax rows of ``inputs`` and draw from them. All ranks call this together.

    Args:
        inputs: the generator's vectors of the centre words, equal on every rank.
        context: this rank's rows of the generator's context table.
        first: the word of the first of them.
        vocabulary: words on all ranks.
        row: the centre word, as a place in ``inputs``, of each draw that *this* rank wants.
        uniform: a number in [0, 1) for each draw, which decides it: the inverse of the cumulative distribution.
        precision: of the product. In bf16 the distribution is that of rounded logits, exactly, with its normaliser.

    Returns:
        the rows, and the drawn words.
    """
    wanted = _Wanted.gather(row, uniform)
    order = torch.argsort(wanted.row, stable=True)
    sorted_rows, sorted_uniform = wanted.row[order], wanted.uniform[order]
    # most columns on any rank: chunks must be the same everywhere
    chunks = list(row_chunks(len(inputs), -(-vocabulary // distributed.world_size())))
    bounds = torch.tensor([chunk.start for chunk in chunks] + [len(inputs)], device=row.device)
    places = torch.searchsorted(sorted_rows, bounds).tolist()
    columns = _Columns(context, first, vocabulary, precision)
    parts, drawn = [], torch.empty_like(order)
    for chunk, begin, end in zip(chunks, places[:-1], places[1:], strict=True):
        rows, words = columns.sweep(inputs[chunk], sorted_rows[begin:end] - chunk.start, sorted_uniform[begin:end])
        parts.append(rows)
        drawn[order[begin:end]] = words
    if not parts:
        empty = uniform.new_zeros(0)
        return Rows(empty, empty, row.new_zeros(0), empty), drawn[wanted.own]
    known = Rows(
        torch.cat([part.log_normaliser for part in parts]),
        torch.cat([part.entropy for part in parts]),
        torch.cat([part.greedy for part in parts]),
        torch.cat([part.log_greedy for part in parts]),
    )
    return known, drawn[wanted.own]


@dataclass(frozen=True)
class _Wanted:
    """The draws that all ranks want, and which of them are this rank's."""

    row: Int64[Tensor, " all"]
    uniform: Float64[Tensor, " all"]
    own: slice

    @classmethod
    def gather(cls, row: Tensor, uniform: Tensor) -> _Wanted:
        rows, own = distributed.gather_ragged(row)
        return cls(rows, distributed.gather_ragged(uniform)[0], own)


class _Columns:
    """This rank's columns of the softmax rows, and memory for a part of the rows.

    The memory is written before it is read: to ask the system for it each time costs more than the exponentials.
    """

    def __init__(self, context: Float[Tensor, "v d"], first: int, vocabulary: int, precision: Precision) -> None:
        self._table = context.bfloat16() if precision == "bf16" else context
        self._first, self._vocabulary = first, vocabulary
        self._kept: dict[str, Tensor] = {}

    def _memory(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        kept = self._kept.get(name)
        if kept is None or len(kept) < rows:
            kept = self._kept[name] = self._table.new_empty(rows, len(self._table), dtype=dtype)
        return kept[:rows]

    def _logits(self, inputs: Float[Tensor, "c d"]) -> Float[Tensor, "c v"]:
        product = self._memory("product", len(inputs), self._table.dtype)
        torch.mm(inputs.to(self._table.dtype), self._table.T, out=product)
        if product.dtype == inputs.dtype:
            return product
        return self._memory("logits", len(inputs), inputs.dtype).copy_(product)

    def _mass(self, logits: Float[Tensor, "c v"]) -> Float[Tensor, "c blocks k"]:
        """The exponentials in blocks, of which the last is filled up with zeros."""
        blocks = max(1, -(-logits.shape[1] // _BLOCK))
        kept = self._kept.get("mass")
        if kept is None or len(kept) < len(logits):
            kept = self._kept["mass"] = logits.new_zeros(len(logits), blocks * _BLOCK)
        mass = kept[: len(logits)]
        torch.exp(logits, out=mass[:, : logits.shape[1]])
        in_blocks: Float[Tensor, "c blocks k"] = mass.unflatten(1, (blocks, _BLOCK))
        return in_blocks

    def sweep(
        self, inputs: Float[Tensor, "c d"], row: Int64[Tensor, " m"], uniform: Float64[Tensor, " m"]
    ) -> tuple[Rows, Int64[Tensor, " m"]]:
        """The softmax rows of ``inputs``, and the words of the draws of all ranks."""
        logits = self._logits(inputs)
        if logits.shape[1]:
            own_top, own_word = logits.max(dim=1)
        else:  # more ranks than words
            own_top, own_word = inputs.new_full((len(inputs),), -torch.inf), row.new_zeros(len(inputs))
        top = distributed.all_reduce_max(own_top)
        last = row.new_full((), self._vocabulary)
        greedy = -distributed.all_reduce_max(-torch.where(own_top == top, own_word + self._first, last))
        logits -= top[:, None]
        mass = self._mass(logits)
        cumulated = mass.sum(dim=2).double().cumsum(dim=1)
        shards = distributed.all_gather(
            torch.stack(
                [
                    cumulated[:, -1],
                    torch.bmm(mass.flatten(1)[:, None, : logits.shape[1]], logits[:, :, None])[:, 0, 0].double(),
                ]
            )
        )  # [ranks, 2, c]
        before = torch.cat([shards.new_zeros(1, len(inputs)), shards[:, 0].cumsum(dim=0)])
        total = before[-1]
        log_total = total.log()
        rows = Rows(top.double() + log_total, log_total - shards[:, 1].sum(dim=0) / total, greedy, -log_total)
        target = torch.minimum(uniform * total[row], torch.nextafter(total, torch.zeros_like(total))[row])
        # the last shard whose mass begins at or before the target: never an empty one
        shard = (before[1:-1, row] <= target).sum(dim=0)
        words = torch.zeros_like(row)
        for part in torch.nonzero(shard == distributed.rank())[:, 0].split(_DRAWS):
            rest = target[part] - before[distributed.rank(), row[part]]
            words[part] = self._first + _look_up(mass, cumulated, row[part], rest)
        return rows, distributed.all_reduce_sum(words)


def _look_up(
    mass: Float[Tensor, "c blocks k"],
    cumulated: Float64[Tensor, "c blocks"],
    row: Int64[Tensor, " m"],
    target: Float64[Tensor, " m"],
) -> Int64[Tensor, " m"]:
    """The column at which the mass of each row first exceeds ``target``: first its block, then within the block."""
    blocks = cumulated.shape[1]
    # one search for all rows: row number r, as shares of its own mass, is between r and r + 1
    own = cumulated[:, -1:].clamp_min(torch.finfo(torch.float64).tiny)
    number = torch.arange(len(cumulated), device=row.device)[:, None]
    found = torch.searchsorted((cumulated / own + number).flatten(), target / own[row, 0] + row, right=True)
    block = (found - row * blocks).clamp(0, blocks - 1)
    rest = target - torch.where(block > 0, cumulated[row, (block - 1).clamp_min(0)], 0.0)
    inside = mass.flatten(0, 1).index_select(0, row * blocks + block).double().cumsum(dim=1)
    # a share was rounded: a target just outside its block becomes the block's first or last word with any mass
    place = (inside <= rest.clamp_min(0.0)[:, None]).sum(dim=1)
    last = (inside < inside[:, -1:]).sum(dim=1)
    return block * _BLOCK + torch.minimum(place, last)
