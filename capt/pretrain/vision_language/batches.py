"""Batches of pairs: the sentence, masked or exchanged, and the regions, masked; as LXMERT corrupts them.

A batch is a pure function of the seed and the numbers of its samples, whichever process assembles it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.randomness import generator_for
from capt.pretrain.data.corruption import IGNORE
from capt.pretrain.data.mixture import MixtureSampler
from capt.pretrain.data.sampler import Sampler
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.config import ObjectivesSection, PairContrastSection
from capt.pretrain.vision_language.pairs import EncodedPairs
from capt.tokenizer.encode import TextTokenizer

# A micro-batch of pairs of a sentence and a picture, and how both are corrupted.


@dataclass(frozen=True)
class VisionLanguageBatch:
    """``n`` pairs of a sentence (``L`` tokens) and a picture (``R`` regions).

    The corrupted view is ``corrupted`` and `corrupted_features`; the original one ``tokens`` and ``features``. Flat
    positions count through the whole micro-batch: token ``j`` of pair ``i`` is ``i L + j``.

    Attributes:
        tokens: ids, padded on the right.
        corrupted: the same with words masked.
        masked: flat positions of the words to predict.
        labels: their ids.
        features: of regions, zeros where there is none.
        boxes: edges divided by width and height.
        present: True where there is a region.
        zeroed: True for a masked region whose features are zeros in the corrupted view.
        replaced: flat positions of regions that have the features of another region in the corrupted view.
        replacements: those features.
        masked_regions: flat positions of all masked regions, whatever became of their features: region ``r`` of pair
            ``i`` is ``i R + r``.
        object_ids: None in a store without object labels (so the other three).
        object_scores: the detector's confidence.
        attribute_ids: as for objects.
        attribute_scores: as for objects.
        matched: 1 where the sentence belongs to the picture, 0 where it does not, -100 in a row that only fills up the
            batch and has nothing to predict.
        answers: class of the answer, -100 for a pair without one; None where the job has no QA objective.
        ids: instance of each pair, for the contrast.
        numbers: which pair of the data each is, whatever sentence it is shown with.
        padded: whether any token of the micro-batch is padding.
        missing: whether any region of the micro-batch is absent.
    """

    tokens: Int[Tensor, "n L"]
    corrupted: Int[Tensor, "n L"]
    masked: Int[Tensor, " k"]
    labels: Int[Tensor, " k"]
    features: Float[Tensor, "n R f"]
    boxes: Float[Tensor, "n R 4"]
    present: Bool[Tensor, "n R"]
    zeroed: Bool[Tensor, "n R"]
    replaced: Int[Tensor, " r"]
    replacements: Float[Tensor, "r f"]
    masked_regions: Int[Tensor, " m"]
    object_ids: Int[Tensor, "n R"] | None
    object_scores: Float[Tensor, "n R"] | None
    attribute_ids: Int[Tensor, "n R"] | None
    attribute_scores: Float[Tensor, "n R"] | None
    matched: Int[Tensor, " n"]
    answers: Int[Tensor, " n"] | None
    ids: Int[Tensor, " n"]
    numbers: Int[Tensor, " n"]
    padded: bool
    missing: bool

    def to(self, device: torch.device) -> VisionLanguageBatch:
        """The batch on a device (asynchronously from pinned memory)."""
        moved: dict[str, Any] = {
            name: x.to(device, non_blocking=True) for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        return replace(self, **moved)

    def corrupted_features(self) -> Float[Tensor, "n R f"]:
        """The features of the corrupted view."""
        noisy = self.features.masked_fill(self.zeroed.unsqueeze(-1), 0.0)
        flat = noisy.view(-1, noisy.shape[-1])
        flat[self.replaced] = self.replacements.to(flat.dtype)
        return noisy


_MASKED, _CHANGED = 0.8, 0.9
"""Bounds of a draw: 80% of the chosen are masked, 10% changed, 10% kept (Devlin et al. 2019; Tan and Bansal 2019)."""
_TRIES = 100


@dataclass(frozen=True)
class MaskingVocabulary:
    """The ids of a tokenizer as masking uses them: ids of special tokens, and of the others (``ordinary``)."""

    bos: int
    eos: int
    pad: int
    mask: int
    special: Int64[np.ndarray, " special"]
    ordinary: Int64[np.ndarray, " ordinary"]

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> MaskingVocabulary:
        """Return the vocabulary of a tokenizer."""
        special, ids = tokenizer.special, np.array(tokenizer.special_ids, dtype=np.int64)
        ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size, dtype=np.int64), ids)
        return cls(special.bos, special.eos, special.pad, special.mask, ids, ordinary)


class _Draws(NamedTuple):
    """Uniform numbers of ``n`` samples, each row from the generator of its sample.

    Attributes:
        words: whether a word is chosen, what becomes of it, and by which word it is replaced.
        regions: the same of regions.
        answer: which answer is trained on.
        sentences: number of the pair whose sentence is shown.
    """

    words: Float[np.ndarray, "n 3 L"]
    regions: Float[np.ndarray, "n 3 R"]
    answer: Float[np.ndarray, " n"]
    sentences: Int64[np.ndarray, " n"]


class VisionLanguageAssembler:
    """Makes the micro-batch of any list of sample numbers; a pure function of (seed, sample numbers).

    Args:
        pairs: the sentences.
        store: the regions of their pictures.
        vocabulary: of the tokenizer that encoded the sentences.
        objectives: rates, and which labels are needed.
        contrast: what counts as the same pair.
        length: tokens of a sentence, special ones included.
        seed: of the noise and of the order.
        stream: name of the noise, another one for each split.
        order: of the samples of a mixture; None = `Sampler`.
        rows: the pairs that are samples; None = all. Sentences and regions of others come from all pairs.
    """

    def __init__(
        self, pairs: EncodedPairs, store: RegionStore, vocabulary: MaskingVocabulary, objectives: ObjectivesSection,
        contrast: PairContrastSection, *, length: int, seed: int, stream: str, order: MixtureSampler | None = None,
        rows: range | None = None,
    ) -> None:  # fmt: skip
        self._pairs, self._store, self._vocabulary = pairs, store, vocabulary
        self._objectives, self._contrast = objectives, contrast
        self._length, self._most = length, store.manifest.most_regions
        self._seed, self._stream = seed, stream
        self._first = 0 if rows is None else rows.start
        self._sampler = order or Sampler(len(pairs) if rows is None else len(rows), seed)

    def __call__(self, samples: Int64[np.ndarray, " n"]) -> VisionLanguageBatch:
        """The batch of the samples numbered ``samples``.

        Raises:
            DataError: no sentence of another picture is found for a pair; or the store is damaged.
        """
        epochs, numbers = self._sampler.locate(samples)
        numbers = numbers + self._first
        # All random numbers first, each of its sample: nothing below depends on which samples share a batch.
        draws = self._draw(epochs, numbers)
        exchanged = draws.sentences != numbers
        pictures = self._pairs.pictures[numbers]
        tokens = self._tokens(draws.sentences)
        # The corrupted view: words masked, regions set to zero or exchanged for those of other pictures.
        corrupted, chosen_words = self._mask_words(tokens, draws.words)
        regions = self._store.regions(pictures, self._most)
        zeroed, replaced, chosen_regions = self._mask_regions(regions.present, draws.regions)
        # The third number of a region says whose features it is exchanged for.
        places = self._other_regions(draws.regions[:, 2][replaced])
        masked = np.flatnonzero(chosen_words)
        wants = self._objectives
        return VisionLanguageBatch(
            tokens=torch.from_numpy(tokens),
            corrupted=torch.from_numpy(corrupted),
            masked=torch.from_numpy(masked),
            labels=torch.from_numpy(tokens.reshape(-1)[masked]),
            features=torch.from_numpy(regions.features),
            boxes=torch.from_numpy(regions.boxes),
            present=torch.from_numpy(regions.present),
            zeroed=torch.from_numpy(zeroed),
            replaced=torch.from_numpy(np.flatnonzero(replaced)),
            replacements=torch.from_numpy(self._store.features_at(places)),
            masked_regions=torch.from_numpy(np.flatnonzero(chosen_regions)),
            object_ids=_optional(regions.object_ids, wants.objects),
            object_scores=_optional(regions.object_scores, wants.objects),
            attribute_ids=_optional(regions.attribute_ids, wants.attributes),
            attribute_scores=_optional(regions.attribute_scores, wants.attributes),
            matched=torch.from_numpy((~exchanged).astype(np.int64)),
            answers=_optional(self._answers(numbers, exchanged, draws.answer), wants.answers),
            ids=torch.from_numpy(self._ids(pictures, draws.sentences)),
            numbers=torch.from_numpy(numbers),
            padded=bool((tokens[:, -1] == self._vocabulary.pad).any()),
            missing=not regions.present.all(),
        )

    def _draw(self, epochs: Int64[np.ndarray, " n"], numbers: Int64[np.ndarray, " n"]) -> _Draws:
        """Draw all random numbers. Exchanging comes last: it draws until the picture is another one."""
        n = len(numbers)
        draws = _Draws(
            np.empty((n, 3, self._length)), np.empty((n, 3, self._most)), np.empty(n), np.array(numbers, dtype=np.int64)
        )
        for i, (epoch, number) in enumerate(zip(epochs.tolist(), numbers.tolist(), strict=True)):
            generator = generator_for(self._stream, self._seed, epoch, number)
            # Each sample draws all of its numbers, whether or not a setting uses them.
            generator.random(out=draws.words[i])
            generator.random(out=draws.regions[i])
            exchange, draws.answer[i] = generator.random(2)
            if exchange < self._objectives.mismatched:
                draws.sentences[i] = self._of_another_picture(number, generator)
        return draws

    def _of_another_picture(self, number: int, generator: np.random.Generator) -> int:
        """A pair of another picture, every one being as likely."""
        pictures = self._pairs.pictures
        for _ in range(_TRIES):
            other = int(generator.integers(len(pictures)))
            if pictures[other] != pictures[number]:
                return other
        raise DataError(
            f"data: {_TRIES} sentences drawn at random belong to one and the same picture, so that no mismatched pair "
            "can be made: add sentences of other pictures, or set objectives.mismatched=0"
        )

    def _tokens(self, sentences: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, "n L"]:
        vocabulary = self._vocabulary
        tokens = np.full((len(sentences), self._length), vocabulary.pad, dtype=np.int64)
        tokens[:, 0] = vocabulary.bos
        for row, sentence in zip(tokens, sentences.tolist(), strict=True):
            words: Int32[np.ndarray, " k"] = self._pairs.words(sentence)
            row[1 : len(words) + 1] = words
            row[len(words) + 1] = vocabulary.eos
        return tokens

    def _mask_words(
        self, tokens: Int64[np.ndarray, "n L"], draws: Float[np.ndarray, "n 3 L"]
    ) -> tuple[Int64[np.ndarray, "n L"], Bool[np.ndarray, "n L"]]:
        """The corrupted tokens, and which words are to be predicted. Special tokens are never chosen."""
        vocabulary, (chance, fate, which) = self._vocabulary, draws.swapaxes(0, 1)
        chosen = (chance < self._objectives.word_rate) & ~np.isin(tokens, vocabulary.special)
        words = vocabulary.ordinary[(which * len(vocabulary.ordinary)).astype(np.int64)]
        changed = np.where(fate < _MASKED, vocabulary.mask, np.where(fate < _CHANGED, words, tokens))
        return np.where(chosen, changed, tokens), chosen

    def _mask_regions(
        self, present: Bool[np.ndarray, "n R"], draws: Float[np.ndarray, "n 3 R"]
    ) -> tuple[Bool[np.ndarray, "n R"], Bool[np.ndarray, "n R"], Bool[np.ndarray, "n R"]]:
        """Choose the regions that become zeros, those that get other features, and all that are masked."""
        chance, fate = draws[:, 0], draws[:, 1]
        chosen = (chance < self._objectives.region_rate) & present
        return chosen & (fate < _MASKED), chosen & (fate >= _MASKED) & (fate < _CHANGED), chosen

    def _other_regions(self, draws: Float[np.ndarray, " r"]) -> Int64[np.ndarray, " r"]:
        """Places in the store of regions drawn at random: a pair of this split, then a region of its picture.

        Not any region of the store, which may hold the pictures of other splits, and more of them another day.
        """
        whole = draws * len(self._pairs)
        pairs = whole.astype(np.int64)
        return self._store.places(self._pairs.pictures[pairs], whole - pairs)

    def _answers(
        self, numbers: Int64[np.ndarray, " n"], exchanged: Bool[np.ndarray, " n"], draws: Float[np.ndarray, " n"]
    ) -> Int64[np.ndarray, " n"]:
        """Draw an answer of each question in proportion to the scores; -100 without one, or where exchanged."""
        chosen = np.full(len(numbers), IGNORE, dtype=np.int64)
        for i in np.flatnonzero(~exchanged).tolist():
            ids, scores = self._pairs.answers(int(numbers[i]))
            if len(ids):
                ends = np.cumsum(scores, dtype=np.float64)
                # Rounding may bring the draw up to the last end.
                chosen[i] = ids[min(int(np.searchsorted(ends, draws[i] * ends[-1], side="right")), len(ids) - 1)]
        return chosen

    def _ids(self, pictures: Int64[np.ndarray, " n"], sentences: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """The instance that each pair is, for the contrast: a sentence about a picture, or the picture alone."""
        if self._contrast.duplicates == "image":
            return pictures
        ids: np.ndarray = pictures * len(self._pairs) + sentences
        return ids


def _optional(values: np.ndarray | None, weight: float) -> torch.Tensor | None:
    return torch.from_numpy(values) if values is not None and weight else None
