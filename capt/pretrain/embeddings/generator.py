r"""The words that the generator draws as negatives, from a softmax whose rows are divided over ranks.

One row :math:`G(\cdot | x) = \mathrm{softmax}(C\,v_x)` costs a product with the whole table :math:`C`, and gives any
number of samples. All ranks hold the same centre words and look at their own columns; what crosses the wire is a few
numbers for each row and each draw, never a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.distributed import gather_ragged
from capt.pretrain.base.randomness import generator_for
from capt.pretrain.embeddings.positives import Segments
from capt.pretrain.embeddings.tables import ALIGNMENT, EmbeddingTables
from capt.pretrain.engine.callbacks.agreement import TrainingDivergedError

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
    """Figures of the softmax rows of ``u`` centre words, the same on every rank.

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
    # Sorted by row, the draws of a chunk of rows lie side by side.
    order = torch.argsort(wanted.row, stable=True)
    sorted_rows, sorted_uniform = wanted.row[order], wanted.uniform[order]
    # most columns on any rank: chunks must be the same everywhere
    chunks = list(row_chunks(len(inputs), -(-vocabulary // distributed.world_size())))
    ends = torch.tensor([chunk.start for chunk in chunks] + [len(inputs)], device=row.device)
    places = torch.searchsorted(sorted_rows, ends).tolist()
    columns = _Columns(context, first, vocabulary, precision)
    parts, drawn = [], torch.empty_like(order)
    for chunk, begin, end in zip(chunks, places[:-1], places[1:], strict=True):
        rows, words = columns.sweep(inputs[chunk], sorted_rows[begin:end] - chunk.start, sorted_uniform[begin:end])
        parts.append(rows)
        drawn[order[begin:end]] = words
    # No rank has a centre word.
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
        # What follows the last column was made as zeros and is never written.
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
        # The lowest word that reaches the maximum on any rank, so that ties do not depend on the number of ranks.
        last = row.new_full((), self._vocabulary)
        greedy = -distributed.all_reduce_max(-torch.where(own_top == top, own_word + self._first, last))
        logits -= top[:, None]
        mass = self._mass(logits)
        # Shares of the rows' mass in float64: they decide which word a draw is.
        cumulated = mass.sum(dim=2).double().cumsum(dim=1)
        # Each rank tells its mass, and its logits weighted by mass, which make the entropy.
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
        # Rounding may bring a draw up to the total itself, behind the last word.
        target = torch.minimum(uniform * total[row], torch.nextafter(total, torch.zeros_like(total))[row])
        # the last shard whose mass begins at or before the target: never an empty one
        shard = (before[1:-1, row] <= target).sum(dim=0)
        # One rank finds each word and the others add 0.
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


# Updates of the discriminator between two of the generator: the softmax rows are the same for all of them.
#
# The generator does not change within a *window* of ``generator.every`` updates. So the row of a centre word is
# computed once for all its occurrences in the window, and every draw is nevertheless one from the generator as it
# then is.


@dataclass(frozen=True)
class Draws:
    """Words that the generator has drawn for the centres of an update, ``m`` for each; 0 for padding.

    ``log_normaliser``, ``entropy`` and ``greedy`` are those of each centre's softmax row; ``log_greedy`` is the
    log-probability of its most probable word.
    """

    words: Int64[Tensor, "n m"]
    log_normaliser: Float[Tensor, " n"]
    entropy: Float[Tensor, " n"]
    greedy: Int64[Tensor, " n"]
    log_greedy: Float[Tensor, " n"]


@dataclass
class Window:
    """The updates from one update of the generator to the next, on this rank.

    Args:
        updates: their segments.
        seed: of the job.
        samples: words that are drawn for each centre.
        precision: of the products with the generator's table.
    """

    updates: list[Segments]
    seed: int
    samples: int
    precision: Precision
    _draws: list[Draws] = field(default_factory=list)

    def draws(self, generator: EmbeddingTables, number: int) -> Draws:
        """The draws of an update of the window. The first call draws for all of them. All ranks call this together."""
        if not self._draws:
            self._draws = self._draw(generator)
        return self._draws[number]

    def _draw(self, generator: EmbeddingTables) -> list[Draws]:
        """Draw for all updates.

        Raises:
            TrainingDivergedError: a score of the generator is not a number, on all ranks, before it draws a word.
        """
        device = generator.input.device
        real = np.concatenate([segments.sentence >= 0 for segments in self.updates])
        occurrences = torch.from_numpy(np.concatenate([segments.words for segments in self.updates])[real]).to(device)
        uniform = np.concatenate([uniform_numbers(s, self.seed, self.samples) for s in self.updates])[real]
        # The rows of all words of the window over all ranks are fetched once, and each occurrence points at its word.
        distinct = torch.unique(gather_ragged(torch.unique(occurrences))[0])
        with torch.no_grad():
            inputs = generator.rows("input", distinct)
        row = torch.searchsorted(distinct, occurrences)
        rows, drawn = sweep(
            inputs,
            generator.context.detach(),
            generator.exchange.start,
            generator.exchange.rows,
            row.repeat_interleave(self.samples),
            torch.from_numpy(uniform).to(device).flatten(),
            self.precision,
        )
        if not bool(rows.log_normaliser.isfinite().all()):
            raise TrainingDivergedError(
                "the generator has diverged: its scores are not numbers; resume from the last checkpoint with a lower "
                "generator.lr, or raise generator.entropy"
            )
        # Back to the places of the text, where separators between sentences have drawn nothing.
        place = torch.from_numpy(np.flatnonzero(real)).to(device)
        size = len(real)
        words = place.new_zeros(size, self.samples).index_copy_(0, place, drawn.view(-1, self.samples))
        log_normaliser, entropy, log_greedy = (
            inputs.new_zeros(size).index_copy_(0, place, values[row].to(inputs.dtype))
            for values in (rows.log_normaliser, rows.entropy, rows.log_greedy)
        )
        greedy = place.new_zeros(size).index_copy_(0, place, rows.greedy[row])
        sizes = [len(segments.words) for segments in self.updates]
        parts = (values.split(sizes) for values in (words, log_normaliser, entropy, greedy, log_greedy))
        return [Draws(*part) for part in zip(*parts, strict=True)]


@dataclass(frozen=True)
class WindowedBatch:
    """The segments of an update and the window in which it is update ``number``."""

    segments: Segments
    window: Window
    number: int

    @property
    def is_last(self) -> bool:
        """True if the generator is updated with this one."""
        return self.number == len(self.window.updates) - 1


def windowed(
    read: Callable[[int], Segments], step: int, last: int, every: int, window: Callable[[list[Segments]], Window]
) -> Iterator[WindowedBatch]:
    """The updates from ``step`` on, each with its whole window, of which a resumed run has done a part.

    Args:
        read: the segments of an update, by its number.
        step: the first update.
        last: the number of updates of the run; its last window may be shorter.
        every: updates of a window.
        window: makes one.
    """
    while step < last:
        first = step - step % every
        whole = window([read(number) for number in range(first, min(first + every, last))])
        for number in range(step - first, len(whole.updates)):
            yield WindowedBatch(whole.updates[number], whole, number)
        step = first + len(whole.updates)


def uniform_numbers(segments: Segments, seed: int, samples: int) -> Float64[np.ndarray, "n m"]:
    """The numbers that decide the draws of each word: those of its segment, on whatever rank it is."""
    parts = [
        generator_for("generator", seed, epoch, place).random((blocks * segments.block, samples))
        for (epoch, place), blocks in zip(segments.numbers, segments.blocks_of, strict=True)
    ]
    return np.concatenate([np.zeros((0, samples)), *parts])
