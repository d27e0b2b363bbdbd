from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from capt.pretrain import registry
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.randomness import generator_for
from capt.pretrain.data import corruption
from capt.pretrain.data.config import CorruptionConfig
from capt.pretrain.data.corruption import (
    IGNORE,
    Corrupted,
    CorruptionVocabulary,
    Corruptor,
    MaskSpans,
    Replace,
    find_corruption,
)

VOCABULARY = CorruptionVocabulary(size=1000, mask=4, special_ids=(0, 1, 2, 3, 4))
ALL = ["mask_tokens", "mask_spans", "shuffle", "replace", "mask_tokens+shuffle", "shuffle+mask_spans+replace"]


def windows(n: int, length: int, seed: int = 0) -> np.ndarray:
    """Full windows with a document border each, and one padded window."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 1000, (n, length)).astype(np.int32)
    tokens[:, 0], tokens[:, -1] = 0, 2
    tokens[np.arange(n), rng.integers(1, length - 1, n)] = 2
    tokens[0, length // 2 :] = 1
    tokens[0, length // 2 - 1] = 2
    return tokens


def corrupt(tokens: np.ndarray, epoch: int = 0, first: int = 0, **config: object) -> Corrupted:
    generators = [generator_for("corruption", 1, epoch, first + row) for row in range(len(tokens))]
    return Corruptor(CorruptionConfig(**config), VOCABULARY, tokens.shape[1])(tokens, generators)


def used(out: Corrupted, row: int) -> np.ndarray:
    return out.positions[row][out.labels[row] != IGNORE]


@pytest.mark.parametrize("kind", ALL)
@given(
    n=st.integers(1, 6),
    length=st.integers(8, 70),
    rate=st.sampled_from([0.05, 0.15, 0.4, 0.95]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_rules_of_every_corruption(kind: str, n: int, length: int, rate: float, seed: int) -> None:
    tokens = windows(n, length, seed)
    before = tokens.copy()
    out = corrupt(tokens, type=kind, rate=rate, first=seed)
    kinds = len(kind.split("+"))
    assert np.array_equal(tokens, before)
    assert out.tokens.shape == tokens.shape
    assert out.tokens.dtype == np.int32
    assert out.positions.shape == out.labels.shape == (n, min(kinds * round(rate * (length - 2)), length - 2))
    special = tokens < 5
    assert np.array_equal(out.tokens[special], tokens[special])
    for row in range(n):
        positions = used(out, row)
        assert (np.diff(positions) > 0).all()
        assert not special[row, positions].any()
        assert np.array_equal(out.labels[row, : len(positions)], tokens[row, positions])
        assert (out.positions[row, len(positions) :] == 0).all()
        assert (out.labels[row, len(positions) :] == IGNORE).all()


@pytest.mark.parametrize("kind", ALL)
def test_result_belongs_to_seed_epoch_and_sample_alone(kind: str) -> None:
    tokens = windows(8, 64)
    whole, again = corrupt(tokens, type=kind), corrupt(tokens[5:], type=kind, first=5)
    assert np.array_equal(whole.tokens[5:], again.tokens)
    assert np.array_equal(whole.positions[5:], again.positions)
    assert np.array_equal(whole.labels[5:], again.labels)
    assert not np.array_equal(whole.tokens, corrupt(tokens, epoch=1, type=kind).tokens)


@pytest.mark.parametrize("kind", ["mask_tokens", "mask_spans", "replace"])
def test_count_is_fixed(kind: str) -> None:
    tokens = windows(40, 128)
    out = corrupt(tokens, type=kind)
    free = (tokens >= 5).sum(axis=1)
    assert out.positions.shape[1] == 19  # round(.15 * 126)
    np.testing.assert_array_equal((out.labels != IGNORE).sum(axis=1), np.rint(0.15 * free))


@pytest.mark.parametrize("kind", ["mask_tokens", "mask_spans"])
def test_80_10_10(kind: str) -> None:
    tokens = windows(400, 128)
    out = corrupt(tokens, type=kind)
    rows, slots = np.nonzero(out.labels != IGNORE)
    noisy, original = out.tokens[rows, out.positions[rows, slots]], out.labels[rows, slots]
    # of about 7,500 tokens; spans share a draw, so their deviation is that of 7,500 / 3.8
    assert (noisy == 4).mean() == pytest.approx(0.8, abs=0.04)
    assert (noisy == original).mean() == pytest.approx(0.1, abs=0.03)
    random = noisy[(noisy != 4) & (noisy != original)]
    assert len(random) / len(noisy) == pytest.approx(0.1, abs=0.03)
    assert random.min() >= 5
    assert len(np.unique(random)) > 350
    changed = out.tokens != tokens
    chosen = np.zeros_like(changed)
    chosen[rows, out.positions[rows, slots]] = True
    assert not (changed & ~chosen).any()


def test_the_rate_takes_its_course() -> None:
    """Lines between points, a jump where a share comes twice; the width follows, and validation has its own rate."""
    config = CorruptionConfig(rate=[(0.25, 0.3), (0.5, 0.2), (0.5, 0.1), (1.0, 0.05)], validation_rate=0.15)
    shares = (0.0, 0.25, 0.375, 0.4999999, 0.5, 0.75, 1.0)
    assert [config.rate_at(share) for share in shares] == pytest.approx([0.3, 0.3, 0.25, 0.2, 0.1, 0.075, 0.05], 1e-5)
    assert CorruptionConfig(rate=0.3).rate_at(0.7) == CorruptionConfig(rate=0.3).rate_of_validation == 0.3
    assert CorruptionConfig(rate=[(0.0, 0.3), (1.0, 0.1)]).rate_of_validation == 0.1
    tokens = np.full((3, 102), 9, dtype=np.int32)
    corruptor = Corruptor(config, VOCABULARY, 102)
    generators = [np.random.default_rng(row) for row in range(3)]
    for rate, width in ((None, 15), (0.3, 30), (0.05, 5)):
        labels = corruptor(tokens, generators, rate).labels
        assert labels.shape == (3, width)
        assert (labels != IGNORE).all()
    assert corruptor.slots == 30
    for bad in ([], [(0.5, 0.1), (0.4, 0.1)], [(0.5, 1.0)]):
        with pytest.raises(ValidationError):
            CorruptionConfig(rate=bad)


def test_masked_positions_are_uniform() -> None:
    tokens = np.full((4000, 42), 9, dtype=np.int32)
    tokens[:, 0], tokens[:, -1] = 0, 2
    share = {}
    for kind in ("mask_tokens", "mask_spans"):
        out = corrupt(tokens, type=kind)
        share[kind] = np.bincount(out.positions[out.labels != IGNORE], minlength=42)[1:-1] / 4000
    np.testing.assert_allclose(share["mask_tokens"], 0.15, atol=0.02)
    # Fewer spans can cover the ends of a row than its middle; both ends must be alike.
    np.testing.assert_allclose(share["mask_spans"], share["mask_spans"][::-1], atol=0.03)
    np.testing.assert_allclose(share["mask_spans"][10:-10], share["mask_spans"][10:-10].mean(), atol=0.02)


@pytest.fixture
def no_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen tokens are masked or kept, and none becomes a random one."""
    monkeypatch.setattr(corruption, "RANDOM", 0.0)


@pytest.mark.usefixtures("no_random")
def test_spans_are_geometric_and_share_one_fate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of all spans but the shortened one: P(l) proportional to .8**(l-1), l <= 10, mean 3.797."""
    tokens = np.full((2000, 402), 9, dtype=np.int32)
    tokens[:, 0], tokens[:, -1] = 0, 2
    monkeypatch.setattr(corruption, "MASKED", 0.5)
    out = corrupt(tokens, type="mask_spans", rate=0.02)
    first = out.positions[:, :1]
    together = (out.positions == first + np.arange(8)).all(axis=1).mean()
    weights = 0.8 ** np.arange(10)
    weights /= weights.sum()
    assert together == pytest.approx(weights[7:].sum(), abs=0.05)  # a first span of 8 or more spends the budget alone
    one_span = out.tokens[(out.positions == first + np.arange(8)).all(axis=1)]
    share = (one_span == 4).sum(axis=1)
    assert set(share.tolist()) <= {0, 8} | set(range(1, 8))
    assert np.isin(share, (0, 8)).mean() > 0.85  # the rest are two spans that touch


def test_span_lengths_follow_the_truncated_geometric_distribution() -> None:
    spans = MaskSpans(CorruptionConfig(), VOCABULARY)
    draws = np.random.default_rng(0).random(200_000)
    lengths = 1 + np.searchsorted(spans._cumulative, draws, side="right")
    assert lengths.max() == 10
    assert lengths.mean() == pytest.approx(3.797, abs=0.02)


@given(k=st.integers(1, 5), seed=st.integers(0, 50))
@settings(max_examples=40)
def test_shuffle_moves_no_token_further_than_k(k: int, seed: int) -> None:
    tokens = windows(4, 60, seed)
    tokens[tokens >= 5] = 5 + np.arange((tokens >= 5).sum()) % 900  # unique in a row: moves can be read off
    out = corrupt(tokens, type="shuffle", window=k, first=seed)
    for before, after in zip(tokens, out.tokens, strict=True):
        assert sorted(before) == sorted(after)
        walls = np.flatnonzero(before < 5)
        for position in np.flatnonzero(before >= 5):
            target = int(np.flatnonzero(after == before[position])[0])
            assert abs(target - position) <= k
            assert not ((walls > min(position, target)) & (walls < max(position, target))).any()


def test_shuffle_reaches_k_and_predicts_only_what_moved() -> None:
    tokens = np.tile(np.r_[0, 5 + np.arange(126), 2].astype(np.int32), (50, 1))
    out = corrupt(tokens, type="shuffle")
    places = np.argsort(out.tokens[:, 1:-1], axis=1)
    assert np.abs(places - np.arange(126)).max() == 3
    assert (out.tokens != tokens).mean() > 0.6
    for row in range(50):
        positions = used(out, row)
        assert len(positions) == 19
        assert (out.tokens[row, positions] != tokens[row, positions]).all()


def test_replaced_tokens_are_predicted() -> None:
    tokens = windows(30, 128)
    out = corrupt(tokens, type="replace", rate=0.3)
    rows, columns = np.nonzero(out.tokens != tokens)
    assert all(column in used(out, row) for row, column in zip(rows, columns, strict=True))
    assert len(rows) == pytest.approx((out.labels != IGNORE).sum(), rel=0.01)
    assert not (out.tokens[tokens >= 5] < 5).any()


@pytest.mark.usefixtures("no_random")
def test_a_later_corruption_leaves_alone_what_an_earlier_one_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corruption, "MASKED", 1.0)
    tokens = windows(20, 128)
    alone, both = (
        corrupt(tokens),
        corrupt(tokens, type="mask_tokens+shuffle"),
    )
    for row in range(20):
        assert (both.tokens[row, used(alone, row)] == 4).all()
        assert set(used(alone, row)) < set(used(both, row))
    reverse = corrupt(tokens, type=["shuffle", "mask_tokens"])
    assert reverse.positions.shape[1] == 38
    assert not np.array_equal(reverse.tokens, both.tokens)


def test_windows_without_text_are_left_as_they_are() -> None:
    tokens = np.array([[0, 2, 2, 1, 1, 1, 1, 1, 1, 1]], dtype=np.int32)
    for kind in ALL:
        out = corrupt(tokens, type=kind)
        assert np.array_equal(out.tokens, tokens)
        assert (out.labels == IGNORE).all()


def test_unknown_corruption_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown corruption 'mask_token'; did you mean 'mask_tokens'"):
        find_corruption("mask_token")
    with pytest.raises(ConfigError, match="known: mask_spans, mask_tokens, replace, shuffle"):
        find_corruption("zzz")
    with pytest.raises(ValidationError, match="did you mean 'shuffle'"):
        CorruptionConfig(type="mask_tokens+shufle")
    with pytest.raises(ValidationError, match="at least one corruption"):
        CorruptionConfig(type=[])


def test_other_packages_may_add_corruptions(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = {"capt.corruptions": {"drop": "capt.pretrain.data.corruption:Replace"}}
    monkeypatch.setattr(registry, "entry_point_values", lambda group: plugins.get(group, {}))
    assert find_corruption("drop") is Replace


@pytest.mark.parametrize(
    "bad",
    [{"rate": 0}, {"rate": 1}, {"rate": -0.1}, {"rate": float("nan")}, {"span_p": 0.3}, {"window": 0},
     {"rates": 0.1}],
)  # fmt: skip
def test_impossible_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        CorruptionConfig(**bad)


def test_the_guide_says_what_rates_mean_in_combinations() -> None:
    """Each row of the table: the share of tokens that change, and that are predicted, at the rate of its column."""
    page = (Path(__file__).parents[3] / "docs/guide/data.md").read_text()
    table = page.partition("| `corruption.type` | rate .05 |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) > 4
    tokens = np.random.default_rng(0).integers(5, 1000, (200, 128)).astype(np.int32)
    for row in table:
        cells = [cell.strip(" `") for cell in row.strip("|").split("|")]
        for rate, cell in zip((0.05, 0.15, 0.3), cells[1:], strict=True):
            changed, predicted = (float(part.strip(" %")) for part in cell.split("/"))
            out = corrupt(tokens, type=cells[0], rate=rate)
            assert 100 * float((out.tokens != tokens).mean()) == pytest.approx(changed, abs=1.6), row
            assert 100 * float((out.labels != IGNORE).sum()) / tokens.size == pytest.approx(predicted, abs=1.6), row
