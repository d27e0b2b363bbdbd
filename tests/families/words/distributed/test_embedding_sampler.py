"""Softmax rows and draws with the vocabulary divided over ranks, against one process with the whole of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from capt.pretrain.base import distributed
from capt.pretrain.embeddings.generator import sweep
from capt.pretrain.embeddings.tables import RowExchange
from tests.support import run_ranks

CENTRES, DIM, DRAWS = 7, 5, 400


def _world(
    words: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Generator vectors of the centres, its context table, and row and number of every draw."""
    generator = torch.Generator().manual_seed(words)
    centres = torch.randn(CENTRES, DIM, generator=generator, dtype=torch.float64)
    table = 2 * torch.randn(words, DIM, generator=generator, dtype=torch.float64)
    row = torch.randint(CENTRES, (DRAWS,), generator=generator)
    return centres.to(dtype), table.to(dtype), row, torch.rand(DRAWS, generator=generator, dtype=torch.float64)


def _sweep(words: int, dtype: torch.dtype = torch.float64) -> dict[str, np.ndarray]:
    """Results of a rank for its part of the draws; the parts differ in length, and one may be empty."""
    rank, world = distributed.rank(), distributed.world_size()
    centres, table, row, uniform = _world(words, dtype)
    exchange = RowExchange(words)
    bounds = [0, DRAWS] if world == 1 else [0, 0, *(DRAWS * i // (world - 1) for i in range(1, world))]
    own = slice(bounds[rank], bounds[rank + 1])
    rows, drawn = sweep(centres, table[exchange.start : exchange.end], exchange.start, words, row[own], uniform[own])
    every, place = distributed.gather_ragged(drawn)
    assert torch.equal(every[place], drawn)
    names = ("log_normaliser", "entropy", "greedy", "log_greedy")
    return {"drawn": every.numpy(), **{name: getattr(rows, name).numpy() for name in names}}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("words", [3, 130, 1001])
def test_rows_and_draws_do_not_depend_on_the_ranks(words: int, world: int) -> None:
    """Three words on four ranks leave a rank without any; 130 and 1,001 end within a block of a shard."""
    alone = _sweep(words)
    centres, table, _, _ = _world(words)
    log_g = (centres @ table.T).log_softmax(1)
    assert alone["log_normaliser"] == pytest.approx((centres @ table.T).logsumexp(1).numpy())
    assert alone["entropy"] == pytest.approx(-(log_g.exp() * log_g).sum(1).numpy(), abs=1e-12)
    assert (alone["greedy"] == log_g.argmax(1).numpy()).all()
    for result in run_ranks(_sweep, world, words):
        assert (result["drawn"] == alone["drawn"]).all()
        assert (result["greedy"] == alone["greedy"]).all()
        for name in ("log_normaliser", "entropy", "log_greedy"):
            assert result[name] == pytest.approx(alone[name], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_in_float32_the_distribution_is_the_same_to_the_last_bit_of_float32(world: int) -> None:
    """Sums of float32 that begin elsewhere differ by 1e-8, and of a large vocabulary one in 1e5 draws by a word."""
    words = 1001
    (alone,) = run_ranks(_sweep, 1, words, torch.float32)  # with the number of threads of a rank
    for result in run_ranks(_sweep, world, words, torch.float32):
        assert (result["drawn"] == alone["drawn"]).all()
        for name in ("log_normaliser", "log_greedy"):
            assert result[name] == pytest.approx(alone[name], rel=1e-14, abs=1e-14)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_draws_are_the_inverse_of_the_distribution_function(world: int) -> None:
    """A word is drawn exactly by the numbers between the sum of the probabilities before it and that with it."""
    words = 130
    result = _sweep(words) if world == 1 else run_ranks(_sweep, world, words)[0]
    centres, table, row, uniform = _world(words)
    cumulated = (centres @ table.T).softmax(1).cumsum(1)
    expected = torch.searchsorted(cumulated[row], uniform[:, None], right=True)[:, 0]
    assert (result["drawn"] == expected.numpy()).all()
