r"""The generator's softmax over a vocabulary whose rows are divided over ranks: draws, entropy, normalisers.

One row :math:`G(\cdot | x) = \mathrm{softmax}(C\,v_x)` costs a product with the whole table :math:`C`, and gives any
number of samples. All ranks hold the same centre words and look at their own columns; what crosses the wire is a few
numbers for each row and each draw, never a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from pretrain.engine import distributed

_BLOCK = 128
"""Columns whose probabilities are summed before the inverse of the CDF is looked up among them."""
_CHUNK_BYTES = 64 << 20
"""Logits that are held at once."""
_DRAWS = 1 << 16
"""Draws that are looked up at once."""


@dataclass(frozen=True)
class Rows:
    """What is known of the softmax rows of ``u`` centre words, the same on every rank.

    Attributes:
        log_normaliser: logarithm of the sum of the exponentials of the logits.
        entropy: in nats.
        greedy: the most probable word.
    """

    log_normaliser: Float64[Tensor, " u"]
    entropy: Float64[Tensor, " u"]
    greedy: Int64[Tensor, " u"]


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Cut ``rows`` so that the logits of a part take at most 64 MiB."""
    size = max(1, _CHUNK_BYTES // (4 * max(columns, 1)))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def sweep(
    inputs: Float[Tensor, "u d"],
    context: Float[Tensor, "v d"],
    first: int,
    vocabulary: int,
    row: Int64[Tensor, " m"],
    uniform: Float64[Tensor, " m"],
) -> tuple[Rows, Int64[Tensor, " m"]]:
    """Compute the softmax rows of ``inputs`` and draw from them. All ranks call this together.

    Args:
        inputs: the generator's vectors of the centre words, equal on every rank.
        context: this rank's rows of the generator's context table.
        first: the word of the first of them.
        vocabulary: words on all ranks.
        row: the centre word, as a place in ``inputs``, of each draw that *this* rank wants.
        uniform: a number in [0, 1) for each draw, which decides it: the inverse of the cumulative distribution.

    Returns:
        the rows, and the drawn words.
    """
    wanted = _Wanted.gather(row, uniform)
    # most columns on any rank: chunks must be the same everywhere
    chunks = row_chunks(len(inputs), -(-vocabulary // distributed.world_size()))
    order = torch.argsort(wanted.row, stable=True)
    sorted_rows, sorted_uniform = wanted.row[order], wanted.uniform[order]
    parts, drawn = [], torch.empty_like(order)
    for chunk in chunks:
        begin, end = torch.searchsorted(
            sorted_rows, torch.tensor([chunk.start, chunk.stop], device=row.device)
        ).tolist()
        rows, words = _sweep_chunk(
            inputs[chunk], context, first, vocabulary, sorted_rows[begin:end] - chunk.start, sorted_uniform[begin:end]
        )
        parts.append(rows)
        drawn[order[begin:end]] = words
    columns = [torch.cat(part) for part in zip(*((p.log_normaliser, p.entropy, p.greedy) for p in parts), strict=True)]
    return Rows(columns[0], columns[1], columns[2]), drawn[wanted.own]


@dataclass(frozen=True)
class _Wanted:
    """The draws that all ranks want, and which of them are this rank's."""

    row: Int64[Tensor, " all"]
    uniform: Float64[Tensor, " all"]
    own: slice

    @classmethod
    def gather(cls, row: Tensor, uniform: Tensor) -> _Wanted:
        rows, own = gather_ragged(row)
        return cls(rows, gather_ragged(uniform)[0], own)


def gather_ragged(values: Float[Tensor, "n ..."] | Int64[Tensor, "n ..."]) -> tuple[Tensor, slice]:
    """The values of all ranks in their order, and where this rank's lie among them."""
    if distributed.world_size() == 1:
        return values, slice(0, len(values))
    counts = distributed.all_gather(torch.tensor(len(values), device=values.device)).tolist()
    padded = torch.cat([values, values.new_zeros(max(counts) - len(values), *values.shape[1:])])
    gathered = distributed.all_gather(padded)
    start = sum(counts[: distributed.rank()])
    every = torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
    return every, slice(start, start + len(values))


def _sweep_chunk(
    inputs: Float[Tensor, "c d"],
    context: Float[Tensor, "v d"],
    first: int,
    vocabulary: int,
    row: Int64[Tensor, " m"],
    uniform: Float64[Tensor, " m"],
) -> tuple[Rows, Int64[Tensor, " m"]]:
    logits = inputs @ context.T
    if len(context):
        own_top, own_word = logits.max(dim=1)
    else:  # more ranks than words
        own_top, own_word = logits.new_full((len(inputs),), -torch.inf), row.new_zeros(len(inputs))
    top = distributed.all_reduce_max(own_top)
    last = row.new_full((), vocabulary)
    greedy = -distributed.all_reduce_max(-torch.where(own_top == top, own_word + first, last))
    logits -= top[:, None]
    mass = logits.exp()
    cumulated = _block_sums(mass).double().cumsum(dim=1)
    own = torch.stack([cumulated[:, -1], torch.linalg.vecdot(mass, logits).double()])
    shards = distributed.all_gather(own)  # [ranks, 2, c]
    before = torch.cat([shards.new_zeros(1, len(inputs)), shards[:, 0].cumsum(dim=0)])
    total = before[-1]
    log_total = total.log()
    rows = Rows(top.double() + log_total, log_total - shards[:, 1].sum(dim=0) / total, greedy)
    target = torch.minimum(uniform * total[row], torch.nextafter(total, torch.zeros_like(total))[row])
    # the last shard whose mass begins at or before the target: never an empty one
    shard = (before[1:-1, row] <= target).sum(dim=0)
    mine = torch.nonzero(shard == distributed.rank())[:, 0]
    words = torch.zeros_like(row)
    for part in mine.split(_DRAWS):
        rest = target[part] - before[distributed.rank(), row[part]]
        words[part] = first + _look_up(mass, cumulated, row[part], rest)
    return rows, distributed.all_reduce_sum(words)


def _block_sums(mass: Float[Tensor, "c v"]) -> Float[Tensor, "c blocks"]:
    whole = mass.shape[1] // _BLOCK * _BLOCK
    sums = mass[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1) if whole else mass[:, :0]
    if whole < mass.shape[1] or not whole:
        sums = torch.cat([sums, mass[:, whole:].sum(dim=1, keepdim=True)], dim=1)
    return sums


def _look_up(
    mass: Float[Tensor, "c v"],
    cumulated: Float64[Tensor, "c blocks"],
    row: Int64[Tensor, " m"],
    target: Float64[Tensor, " m"],
) -> Int64[Tensor, " m"]:
    """The column at which the mass of each row first exceeds ``target``: first its block, then within the block."""
    blocks = cumulated.shape[1]
    block = (cumulated[row] <= target[:, None]).sum(dim=1).clamp_max(blocks - 1)
    rest = target - torch.where(block > 0, cumulated[row, (block - 1).clamp_min(0)], 0.0)
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=row.device)
    exists = columns < mass.shape[1]
    inside = torch.where(exists, mass[row[:, None], columns.clamp_max(mass.shape[1] - 1)], 0.0).double().cumsum(dim=1)
    place = (inside <= rest[:, None]).sum(dim=1)
    # rounding may leave a target at the very end of its block: then its last word that has any mass
    ends = (inside < inside[:, -1:]).sum(dim=1)
    return block * _BLOCK + torch.minimum(place, ends)
