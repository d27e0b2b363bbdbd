"""Batches of one length, whatever the ranks, and found again from a count."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pretrain.latent.data.batches import Batches
from pretrain.latent.data.corpus import Sentences
from pretrain.latent.data.noise import StepNoise


def _sentences(count: int = 61) -> Sentences:
    generator = np.random.default_rng(0)
    return Sentences.of([np.full(generator.integers(1, 5), 10 + i) for i in range(count)])


def test_an_epoch_holds_every_sentence_once_in_batches_of_one_length() -> None:
    batches = Batches(_sentences(), 8, seed=3)
    seen = []
    for batch in itertools.islice(batches.train(0, 0, 1), len(batches)):
        assert len(batch.tokens) <= 8
        assert batch.total == batch.valid_rows == len(batch.tokens)
        seen += batch.tokens[:, 1].tolist()
    assert sorted(seen) == list(range(10, 71))


def test_membership_stays_and_order_changes() -> None:
    batches = Batches(_sentences(), 8, seed=3)
    drawn = [tuple(batch.tokens[:, 1].tolist()) for batch in itertools.islice(batches.train(0, 0, 1), 2 * len(batches))]
    first, second = drawn[: len(batches)], drawn[len(batches) :]
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_count_of_samples_finds_the_place() -> None:
    batches = Batches(_sentences(), 8, seed=3)
    stream, done = batches.train(0, 0, 1), 0
    for _ in range(2 * len(batches)):
        resumed = next(batches.train(done, 0, 1))
        batch = next(stream)
        assert torch.equal(resumed.tokens, batch.tokens)
        done += batch.total


@pytest.mark.parametrize("world", [2, 3, 11])
def test_the_ranks_share_a_batch(world: int) -> None:
    batches = Batches(_sentences(), 8, seed=3)
    for number in range(len(batches)):
        whole = batches.take(number, 0, 1)
        parts = [batches.take(number, rank, world) for rank in range(world)]
        assert len({len(part.tokens) for part in parts}) == 1, "collectives want equal shapes"
        rows = [row for part in parts for row in part.rows[: part.valid_rows].tolist()]
        assert sorted(rows) == list(range(whole.total))
        for part in parts:
            assert torch.equal(part.tokens, whole.tokens[part.rows])


def test_validation_gives_each_batch_to_one_rank() -> None:
    batches = Batches(_sentences(), 8, seed=0)
    for limit in (1, 30, 1000):
        alone = [number for number, _ in batches.evaluation(limit, 0, 1)]
        shared = [number for rank in range(3) for number, _ in batches.evaluation(limit, rank, 3)]
        assert sorted(shared) == alone
    assert len(alone) == len(batches)


def test_a_part_of_the_validation_is_like_the_whole() -> None:
    sentences = _sentences(600)
    batches = Batches(sentences, 8, seed=0)
    part = [batch for _, batch in batches.evaluation(200, 0, 1)]
    assert sum(batch.total for batch in part) == pytest.approx(200, abs=16)
    mean = sum(batch.scored for batch in part) / sum(batch.total for batch in part)
    assert mean == pytest.approx(sentences.scored / len(sentences), rel=0.05)


def test_rare_lengths_are_as_likely_to_be_among_a_part() -> None:
    """Half of the sentences fill large batches, half are alone in their length: a part has both in equal share."""
    lengths = [3] * 320 + list(range(4, 324))
    sentences = Sentences.of([np.full(length, 4) for length in lengths])
    part = [batch for _, batch in Batches(sentences, 8, seed=0).evaluation(160, 0, 1)]
    short = sum(batch.total for batch in part if batch.tokens.shape[1] == 5)
    assert short / sum(batch.total for batch in part) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_noise_belongs_to_the_row_and_not_to_the_rank(world: int) -> None:
    def draw(rows: torch.Tensor | None) -> list[torch.Tensor]:
        noise = StepNoise(1, ("step", 5), rows, 7, torch.device("cpu"))
        dropout = noise.dropout(0.25, 2, 4, 6)
        assert dropout is not None
        kept = dropout.view(4, 2, -1, 6).permute(1, 2, 0, 3)
        return [noise.normal(2, 3).view(2, -1, 3), kept, noise.uniform(2, 5).view(2, -1, 5)]

    whole = draw(None)
    for rank in range(world):
        rows = torch.arange(rank, 7, world)
        for ours, all_rows in zip(draw(rows), whole, strict=True):
            assert torch.equal(ours, all_rows[:, rows])


def test_dropout_keeps_its_share_and_its_mean() -> None:
    noise = StepNoise(1, ("step", 0), None, 100, torch.device("cpu"))
    keep = noise.dropout(0.3, 1, 50, 40)
    assert keep is not None
    assert keep.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert float(keep.mean()) == pytest.approx(1.0, abs=3 * (0.3 / 0.7 / keep.numel()) ** 0.5)
    assert noise.dropout(0.0, 1, 2, 3) is None
    other = StepNoise(1, ("step", 1), None, 100, torch.device("cpu")).dropout(0.3, 1, 50, 40)
    assert not torch.equal(keep, other)
