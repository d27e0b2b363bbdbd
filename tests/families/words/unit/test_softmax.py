"""The rows of a softmax, and draws from them, against literal float64 loops."""

from __future__ import annotations

import bisect
import itertools

import pytest
import torch

from capt.pretrain.embeddings import generator
from capt.pretrain.embeddings.policy import is_neighbour


@pytest.mark.parametrize("vocabulary", [1, 6, 128, 300])
def test_rows_and_draws_are_the_literal_ones(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "_CHUNK_BYTES", 4 * vocabulary * 2)  # two rows in a part
    draw = torch.Generator().manual_seed(vocabulary)
    inputs, context = torch.randn(5, 4, generator=draw), torch.randn(vocabulary, 4, generator=draw)
    row = torch.randint(5, (400,), generator=draw)
    uniform = torch.rand(400, generator=draw, dtype=torch.float64)
    rows, words = generator.sweep(inputs, context, 0, vocabulary, row, uniform)
    logits = inputs.double() @ context.double().T
    p = logits.softmax(1)
    torch.testing.assert_close(rows.log_normaliser, logits.logsumexp(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rows.entropy, -(p * p.clamp_min(1e-300).log()).sum(1), atol=1e-5, rtol=1e-5)
    assert rows.greedy.tolist() == p.argmax(1).tolist()
    cumulated = [list(itertools.accumulate(line)) for line in p.tolist()]
    want = [
        min(bisect.bisect_right(cumulated[r], u), vocabulary - 1)
        for r, u in zip(row.tolist(), uniform.tolist(), strict=True)
    ]
    assert words.tolist() == want


def test_draws_follow_the_distribution() -> None:
    inputs, context = torch.tensor([[1.0, 0.0]]), torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(100_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, words = generator.sweep(inputs, context, 0, 200, torch.zeros(100_000, dtype=torch.int64), uniform)
    p = (inputs @ context.T).softmax(1)[0]
    share = torch.bincount(words, minlength=200) / 100_000
    assert float(((share - p) ** 2 / (p / 100_000)).sum()) < 200 + 5 * 20  # chi-squared with 199 degrees of freedom


def test_a_draw_at_the_very_end_and_a_word_without_mass() -> None:
    context = torch.tensor([[0.0], [0.0], [-1e4]])  # the last word has probability 0
    ends = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    _, words = generator.sweep(torch.ones(1, 1), context, 0, 3, torch.zeros(2, dtype=torch.int64), ends)
    assert words.tolist() == [0, 1]


def test_neighbours_are_found() -> None:
    drawn, nearby = torch.tensor([[3, 4], [5, 6]]), torch.tensor([[4, -1, 9], [-1, -1, 5]])
    assert is_neighbour(drawn, nearby).tolist() == [[False, True], [True, False]]
