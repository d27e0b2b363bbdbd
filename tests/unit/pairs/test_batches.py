"""Content of a step of pairs: drawn by visit, shared by ranks and micro-batches, with keys of what is the same."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from capt.pretrain.base.randomness import stream_key
from capt.pretrain.data.config import CorruptionConfig
from capt.pretrain.data.corruption import CorruptionVocabulary, Corruptor
from capt.pretrain.data.sampler import BlockMixtureSampler, Sampler
from capt.pretrain.pairs.batches import PairAssembler, PairBatch
from capt.pretrain.pairs.data_config import PairSource
from capt.pretrain.pairs.division import by_length, divided, within_budget
from capt.pretrain.pairs.draws import Noise, draw
from capt.pretrain.pairs.sources import EncodedTexts, Lists, SourceRows
from capt.pretrain.pairs.texts import GROUP_TOKENS, groups_by_length


def _texts(generator: random.Random, count: int, first: int) -> EncodedTexts:
    lengths = [generator.randint(2, 12) for _ in range(count)]
    starts = np.cumsum([0, *lengths])
    ids = np.arange(starts[-1], dtype=np.int32) + first
    return EncodedTexts(ids, starts.astype(np.int64), np.arange(count, dtype=np.int64) + first, 0)


def _source(name: str, rows: int, negatives: int, seed: int) -> SourceRows:
    generator = random.Random(seed)
    documents = 5 * rows
    return SourceRows(
        source=PairSource(name=name, files=["x"], negatives=negatives),
        queries=_texts(generator, rows, 10_000 * (seed + 1)),
        documents=_texts(generator, documents, 10_000 * (seed + 2) + 5000),
        query=np.arange(rows, dtype=np.int64),
        positives=Lists.of([[5 * i + j for j in range(generator.randint(1, 3))] for i in range(rows)]),
        negatives=Lists.of(
            [generator.sample(range(documents), generator.randint(0, 4)) for _ in range(rows)] if negatives
            else [[] for _ in range(rows)]
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def sources() -> list[SourceRows]:
    return [_source("a", 41, 0, 0), _source("b", 23, 2, 1)]


def _texts_of(batch: PairBatch) -> list[list[int]]:
    return [text.tolist() for text in batch.tokens.split(batch.lengths.tolist())]


def _row_contents(batch: PairBatch) -> list[tuple[int, int, tuple[int, ...]]]:
    """Row of each query, the digest of its texts, and all of its tokens."""
    texts = list(batch.tokens.split(batch.lengths.tolist()))
    n = len(batch.ids)
    negatives: list[list[int]] = [[] for _ in range(n)]
    for text, owner in zip(texts[2 * n :], batch.owners.tolist(), strict=True):
        negatives[owner] += text.tolist()
    return [
        (int(batch.ids[i]), int(batch.contents[i]), (*texts[i].tolist(), *texts[n + i].tolist(), *negatives[i]))
        for i in range(n)
    ]


def _noise() -> Noise:
    vocabulary = CorruptionVocabulary(100_000, 3, (0, 1, 2, 3))
    return Noise(functools.partial(Corruptor, CorruptionConfig(rate=0.4), vocabulary), pad_id=1, seed=3)


def _masked(batch: PairBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The corrupted texts of a batch, each with its labels."""
    lengths = batch.masked_lengths.tolist()
    texts, labels = batch.masked.split(lengths), batch.labels.split(lengths)
    return [(tuple(a.tolist()), tuple(b.tolist())) for a, b in zip(texts, labels, strict=True)]


@pytest.mark.parametrize(("bucketing", "mixed"), [(False, False), (True, False), (True, True)])
def test_a_step_is_the_same_for_any_ranks_and_micro_batches(
    sources: list[SourceRows], bucketing: bool, mixed: bool
) -> None:
    """Corruptions and their labels as well; an unchosen token is the text's, and a label what was there."""
    sampler = BlockMixtureSampler((41, 23), (2.0, 1.0), 16, seed=3, mixed=mixed)
    seen: dict[int, Any] = {}
    for world, micro in ((1, 16), (1, 4), (2, 2), (4, 2)):
        makers = [
            PairAssembler(
                sources,
                sampler,
                batch=16,
                parts=16 // (micro * world),
                world=world,
                rank=rank,
                seed=3,
                bucketing=bucketing,
                noise=_noise(),
                masks=True,
            )
            for rank in range(world)
        ]
        for step in range(9):
            batches = [batch for maker in makers for batch in maker(16 * step)]
            assert len(batches) == 16 // micro
            assert len({batch.step_tokens for batch in batches}) == 1
            assert sum(int(batch.lengths.sum()) for batch in batches) == batches[0].step_tokens
            keys = {int(i): int(k) for batch in batches for i, k in zip(batch.ids, batch.keys, strict=True)}
            masked = sorted(text for batch in batches for text in _masked(batch))
            content = sorted(row for batch in batches for row in _row_contents(batch)), keys, masked
            plain = {text for batch in batches for text in map(tuple, _texts_of(batch))}
            for text, labels in masked:
                assert tuple(t if label < 0 else label for t, label in zip(text, labels, strict=True)) in plain
            assert any(label >= 0 for _, labels in masked for label in labels)
            assert seen.setdefault(step, content) == content


def _mixed(x: int) -> int:
    """SplitMix64's finaliser, in whole numbers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) % 2**64
    return x ^ (x >> 31)


def test_negatives_drawn_at_random_are_a_function_of_seed_row_and_visit() -> None:
    """The literal draw; the same on 1, 2 and 4 ranks and after a resume; all of a row's have their turn."""
    source = _source("a", 31, 3, 2)
    many = Lists.of([random.Random(i).sample(range(155), i % 12) for i in range(31)])
    source = replace(source, negatives=many, source=source.source.model_copy(update={"draw": "random"}))
    drawn: dict[int, Counter[int]] = {row: Counter() for row in range(31)}
    for visit in range(80):
        rows = np.random.default_rng(visit).permutation(31)
        found = draw(source, rows, np.full(31, visit), 7)
        for place, row in enumerate(rows.tolist()):
            mine = found.negatives[found.owners == place].tolist()
            stored = many.values[many.starts[row] : many.starts[row + 1]].tolist()
            of_visit = _mixed((_mixed(stream_key("draw/a", 7) ^ _mixed(row)) + visit) % 2**64)
            order = sorted(range(len(stored)), key=lambda i: _mixed(of_visit ^ _mixed(i)))
            assert mine == [stored[i] for i in order[:3]]
            drawn[row].update(mine)
    for row, counts in drawn.items():
        stored = row % 12
        assert len(counts) == stored
        if stored > 3:  # each is drawn in its share of the visits, within five standard deviations
            share = 3 / stored
            assert max(abs(count - 80 * share) for count in counts.values()) < 5 * (80 * share * (1 - share)) ** 0.5
    other = draw(source, np.arange(31), np.zeros(31, dtype=np.int64), 8).negatives.tolist()
    assert other != draw(source, np.arange(31), np.zeros(31, dtype=np.int64), 7).negatives.tolist()

    # Steps of 8 go through 31 rows, so that later ones have second and third visits.
    whole: dict[int, Any] = {}
    for world in (1, 2, 4):
        for step in (*range(12), 5):  # and once more from the middle on, as a resumed run begins
            makers = [
                PairAssembler([source], Sampler(31, 3), batch=8, parts=1, world=world, rank=rank, seed=3,
                              bucketing=False) for rank in range(world)
            ]  # fmt: skip
            content = sorted(row for maker in makers for batch in maker(8 * step) for row in _row_contents(batch))
            assert whole.setdefault(step, content) == content
    assert len({str(content) for content in whole.values()}) == 12


def _cost(batch: PairBatch) -> int:
    """Tokens of queries and of documents, each side padded to its longest text."""
    n, lengths = len(batch.ids), batch.lengths
    return int(n * lengths[:n].max() + (len(lengths) - n) * lengths[n:].max())


@pytest.mark.parametrize(("budget", "bucketing"), [(70, True), (70, False), (200, True), (10_000, True)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_budget_of_tokens_divides_a_step_without_changing_it(
    sources: list[SourceRows], budget: int, bucketing: bool, world: int
) -> None:
    """Every micro-batch fits, all ranks have the same number, none is needless, and no row is lost or comes twice."""
    sampler = BlockMixtureSampler((41, 23), (2.0, 1.0), 16, seed=3)

    def makers(**changes: Any) -> list[PairAssembler]:
        return [
            PairAssembler(sources, sampler, batch=16, parts=1, world=world, rank=rank, seed=3, **changes)
            for rank in range(world)
        ]

    numbers = set()
    for step in range(9):
        of_ranks = [maker(16 * step) for maker in makers(bucketing=bucketing, budget=budget)]
        whole = [maker(16 * step) for maker in makers(bucketing=False)]
        assert len({len(batches) for batches in of_ranks}) == 1
        numbers.add(len(of_ranks[0]))
        for batches, (plain,) in zip(of_ranks, whole, strict=True):
            assert all(_cost(batch) <= budget for batch in batches)
            assert sorted(row for batch in batches for row in _row_contents(batch)) == sorted(_row_contents(plain))
            assert {batch.step_tokens for batch in batches} == {plain.step_tokens}
            if bucketing:
                totals = [max(len(row) for _, _, row in _row_contents(batch)) for batch in batches]
                assert totals == sorted(totals, reverse=True), "texts of similar length are together"
        # The rank that needs most has no neighbours that would have fitted together.
        assert any(all(_together(a, b) > budget for a, b in pairwise(batches)) for batches in of_ranks)
    if budget != 200:
        assert (numbers == {1}) == (budget == 10_000)


def _together(first: PairBatch, second: PairBatch) -> int:
    """Cost of two micro-batches as one, with the first row alone of the second."""
    n, m = len(first.ids), len(second.ids)
    mine = second.lengths[2 * m :][second.owners == 0]
    queries = torch.cat([first.lengths[:n], second.lengths[:1]])
    documents = torch.cat([first.lengths[n:], second.lengths[m : m + 1], mine])
    return int(len(queries) * queries.max() + len(documents) * documents.max())


def test_a_part_is_halved_until_all_ranks_have_the_same_number() -> None:
    parts = divided([np.arange(5), np.array([9])], 4)
    assert [part.tolist() for part in parts] == [[0, 1], [2], [3, 4], [9]]
    alone = within_budget(np.arange(3), np.array([[9, 9, 1], [1, 1, 1], [1, 1, 1]]), 4)
    assert [part.tolist() for part in alone] == [[0], [1, 2]], "a row that has more than the budget is alone"


@pytest.mark.parametrize("seed", range(3))
def test_mixed_steps_have_rows_of_all_sources_by_their_weights(seed: int) -> None:
    """Never two samples away from a share, whatever is asked first; each source has epochs of its own."""
    sizes, weights = (41, 23, 500), (2.0, 0.07, 1.0)
    asked = BlockMixtureSampler(sizes, weights, 16, seed, mixed=True).locate(np.arange(900, 916))
    sampler = BlockMixtureSampler(sizes, weights, 16, seed, mixed=True)
    epochs, rows = sampler.locate(np.arange(16 * 200))
    assert (asked[1] == rows[900:916]).all()
    sources = np.searchsorted(np.cumsum(sizes), rows, side="right")
    shares = np.array(weights) / sum(weights)
    for step in (1, 2, 50, 200):
        counts = np.bincount(sources[: 16 * step], minlength=3)
        assert (np.abs(counts - shares * 16 * step) < 2).all()
        assert sampler.used(step) == counts.tolist()
    for source, size in enumerate(sizes):
        own, whole = rows[sources == source] - sum(sizes[:source]), epochs[sources == source]
        for epoch in range(int(whole.max())):
            assert sorted(own[whole == epoch].tolist()) == list(range(size)), "an epoch has each row once"
    assert epochs[sources == 0].max() > epochs[sources == 2].max()
    assert len({tuple(sources[16 * step : 16 * step + 16].tolist()) for step in range(50)}) > 25, "orders of their own"


def test_each_step_is_of_one_source_and_each_source_has_epochs_of_its_own(sources: list[SourceRows]) -> None:
    sampler = BlockMixtureSampler((41, 23), (2.0, 1.0), 16, seed=3)
    used: list[list[int]] = [[], []]
    for step in range(60):
        _, rows = sampler.locate(np.arange(16 * step, 16 * step + 16))
        source = int(rows[0] >= 41)
        assert all((row >= 41) == source for row in rows)
        used[source] += rows.tolist()
    assert [len(each) // 16 for each in used] == [40, 20]
    assert sampler.used(60) == [len(each) for each in used]
    for rows, size in zip(used, (41, 23), strict=True):
        for begin in range(0, len(rows) - size + 1, size):
            assert len(set(rows[begin : begin + size])) == size, "an epoch has each row once"


@pytest.mark.parametrize("seed", range(5))
def test_sources_take_turns_in_proportion_to_their_weights_wherever_one_looks(seed: int) -> None:
    """At every step, whatever is asked first: the schedule depends on weights, seed and step alone."""
    generator = random.Random(seed)
    weights = tuple(generator.uniform(0.1, 5) for _ in range(generator.randint(2, 6)))
    sizes = (7,) * len(weights)
    blocks = np.array([generator.randrange(3000) for _ in range(200)])
    asked = BlockMixtureSampler(sizes, weights, 1, seed).locate(blocks)[1] // 7
    whole = BlockMixtureSampler(sizes, weights, 1, seed).locate(np.arange(3000))[1] // 7
    assert (asked == whole[blocks]).all()
    shares = np.array(weights) / sum(weights)
    for end in (1, 10, 100, 3000):
        counts = np.bincount(whole[:end], minlength=len(weights))
        assert (np.abs(counts - shares * end) < 2).all(), "never two turns away from its share"
    turns = [BlockMixtureSampler(sizes, weights, 1, other).locate(np.arange(50))[1].tolist() for other in range(10)]
    assert len({tuple(each) for each in turns}) > 1, "the seed decides who begins"


def test_one_source_is_read_as_by_the_plain_order() -> None:
    """Rows of every epoch, each once."""
    plain = Sampler(23, 5)
    epochs, rows = plain.locate(np.arange(100))
    assert Counter(rows[epochs == 1].tolist()) == Counter(range(23))


def test_visits_go_through_the_positives_and_through_the_negatives(sources: list[SourceRows]) -> None:
    source = sources[1]
    rows = np.arange(len(source))
    counts = source.negatives.counts(rows)
    seen: list[set[int]] = [set() for _ in rows]
    negatives: list[set[int]] = [set() for _ in rows]
    for visit in range(6):
        drawn = draw(source, rows, np.full(len(rows), visit), seed=1)
        for row in rows:
            own = source.positives.values[source.positives.starts[row] : source.positives.starts[row + 1]]
            assert drawn.positives[row] in own
            seen[row].add(int(drawn.positives[row]))
            mine = drawn.negatives[drawn.owners == row]
            assert len(set(mine.tolist())) == len(mine) == min(2, counts[row])
            negatives[row] |= set(mine.tolist())
    assert [len(each) for each in seen] == source.positives.counts(rows).tolist(), "every positive has its turn"
    assert [len(each) for each in negatives] == counts.tolist(), "every negative has its turn"


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_micro_batches_by_length_hold_all_samples_and_about_as_many_tokens(parts: int) -> None:
    generator = np.random.default_rng(parts)
    lengths = generator.integers(2, 200, size=70)
    samples = np.arange(0, 70, 2)
    divided = by_length(samples, lengths, parts)
    assert len(divided) == parts
    assert all(len(part) for part in divided)
    assert sorted(np.concatenate(divided).tolist()) == samples.tolist()
    tokens = [int(lengths[part].sum()) for part in divided]
    assert max(tokens) - min(tokens) <= 2 * lengths.max()
    assert all(lengths[a].min() >= lengths[b].max() for a, b in pairwise(divided))


def test_texts_are_padded_on_the_right_and_say_whether_they_are(sources: list[SourceRows]) -> None:
    maker = PairAssembler(sources, BlockMixtureSampler((41, 23), (1.0, 1.0), 8, 0), batch=8, parts=1, world=1, rank=0,
                      seed=0, bucketing=False)  # fmt: skip
    for step in range(4):
        (batch,) = maker(8 * step)
        texts = batch.tokens.split(batch.lengths.tolist())
        for sorted_ in (False, True):
            grouped = batch.texts(9, torch.device("cpu"), by_length=sorted_)
            width = int(batch.lengths.max())
            wide = [F.pad(tokens, (0, width - tokens.shape[1]), value=9) for tokens, _ in grouped.groups]
            rows = grouped.in_order([tokens.double() for tokens in wide]).long()
            for row, text in zip(rows, texts, strict=True):
                assert row[: len(text)].tolist() == text.tolist()
                assert (row[len(text) :] == 9).all()
            lengths = batch.lengths[grouped.places.argsort()].split([len(tokens) for tokens, _ in grouped.groups])
            for (tokens, padded), each in zip(grouped.groups, lengths, strict=True):
                assert tokens.shape[1] == each.max()
                assert padded == (each.min() < each.max())
            if not sorted_:
                assert [len(group.tokens) for group in grouped.groups] == [8, len(texts) - 8]


def test_groups_of_similar_length_have_the_fewest_padded_tokens_and_groups() -> None:
    """Against all divisions of the sorted lengths."""
    generator = np.random.default_rng(3)
    for n, longest in ((1, 5), (7, 300), (9, 2000), (9, 40), (6, 1)):
        lengths = torch.from_numpy(generator.integers(1, longest + 1, size=n))
        groups = groups_by_length(lengths)
        assert sorted(torch.cat(groups).tolist()) == list(range(n))
        assert all(len(group) for group in groups)
        ordered = sorted(lengths.tolist())

        def cost(parts: Sequence[Sequence[int]]) -> int:
            return sum(len(part) * max(part) + GROUP_TOKENS for part in parts)

        bounds = [(0, *cuts, n) for k in range(n) for cuts in combinations(range(1, n), k)]
        least = min(cost([ordered[a:b] for a, b in pairwise(each)]) for each in bounds)
        assert cost([lengths[group].tolist() for group in groups]) == least


def test_texts_are_corrupted_at_the_rate_of_the_step(sources: list[SourceRows]) -> None:
    """Without one at that of validation."""
    sampler = BlockMixtureSampler((41, 23), (2.0, 1.0), 16, seed=3, mixed=True)
    assembler = PairAssembler(
        sources, sampler, batch=16, parts=1, world=1, rank=0, seed=3, bucketing=False, noise=_noise(), masks=True
    )
    shares = []
    for rate in (0.1, None, 0.4, 0.8):
        labels = torch.cat([assembler(16 * step, rate)[0].labels for step in range(4)])
        shares.append(float((labels >= 0).double().mean()))
    assert shares[1] == shares[2]
    assert shares[0] < 0.5 * shares[2] < 0.9 * shares[3]
