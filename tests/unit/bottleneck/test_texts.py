"""The texts of a window: what is pooled, which words are told, and what the decoder sees; packed as alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from capt.pretrain.bottleneck.texts import _TEXT, Texts, TextSizes
from tests.bottleneck import sees

_NUMBERS = [
    [0, 0, 0, 1, 1, 2, 2, 2, 2],  # <s> word </s>, word </s>, ...
    [0, 0, 1, 1, 1, 1, 1, 1, 1],  # <s> </s>: a text without a word
    [0, 0, 0, 0, 0, -1, -1, -1, -1],
]
_WORDS = [
    [-100, 7, -100, 5, -100, 9, 9, 4, -100],
    [-100, -100, 3, 4, 5, 6, 7, 8, -100],
    [-100, 6, 5, 6, -100, -100, -100, -100, -100],
]


def _texts(numbers: list[list[int]], words: list[list[int]], keys: list[int]) -> Texts:
    sizes = TextSizes.of(np.array(numbers), np.array(words))
    return Texts(torch.tensor(numbers), torch.tensor(words), torch.tensor(keys), sizes)


@pytest.fixture
def texts() -> Texts:
    return _texts(_NUMBERS, _WORDS, [11, -(1 << 62), (1 << 63) - 1])


def test_sizes_leave_out_texts_without_a_word(texts: Texts) -> None:
    assert texts.sizes == TextSizes(slots=3, texts=5, longest=7, words=14)
    assert TextSizes.of(np.full((2, 4), -1), np.full((2, 4), -100)) == TextSizes(1, 0, 0, 0)


def test_bags_are_the_words_of_each_text(texts: Texts) -> None:
    assert texts.held().tolist() == [0, 1, 2, 4, 6]
    bags = [[id_ for id_ in row if id_ >= 0] for row in texts.bags().tolist()]
    assert bags == [[7], [5], [9, 9, 4], [3, 4, 5, 6, 7, 8], [6, 5, 6]]


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_text_is_pooled_over_its_own_tokens(texts: Texts, pooling: str) -> None:
    hidden = torch.randn(3, 9, 4, dtype=torch.float64)
    pooled = texts.pool(hidden, pooling)
    for window, numbers in enumerate(_NUMBERS):
        for text in range(3):
            rows = hidden[window, [place for place, number in enumerate(numbers) if number == text]]
            expected = torch.zeros(4) if not len(rows) else rows[0] if pooling == "cls" else rows.mean(0)
            torch.testing.assert_close(pooled[window, text], expected.double())


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_a_position_sees_its_vector_and_some_other_words_of_its_text(texts: Texts, rate: float) -> None:
    visible, places = texts.visible(rate), texts.places().tolist()
    for window, (numbers, words) in enumerate(zip(_NUMBERS, _WORDS, strict=True)):
        for row, text in enumerate(numbers):
            assert visible[window, row, :3].tolist() == [slot == max(text, 0) for slot in range(3)]
            for column in range(9):
                expected = (
                    text == numbers[column] and words[column] >= 0 and row != column
                    and sees(int(texts.keys[window]), text, places[window][row], places[window][column], rate)
                )  # fmt: skip
                assert bool(visible[window, row, 3 + column]) == expected


def test_rows_are_drawn_each_by_itself() -> None:
    """Half of the pairs, another half at each row and for each key, and no row like its column."""
    length = 200
    one = [_texts([[0] * length], [[5] * length], [key]).visible(0.5)[0, :, 1:] for key in (1, 2)]
    off = ~torch.eye(length, dtype=torch.bool)
    for drawn in one:
        assert abs(drawn[off].double().mean() - 0.5) < 0.01
        assert (drawn.double().mean(1) - 0.5).abs().max() < 0.15
        assert abs((drawn[0] == drawn[1]).double().mean() - 0.5) < 0.15
        assert abs((drawn == drawn.T)[off].double().mean() - 0.5) < 0.01
    assert abs((one[0] == one[1])[off].double().mean() - 0.5) < 0.01


def test_packed_texts_are_as_alone(texts: Texts) -> None:
    """Each text in a row of its own, with padding, under the key that it has in its window."""
    rows, words, keys, where = [], [], [], []
    for window, numbers in enumerate(_NUMBERS):
        for text in range(max(numbers) + 1):
            at = [place for place, number in enumerate(numbers) if number == text]
            rows.append([0] * len(at) + [-1] * (9 - len(at)))
            words.append([_WORDS[window][place] for place in at] + [-100] * (9 - len(at)))
            keys.append(int(texts.keys[window] + torch.tensor(_TEXT) * text))
            where.append((window, text, at))
    alone = _texts(rows, words, keys)
    assert alone.sizes._replace(slots=3) == texts.sizes
    hidden = torch.randn(3, 9, 4, dtype=torch.float64)
    states = torch.stack([_padded(hidden[window, at]) for window, _, at in where])
    for pooling in ("cls", "mean"):
        packed = texts.pool(hidden, pooling)
        expected = torch.stack([packed[window, text] for window, text, _ in where])
        torch.testing.assert_close(alone.pool(states, pooling)[:, 0], expected)
    packed, single = texts.visible(0.5), alone.visible(0.5)
    assert torch.equal(alone.bags()[:, :7], texts.bags())
    for row, (window, text, at) in enumerate(where):
        assert torch.equal(single[row, : len(at), 1 : 1 + len(at)], packed[window][at][:, [3 + place for place in at]])
        assert torch.equal(alone.places()[row, : len(at)], texts.places()[window, at])
        others = [column for column in range(9) if column not in at]
        assert not packed[window][at][:, [3 + column for column in others]].any(), (window, text)


def _padded(states: Tensor) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, 9 - len(states)))


def test_a_batch_has_texts_only_for_a_bottleneck(tmp_path: Path) -> None:
    from capt.pretrain.config.load import job_from_mapping
    from capt.pretrain.language.task import LanguageTask
    from tests.bottleneck import ragged_mapping

    for head in ("none", "bow"):
        job = job_from_mapping(ragged_mapping(tmp_path, bottleneck={"head": head}), "test")
        batch = LanguageTask(job, tmp_path).assembler("train")(np.arange(4))  # type: ignore[arg-type]
        assert (batch.texts is None) == (head == "none")
        assert batch.documents is None  # attention is across documents all the same
        if batch.texts is not None:
            ordinary = batch.words >= 0
            assert torch.equal(batch.words[ordinary], batch.tokens[ordinary])
            assert len(set(batch.keys.tolist())) == 4
