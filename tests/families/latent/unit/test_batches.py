"""Batches of one length or of similar ones, whatever the ranks, and found again from a count."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from capt.pretrain.latent.batches import Batches, StepNoise
from capt.pretrain.latent.corpus import END, PAD, START, Sentences, build_vocabulary, load_sentences
from capt.pretrain.latent.text_files import DataSection


def _sentences(count: int = 61) -> Sentences:
    generator = np.random.default_rng(0)
    return Sentences.of([np.full(generator.integers(1, 5), 10 + i) for i in range(count)])


def test_an_epoch_holds_every_sentence_once_in_batches_of_one_length() -> None:
    batches = Batches(_sentences(), 8, 3, "equal")
    seen = []
    for batch in itertools.islice(batches.train(0, 0, 1), len(batches)):
        assert len(batch.tokens) <= 8
        assert batch.total == batch.valid_rows == len(batch.tokens)
        seen += batch.tokens[:, 1].tolist()
    assert sorted(seen) == list(range(10, 71))


def test_membership_stays_and_order_changes() -> None:
    batches = Batches(_sentences(), 8, 3, "equal")
    drawn = [tuple(batch.tokens[:, 1].tolist()) for batch in itertools.islice(batches.train(0, 0, 1), 2 * len(batches))]
    first, second = drawn[: len(batches)], drawn[len(batches) :]
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_count_of_samples_finds_the_place() -> None:
    batches = Batches(_sentences(), 8, 3, "equal")
    stream, done = batches.train(0, 0, 1), 0
    for _ in range(2 * len(batches)):
        resumed = next(batches.train(done, 0, 1))
        batch = next(stream)
        assert torch.equal(resumed.tokens, batch.tokens)
        done += batch.total


@pytest.mark.parametrize("lengths", ["equal", "similar"])
@pytest.mark.parametrize("world", [2, 3, 11])
def test_the_ranks_share_a_batch(world: int, lengths: Literal["equal", "similar"]) -> None:
    batches = Batches(_sentences(), 8, 3, lengths)
    for number in range(len(batches)):
        whole = batches.take(number, 0, 1)
        parts = [batches.take(number, rank, world) for rank in range(world)]
        assert len({part.tokens.shape for part in parts}) == 1, "collectives and random numbers want equal shapes"
        assert {part.scored for part in parts} == {whole.scored}
        rows = [row for part in parts for row in part.rows[: part.valid_rows].tolist()]
        assert sorted(rows) == list(range(whole.total))
        for part in parts:
            assert torch.equal(part.tokens, whole.tokens[part.rows])


def test_validation_gives_each_batch_to_one_rank() -> None:
    batches = Batches(_sentences(), 8, 0, "equal")
    for limit in (1, 30, 1000):
        alone = [number for number, _ in batches.evaluation(limit, 0, 1)]
        shared = [number for rank in range(3) for number, _ in batches.evaluation(limit, rank, 3)]
        assert sorted(shared) == alone
    assert len(alone) == len(batches)


def test_a_part_of_the_validation_is_like_the_whole() -> None:
    sentences = _sentences(600)
    batches = Batches(sentences, 8, 0, "equal")
    part = [batch for _, batch in batches.evaluation(200, 0, 1)]
    assert sum(batch.total for batch in part) == pytest.approx(200, abs=16)
    mean = sum(batch.scored for batch in part) / sum(batch.total for batch in part)
    assert mean == pytest.approx(sentences.scored / len(sentences), rel=0.05)


def test_rare_lengths_are_as_likely_to_be_among_a_part() -> None:
    """Half of the sentences fill large batches, half are alone in their length: a part has both in equal share."""
    lengths = [3] * 320 + list(range(4, 324))
    sentences = Sentences.of([np.full(length, 4) for length in lengths])
    part = [batch for _, batch in Batches(sentences, 8, 0, "equal").evaluation(160, 0, 1)]
    short = sum(batch.total for batch in part if batch.tokens.shape[1] == 5)
    assert short / sum(batch.total for batch in part) == pytest.approx(0.5, abs=0.06)


def _documents() -> Sentences:
    """513 documents of 10 to 200 words, word i + 10 in the i-th."""
    generator = np.random.default_rng(1)
    return Sentences.of([np.full(generator.integers(10, 201), 10 + i) for i in range(513)])


def test_documents_of_all_lengths_fill_their_batches() -> None:
    documents = _documents()
    batches = Batches(documents, 32, 3, "similar")
    assert len(batches) == 17
    drawn = list(itertools.islice(batches.train(0, 0, 1), len(batches)))
    assert {batch.total for batch in drawn} == {30, 31}
    assert sorted(word for batch in drawn for word in batch.tokens[:, 1].tolist()) == list(range(10, 523))
    assert sum(batch.scored for batch in drawn) == documents.scored
    assert sum(batch.padding for batch in drawn) < 0.1 * documents.scored, "neighbours in length"
    lengths = dict(zip(range(10, 523), documents.lengths.tolist(), strict=True))
    for batch in drawn:
        for row in batch.tokens.tolist():
            length = lengths[row[1]]
            assert row == [START, *[row[1]] * (length - 2), END, *[PAD] * (len(row) - length)]


def test_batches_of_one_length_where_these_are_full() -> None:
    documents = Batches(_documents(), 32, 3, "auto")
    assert documents.lengths == "similar"
    assert documents.alone == 0
    recipe = Batches(_documents(), 32, 3, "equal")
    assert (recipe.lengths, len(recipe) > 150, recipe.alone > 20) == ("equal", True, True)
    assert Batches(_sentences(), 8, 3, "auto").lengths == "equal"


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (33, [17, 16]), (64, [32, 32])])
def test_no_sentence_is_alone_that_need_not_be(count: int, sizes: list[int]) -> None:
    batches = Batches(_sentences(count), 32, 3, "similar")
    assert sorted((batches.take(i, 0, 1).total for i in range(len(batches))), reverse=True) == sizes


@pytest.mark.realdata
def test_the_recipe_on_ptb_keeps_its_batches(data_folder: Path) -> None:
    data = DataSection(path=data_folder / "lm" / "ptb")
    sentences = load_sentences(data, "train", build_vocabulary(data))
    assert sentences is not None
    batches = Batches(sentences, 32, 1, "auto")
    assert (batches.lengths, len(batches)) == ("equal", 1359)


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
