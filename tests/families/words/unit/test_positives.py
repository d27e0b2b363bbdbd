"""The pairs of an update against a literal loop, and their independence of ranks and update size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.randomness import generator_for
from capt.pretrain.embeddings.config import SEGMENT
from capt.pretrain.embeddings.corpus import open_corpus
from capt.pretrain.embeddings.positives import SegmentReader, Segments
from tests.embeddings import small_job


@pytest.fixture
def reader(tmp_path: Path) -> SegmentReader:
    job = small_job(tmp_path, tmp_path / "run")
    return SegmentReader(open_corpus(job.data), job)


def test_pairs_are_those_of_word2vecs_loop(reader: SegmentReader) -> None:
    """Subsampling first, then for each kept word a window of its own, within sentence and segment."""
    corpus, window = reader._corpus, 3
    for number in range(len(reader) + 2):
        segments = reader.read(np.array([number]))
        ((epoch, place),) = segments.numbers
        ids, begins = corpus.slice(place * SEGMENT, (place + 1) * SEGMENT)
        generator = generator_for("positives", 1, epoch, place)
        uniform = generator.random(len(ids))
        keep = corpus.vocabulary.keep_probability(0.01)
        sentence, kept = 0, []
        for i, (word, begin) in enumerate(zip(ids.tolist(), begins.tolist(), strict=True)):
            sentence += begin or i == 0
            if uniform[i] < keep[word]:
                kept.append((word, sentence))
        reach = generator.integers(1, window + 1, len(kept))
        expected = []
        for i, (word, own) in enumerate(kept):
            for j in range(max(0, i - reach[i]), min(len(kept), i + reach[i] + 1)):
                if j != i and kept[j][1] == own:
                    expected.append((i, word, kept[j][0]))
        found = segments.positives(window)
        assert found.centres.tolist() == [word for word, _ in kept]
        pairs = zip(found.owner.tolist(), found.centres[found.owner].tolist(), found.contexts.tolist(), strict=True)
        assert list(pairs) == expected
        assert expected, "a segment has pairs"


def test_an_epoch_holds_every_segment_once_in_an_order_of_its_own(reader: SegmentReader) -> None:
    count = len(reader)
    assert count > 3
    orders = [[place for _, place in reader.read(np.arange(e * count, (e + 1) * count)).numbers] for e in range(3)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    whole = np.arange(count)
    assert reader.words_of(whole) == len(reader._corpus) == reader.read(whole).raw


def _arrays(segments: Segments) -> list[list[int]]:
    return [segments.words.tolist(), segments.reach.tolist(), segments.noise.tolist()]


def test_ranks_together_read_what_one_reads(reader: SegmentReader) -> None:
    numbers = np.arange(3, 8)
    whole = reader.read(numbers)
    for world in (2, 3, 7):
        parts = [reader.read(part) for part in np.array_split(numbers, world)]
        joined = [[row for part in parts for row in _arrays(part)[i]] for i in range(3)]
        assert joined == _arrays(whole)
        pairs = np.concatenate([part.positives(3).contexts for part in parts])
        assert pairs.tolist() == whole.positives(3).contexts.tolist()
    assert [len(array) for array in _arrays(reader.read(numbers[:0]))] == [0, 0, 0]


def test_noise_has_the_noise_distribution(reader: SegmentReader) -> None:
    drawn = reader.read(np.arange(400)).noise.ravel()
    share = np.bincount(drawn, minlength=len(reader.noise)) / len(drawn)
    error = np.sqrt(reader.noise * (1 - reader.noise) / len(drawn))
    assert np.abs((share - reader.noise) / error).max() < 4.5
    epochs = [reader.read(np.array([n])).noise.tolist() for n in (0, len(reader), 2 * len(reader))]
    assert epochs[0] != epochs[1] != epochs[2]
