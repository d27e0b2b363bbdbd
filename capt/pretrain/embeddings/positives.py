"""Centres and the neighbours that they are paired with, in any update of a run.

A *segment* is `SEGMENT` consecutive words of the encoded text: what is shuffled as one and has random numbers of its
own. Segment number ``g`` of a run is in epoch ``g // segments``, and each epoch goes through the segments in an order
of its own (`capt.pretrain.data.sampler`). So the pairs of an update are a pure function of the seed and the number of
the update, for any number of ranks and processes, and to resume is to remember how many segments are done.

Subsampling and windows are those of word2vec: frequent words are dropped first, so that windows reach over them; then
each centre draws its window from 1 to ``data.window``. A window ends where its sentence or its segment
ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from capt.pretrain.base.randomness import generator_for
from capt.pretrain.data.sampler import Sampler
from capt.pretrain.embeddings.config import SEGMENT, EmbeddingJob
from capt.pretrain.embeddings.corpus import EncodedCorpus


@dataclass(frozen=True)
class Positives:
    """Pairs: ``contexts[j]`` is a neighbour of ``centres[owner[j]]``; ``owner`` is sorted."""

    centres: Int64[np.ndarray, " n"]
    contexts: Int64[np.ndarray, " p"]
    owner: Int64[np.ndarray, " p"]


@dataclass(frozen=True)
class Segments:
    """Words that one rank trains on in one update: those that subsampling has left of some segments, in blocks.

    A *block* is up to ``block`` consecutive kept words of one segment; its centres share the ``noise`` drawn for it.
    The words of block ``b`` are ``words[b * block : (b + 1) * block]``, and where a segment ends within a block, the
    rest is padding, with ``sentence`` -1 and ``reach`` 0.

    Attributes:
        words: numbers of the words.
        sentence: number of each word's sentence within this update, -1 for padding.
        reach: the window that each word has drawn as a centre, in kept words.
        noise: the negatives of each block, drawn from unigram noise.
        block: words of a block.
        raw: words of the text before subsampling, padding not counted.
        numbers: epoch and place of each segment: what further random numbers of its own are drawn from.
        blocks_of: how many blocks each segment has.
    """

    words: Int64[np.ndarray, " n"]
    sentence: Int64[np.ndarray, " n"]
    reach: Int64[np.ndarray, " n"]
    noise: Int64[np.ndarray, "b k"]
    block: int
    raw: int
    numbers: tuple[tuple[int, int], ...]
    blocks_of: tuple[int, ...]

    def neighbours(self, window: int) -> Bool[np.ndarray, "n two_windows_plus_one"]:
        """Return whether the word at each distance from -window to window of each word is a neighbour of it."""
        size = len(self.words)
        if not size:
            return np.zeros((0, 2 * window + 1), dtype=bool)
        padded = np.full(size + 2 * window, -1)
        padded[window : window + size] = self.sentence
        around = np.lib.stride_tricks.sliding_window_view(padded, 2 * window + 1)
        distance = np.abs(np.arange(-window, window + 1))
        near = (distance[None, :] <= self.reach[:, None]) & (around == self.sentence[:, None])
        near[:, window] = False
        found: Bool[np.ndarray, "n two_windows_plus_one"] = near
        return found

    def positives(self, window: int) -> Positives:
        """The pairs one by one. Padding is no centre, and a word without neighbours is one without contexts."""
        row, column = np.nonzero(self.neighbours(window))
        real = np.flatnonzero(self.sentence >= 0)
        place = np.cumsum(self.sentence >= 0) - 1
        return Positives(self.words[real], self.words[row + column - window], place[row])


class SegmentReader:
    """Reads the segments of a run from an encoded text.

    Args:
        corpus: the text.
        job: window, subsampling, noise and seed.
    """

    def __init__(self, corpus: EncodedCorpus, job: EmbeddingJob) -> None:
        self._corpus = corpus
        self._window = job.data.window
        self._block, self._shared = job.negatives.block, job.negatives.shared
        self._seed = job.run.seed
        self._keep = corpus.vocabulary.keep_probability(job.data.subsample)
        self.noise: Float64[np.ndarray, " V"] = corpus.vocabulary.noise()
        self._cumulated = np.cumsum(self.noise)
        self._order = Sampler(len(self), self._seed)

    def __len__(self) -> int:
        """The segments of an epoch."""
        return -(-len(self._corpus) // SEGMENT)

    def words_of(self, numbers: Int64[np.ndarray, " m"]) -> int:
        """Count the words of the text that the segments with these numbers hold together."""
        missing = len(self) * SEGMENT - len(self._corpus)
        last = int((self._order.locate(numbers)[1] == len(self) - 1).sum()) if missing else 0
        return len(numbers) * SEGMENT - last * missing

    def read(self, numbers: Int64[np.ndarray, " m"]) -> Segments:
        """Draw the segments with these numbers; there may be none."""
        epochs, places = self._order.locate(numbers)
        # Empty arrays first: there may be no segment to concatenate.
        words, sentence, reach, noise = [_NONE], [_NONE], [_NONE], [np.zeros((0, self._shared), dtype=np.int64)]
        sentences = raw = 0
        for epoch, place in zip(epochs.tolist(), places.tolist(), strict=True):
            generator = generator_for("positives", self._seed, epoch, place)
            ids, begins = self._corpus.slice(place * SEGMENT, (place + 1) * SEGMENT)
            # The rest of a sentence that began in the segment before counts as a sentence of its own.
            begins[0] = True
            kept = generator.random(len(ids)) < self._keep[ids]
            count = int(kept.sum())
            blocks = -(-count // self._block)
            padding = (0, blocks * self._block - count)
            words.append(np.pad(ids[kept], padding))
            # Sentence numbers continue from segment to segment, so that no window reaches over a border.
            sentence.append(np.pad((np.cumsum(begins) + (sentences - 1))[kept], padding, constant_values=-1))
            # The window of a centre is uniform in 1 .. window, as in word2vec.
            reach.append(np.pad(generator.integers(1, self._window + 1, count), padding))
            noise.append(self._draw_noise(generator, blocks))
            sentences += int(begins.sum())
            raw += len(ids)
        names = tuple(zip(epochs.tolist(), places.tolist(), strict=True))
        return Segments(
            np.concatenate(words), np.concatenate(sentence), np.concatenate(reach), np.concatenate(noise),
            self._block, raw, names, tuple(len(part) for part in noise[1:]),
        )  # fmt: skip

    def _draw_noise(self, generator: np.random.Generator, blocks: int) -> Int64[np.ndarray, "b k"]:
        uniform = generator.random((blocks, self._shared)) * self._cumulated[-1]
        drawn = np.searchsorted(self._cumulated, uniform, side="right")
        noise: Int64[np.ndarray, "b k"] = np.minimum(drawn, len(self._cumulated) - 1, dtype=np.int64)
        return noise


_NONE = np.zeros(0, dtype=np.int64)
