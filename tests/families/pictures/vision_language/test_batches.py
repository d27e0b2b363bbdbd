"""Batches of pairs: what is masked and exchanged, how often, and the same for any number of ranks and workers."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capt.pretrain.base.errors import DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.config.schema import LoaderSection
from capt.pretrain.data.sampler import Sampler, micro_batches
from capt.pretrain.engine.loading import training_batches
from capt.pretrain.vision_language.batches import MaskingVocabulary, VisionLanguageAssembler, VisionLanguageBatch
from capt.pretrain.vision_language.config import ObjectivesSection, PairContrastSection
from capt.pretrain.vision_language.pairs import EncodedPairs, write_pairs
from capt.pretrain.vision_language.prepare import PreparedVisionLanguage, prepare
from tests.vision_language import vision_language_mapping

LENGTH = 12
MANY = np.arange(4000)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedVisionLanguage:
    return prepare(job_from_mapping(vision_language_mapping(tmp_path_factory.mktemp("batches")), "test"))  # type: ignore[arg-type]


def _assembler(
    prepared: PreparedVisionLanguage,
    *,
    pairs: EncodedPairs | None = None,
    duplicates: str = "pair",
    seed: int = 3,
    **objectives: Any,
) -> VisionLanguageAssembler:
    section = ObjectivesSection(**{"answers": 1.0, **objectives})
    return VisionLanguageAssembler(
        pairs or prepared.train, prepared.store, MaskingVocabulary.of(prepared.tokenizer), section,
        PairContrastSection(duplicates=duplicates), length=LENGTH, seed=seed, stream="pairs/train",
    )  # fmt: skip


@pytest.fixture(scope="module")
def many(prepared: PreparedVisionLanguage) -> VisionLanguageBatch:
    return _assembler(prepared)(MANY)


def _own_pairs(folder: Path, prepared: PreparedVisionLanguage, pictures: list[int]) -> EncodedPairs:
    """Sentence i is the word 300 + i."""
    return write_pairs(
        folder,
        sentences=[np.array([300 + i], dtype=np.int32) for i in range(len(pictures))],
        pictures=np.array(pictures),
        answers=[{i % 3: 1.0} for i in range(len(pictures))],
        longest=LENGTH - 2,
    )


def test_words_are_masked_as_bert_masks_them(prepared: PreparedVisionLanguage, many: VisionLanguageBatch) -> None:
    vocabulary = MaskingVocabulary.of(prepared.tokenizer)
    words = ~torch.isin(many.tokens, torch.tensor(vocabulary.special))
    chosen = torch.zeros_like(many.tokens, dtype=torch.bool).flatten()
    chosen[many.masked] = True
    chosen = chosen.view_as(words)
    assert not (chosen & ~words).any(), "special tokens are never chosen"
    assert torch.equal(many.tokens.flatten()[many.masked], many.labels)
    assert torch.equal(many.tokens[~chosen], many.corrupted[~chosen])
    assert float(chosen[words].float().mean()) == pytest.approx(0.15, abs=0.005)
    now = many.corrupted[chosen]
    masked, kept = now == vocabulary.mask, now == many.tokens[chosen]
    assert float(masked.float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float(kept.float().mean()) == pytest.approx(0.1, abs=0.02)
    random = now[~masked & ~kept]
    assert not torch.isin(random, torch.tensor(vocabulary.special)).any()
    assert len(random.unique()) > 0.6 * len(vocabulary.ordinary), "of all ordinary ids"


def test_words_are_chosen_independently(many: VisionLanguageBatch) -> None:
    """Some sentences have no masked word, and some have three: the count is not fixed."""
    per_pair = torch.bincount(many.masked // LENGTH, minlength=len(MANY))
    assert (per_pair == 0).any()
    assert (per_pair >= 3).any()


def test_regions_are_masked_as_lxmert_masks_them(prepared: PreparedVisionLanguage, many: VisionLanguageBatch) -> None:
    present, regions = many.present, many.present.shape[1]
    chosen = torch.zeros_like(present).flatten()
    chosen[many.masked_regions] = True
    chosen = chosen.view_as(present)
    assert not (chosen & ~present).any()
    assert float(chosen[present].float().mean()) == pytest.approx(0.15, abs=0.005)
    replaced = torch.zeros_like(present).flatten()
    replaced[many.replaced] = True
    replaced = replaced.view_as(present)
    assert not (many.zeroed & replaced).any()
    assert ((many.zeroed | replaced) & ~chosen).sum() == 0
    assert float(many.zeroed[chosen].float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float(replaced[chosen].float().mean()) == pytest.approx(0.1, abs=0.02)
    assert regions == prepared.store.manifest.most_regions


def test_other_regions_come_from_the_pictures_of_the_split(
    prepared: PreparedVisionLanguage, many: VisionLanguageBatch
) -> None:
    """A store may hold the pictures of a test set as well; each picture of the split is as likely, and each region."""
    store, pictures = prepared.store, np.unique(prepared.train.pictures)
    assert len(pictures) < len(store), "the store has pictures of another split"
    regions = store.regions(pictures)
    own = {row.tobytes(): i for i, rows in enumerate(regions.features) for row in rows[regions.present[i]]}
    found = np.array([own[row.numpy().tobytes()] for row in many.replacements])
    assert len(torch.unique(many.replacements, dim=0)) > 0.5 * len(own)
    shares = np.bincount(found, minlength=len(pictures)) / len(found)
    assert abs(shares - 1 / len(pictures)).max() < 5 * np.sqrt(1 / len(pictures) / len(found))


def test_half_of_the_pairs_get_the_sentence_of_another_picture(
    prepared: PreparedVisionLanguage, many: VisionLanguageBatch
) -> None:
    pairs = prepared.train
    _, numbers = Sampler(len(pairs), 3).locate(MANY)
    assert float(many.matched.float().mean()) == pytest.approx(0.5, abs=0.025)
    pictures, shown = np.divmod(many.ids.numpy(), len(pairs))
    assert np.array_equal(pictures, pairs.pictures[numbers])
    own = shown == numbers
    assert np.array_equal(own, many.matched.numpy() == 1)
    assert (pairs.pictures[shown[~own]] != pictures[~own]).all()
    for row in range(50):
        words = pairs.words(int(shown[row])).tolist()
        assert many.tokens[row, 1 : len(words) + 1].tolist() == words


def test_answers_are_drawn_in_proportion_to_their_scores(
    prepared: PreparedVisionLanguage, many: VisionLanguageBatch
) -> None:
    pairs, answers = prepared.train, many.answers
    assert answers is not None
    _, numbers = Sampler(len(pairs), 3).locate(MANY)
    assert (answers[many.matched == 0] == -100).all(), "a question about another picture has no answer"
    best = []
    for row in np.flatnonzero(many.matched.numpy()).tolist():
        ids, scores = pairs.answers(int(numbers[row]))
        assert (int(answers[row]) in ids) == bool(len(ids))
        if len(ids) == 2:
            best.append(int(answers[row]) == ids[np.argmax(scores)])
    assert len(best) > 200
    assert float(np.mean(best)) == pytest.approx(1.0 / 1.3, abs=0.06)


def test_one_picture_alone_cannot_be_mismatched(prepared: PreparedVisionLanguage, tmp_path: Path) -> None:
    pairs = _own_pairs(tmp_path / "pairs", prepared, [7, 7, 7])
    with pytest.raises(DataError, match=r"one and the same picture.*objectives\.mismatched=0"):
        _assembler(prepared, pairs=pairs)(np.arange(20))
    assert _assembler(prepared, pairs=pairs, mismatched=0.0)(np.arange(20)).matched.all()


def test_instances_are_pairs_or_pictures(prepared: PreparedVisionLanguage) -> None:
    pair, image = (_assembler(prepared, duplicates=what)(np.arange(400)).ids for what in ("pair", "image"))
    assert torch.equal(pair // len(prepared.train), image)
    assert len(pair.unique()) > 2 * len(image.unique())


def test_labels_that_nobody_needs_are_not_carried(prepared: PreparedVisionLanguage) -> None:
    batch = _assembler(prepared, objects=0.0, attributes=0.0, answers=0.0)(np.arange(3))
    assert batch.object_ids is batch.object_scores is batch.attribute_ids is batch.attribute_scores is None
    assert batch.answers is None


def _rows(batch: VisionLanguageBatch) -> list[dict[str, Any]]:
    """Values of each pair of a batch, apart from its place."""
    n, length = batch.tokens.shape
    regions, noisy = batch.present.shape[1], batch.corrupted_features()
    flat = ("masked", "labels", "replaced", "replacements", "masked_regions")
    whole = [field.name for field in fields(batch) if field.name not in flat]
    words = list(zip(batch.masked.tolist(), batch.labels.tolist(), strict=True))
    return [
        {
            **{name: x[i].tolist() for name in whole if isinstance(x := getattr(batch, name), torch.Tensor)},
            "masked": [(place % length, label) for place, label in words if place // length == i],
            "regions": [place % regions for place in batch.masked_regions.tolist() if place // regions == i],
            "noisy": noisy[i].tolist(),
        }
        for i in range(n)
    ]


def _assemble(
    assembler: VisionLanguageAssembler, shape: tuple[int, int, int, int], start: int
) -> list[VisionLanguageBatch]:
    return [assembler(samples) for samples in micro_batches(start, *shape)]


def _steps(
    prepared: PreparedVisionLanguage, world: int, micro: int, workers: int, start: int = 5
) -> list[dict[int, dict[str, Any]]]:
    """Per step of 12 samples: each pair by its sample number, over all ranks and micro-batches."""
    taken: list[dict[int, dict[str, Any]]] = [{} for _ in range(3)]
    starts = range(start, start + 36, 12)
    for rank in range(world):
        assembler = _assembler(prepared)
        shape = (12, 12 // (micro * world), world, rank)
        batches = training_batches(partial(_assemble, assembler, shape), starts, LoaderSection(workers=workers))
        for step, (first, parts) in enumerate(zip(starts, batches, strict=True)):
            for samples, part in zip(micro_batches(first, *shape), parts, strict=True):
                taken[step] |= dict(zip(samples.tolist(), _rows(part), strict=True))
    return taken


@pytest.mark.parametrize(("world", "micro", "workers"), [(2, 3, 0), (4, 3, 0), (1, 4, 2), (3, 2, 1)])
def test_a_step_holds_the_same_samples_whoever_loads_them(
    prepared: PreparedVisionLanguage, world: int, micro: int, workers: int
) -> None:
    assert _steps(prepared, world, micro, workers) == _steps(prepared, 1, 12, 0)


def test_noise_changes_between_epochs_and_seeds(prepared: PreparedVisionLanguage) -> None:
    n = len(prepared.train)
    first, second, other = (
        _assembler(prepared, mismatched=0.0, seed=seed)(np.arange(start, start + n))
        for start, seed in ((0, 3), (n, 3), (0, 4))
    )
    assert sorted(first.ids.tolist()) == sorted(second.ids.tolist()) == sorted(other.ids.tolist())
    for batch in (second, other):
        assert batch.ids.tolist() != first.ids.tolist()
        a, b = first.ids.argsort(), batch.ids.argsort()
        assert torch.equal(first.tokens[a], batch.tokens[b])
        assert not torch.equal(first.corrupted[a], batch.corrupted[b])
