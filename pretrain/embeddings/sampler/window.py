"""Updates of the discriminator between two of the generator: the softmax rows are the same for all of them.

The generator does not change within a *window* of ``generator.every`` updates. So the row of a centre word is computed
once for all its occurrences in the window, and every draw is nevertheless one from the generator as it then is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from capt.pretrain.base.distributed import gather_ragged
from capt.pretrain.base.randomness import generator_for
from capt.pretrain.embeddings.data.positives import Segments
from capt.pretrain.embeddings.sampler.softmax import Precision, sweep
from capt.pretrain.embeddings.tables import EmbeddingTables
from capt.pretrain.engine.callbacks.agreement import TrainingDivergedError


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
        """Whether the generator is updated with this one."""
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
