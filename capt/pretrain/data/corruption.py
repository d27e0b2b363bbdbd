"""Corruptions: a window ``x`` becomes its view ``x_hat``, and the encoder must restore the changed tokens.

The corruptions of CAPT's Table 1 and their combinations. They obey one rule: a corruption chooses positions, changes
tokens, and the label of a chosen position is the token at that position in ``x``. Specials are never touched, the
number of label slots depends on the window length alone (static shapes), and all draws are the sample's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float, Int32, Int64

from capt.pretrain.data.config import CorruptionConfig, corruption_path
from capt.pretrain.registry import load_entry

IGNORE = -100
"""Label of an unused slot."""

Tokens = Int32[np.ndarray, "n L"]
Mask = Bool[np.ndarray, "n L"]
Uniform = Float[np.ndarray, "n L"]
Counts = Int64[np.ndarray, " n"]
Generators = Sequence[np.random.Generator]


@dataclass(frozen=True)
class Corrupted:
    """A corrupted batch of ``n`` windows with ``m`` label slots each.

    ``labels[i, j]`` is the token of ``x`` at ``positions[i, j]`` of row ``i``, positions ascending; a slot that the row
    does not use holds position 0 and label ``IGNORE`` (-100).
    """

    tokens: Int32[np.ndarray, "n L"]
    positions: Int64[np.ndarray, "n m"]
    labels: Int64[np.ndarray, "n m"]


@dataclass(frozen=True)
class CorruptionVocabulary:
    """The ids of a tokenizer: how many there are, which are special, and which is ``<mask>``."""

    size: int
    mask: int
    special_ids: tuple[int, ...]

    def is_ordinary(self) -> Bool[np.ndarray, " v"]:
        """For every id, whether it is not special: only such tokens are changed, chosen, or drawn as noise."""
        table = np.ones(self.size, dtype=bool)
        table[list(self.special_ids)] = False
        return table


class Corruption(Protocol):
    """A kind of noise on a batch of ``n`` windows."""

    def __call__(self, tokens: Tokens, free: Mask, count: Counts, generators: Generators) -> tuple[Tokens, Mask]:
        """The noisy tokens, and the positions chosen for prediction: at most ``count[i]`` in row ``i``.

        Only positions where ``free`` is true may change or be chosen. Row ``i`` draws from ``generators[i]`` alone.
        """
        ...


MASKED, RANDOM = 0.8, 0.1
"""Shares of the chosen tokens that become ``<mask>`` and a random token (BERT, Devlin et al. 2019, section 3.1)."""
SPAN_P, SPAN_MAX = 0.2, 10
"""Parameter of the geometric length of a span, and the longest one, in tokens (SpanBERT, section 3.1)."""


class MaskTokens:
    """Token masking (BERT, RoBERTa): ``count`` free tokens of a row, chosen uniformly.

    Of these 80% become ``<mask>``, 10% a random ordinary token, and 10% stay.
    """

    def __init__(self, config: CorruptionConfig, vocabulary: CorruptionVocabulary) -> None:
        self._overwrite = _Overwrite(MASKED, RANDOM, vocabulary)

    def __call__(self, tokens: Tokens, free: Mask, count: Counts, generators: Generators) -> tuple[Tokens, Mask]:
        """Implement :meth:`Corruption.__call__`."""
        score, kind, draw = _uniforms(generators, 3, tokens.shape[1])
        chosen = _choose(free, count, score)
        return self._overwrite(tokens, chosen, kind, draw), chosen


class Replace(MaskTokens):
    """Token replacement: ``count`` free tokens of a row, chosen uniformly, become random ordinary tokens."""

    def __init__(self, config: CorruptionConfig, vocabulary: CorruptionVocabulary) -> None:
        self._overwrite = _Overwrite(0.0, 1.0, vocabulary)


class MaskSpans:
    """Span masking (SpanBERT, Joshi et al. 2020, section 3.1) with exactly ``count`` masked tokens a row.

    Span lengths are geometric (`SPAN_P`), cut off at `SPAN_MAX` and renormalised, with a mean of 3.8; one span
    is shortened to meet the count. The placement is uniform over all ways to lay the spans without overlap, and a whole
    span shares one draw of mask, random or keep, as in SpanBERT. Lengths count free tokens: a span may continue after
    a separator. Fewer spans can cover the first and last tokens of a row, which are therefore masked less often.
    """

    def __init__(self, config: CorruptionConfig, vocabulary: CorruptionVocabulary) -> None:
        self._overwrite = _Overwrite(MASKED, RANDOM, vocabulary)
        weights = (1.0 - SPAN_P) ** np.arange(SPAN_MAX)
        self._cumulative = np.cumsum(weights / weights.sum())[:-1]

    def __call__(self, tokens: Tokens, free: Mask, count: Counts, generators: Generators) -> tuple[Tokens, Mask]:
        """Implement :meth:`Corruption.__call__`."""
        length, place, kind, draw = _uniforms(generators, 4, tokens.shape[1])
        column = np.arange(tokens.shape[1])
        budget = np.minimum(count, free.sum(axis=1))[:, None]
        lengths = 1 + np.searchsorted(self._cumulative, length, side="right")
        # The span that reaches the budget is shortened, those behind it get length 0.
        lengths = np.clip(budget - (np.cumsum(lengths, axis=1) - lengths), 0, lengths)
        # A row's free tokens are a line of items: a span is one item, and so is each token left over. A random set of
        # items to be the spans is a uniformly random placement.
        spans = (lengths > 0).sum(axis=1, keepdims=True)
        items = free.sum(axis=1, keepdims=True) - budget + spans
        # Random ranks among the items of the row; the columns behind them are no items.
        order = np.argsort(np.where(column < items, place, np.inf), axis=1)
        size, is_span = np.empty_like(lengths), np.empty(tokens.shape, dtype=bool)
        # A span is as long as drawn, a token left over 1, what is no item 0.
        np.put_along_axis(size, order, np.where(column < spans, lengths, column < items), axis=1)
        np.put_along_axis(is_span, order, column < spans, axis=1)
        chosen, shared_kind = np.zeros(tokens.shape, dtype=bool), np.zeros(tokens.shape)
        # The sizes of a row sum to its free tokens, so rows can be filled end to end.
        chosen[free] = np.repeat(is_span, size.ravel())
        shared_kind[free] = np.repeat(kind, size.ravel())
        return self._overwrite(tokens, chosen, shared_kind, draw), chosen


class Shuffle:
    """Local shuffle (Lample et al. 2018, section 2.3): token ``i`` goes to its rank by ``i + U(0, k + 1)``.

    No token moves further than ``k = window``, and none passes a position that is not free, so that every document
    keeps its tokens. Of the positions whose token changed, up to ``count`` are chosen for prediction, uniformly.
    """

    def __init__(self, config: CorruptionConfig, vocabulary: CorruptionVocabulary) -> None:
        self._reach = config.window + 1

    def __call__(self, tokens: Tokens, free: Mask, count: Counts, generators: Generators) -> tuple[Tokens, Mask]:
        """Implement :meth:`Corruption.__call__`."""
        jump, score = _uniforms(generators, 2, tokens.shape[1])
        # A fixed position lifts itself and all after it out of reach of what precedes it.
        walls = np.cumsum(~free, axis=1) + np.cumsum(~free, axis=1) - ~free
        order = np.argsort(np.arange(tokens.shape[1]) + self._reach * (walls + jump * free), axis=1)
        noisy = np.take_along_axis(tokens, order, axis=1)
        # A token that stays where it is, or changes place with its like, predicts nothing.
        return noisy, _choose(noisy != tokens, count, score)


def find_corruption(name: str) -> Callable[[CorruptionConfig, CorruptionVocabulary], Corruption]:
    """Import the class of the corruption called ``name``. Raises ``ConfigError`` where there is none of that name."""
    return load_entry(corruption_path(name), "capt.corruptions", f"corruption.type {name}")  # type: ignore[no-any-return]


def label_slots(config: CorruptionConfig, rate: float, sequence_length: int) -> int:
    """The positions that all corruptions together can choose in a full window, whose ends are never chosen."""
    return min(round(rate * (sequence_length - 2)) * len(config.names), sequence_length - 2)


class Corruptor:
    """The corruptions of ``corruption.type``, applied in order to windows of ``sequence_length`` tokens.

    Each corruption chooses up to ``round(rate * ordinary tokens)`` positions of a row; positions that an earlier one
    chose are fixed for the later ones. The width m of ``Corrupted.positions`` is what all of them can choose in a full
    window (:func:`label_slots`); ``slots`` is that of the highest rate of the training.
    """

    def __init__(self, config: CorruptionConfig, vocabulary: CorruptionVocabulary, sequence_length: int) -> None:
        self._config, self._rate, self.sequence_length = config, config.rate_of_validation, sequence_length
        self._ordinary = vocabulary.is_ordinary()
        self._corruptions = [find_corruption(name)(config, vocabulary) for name in config.names]
        self.slots = label_slots(config, config.highest_rate, sequence_length)

    def __call__(self, tokens: Tokens, generators: Generators, rate: float | None = None) -> Corrupted:
        """Corrupt the rows of ``tokens``; row ``i`` draws from ``generators[i]`` (see ``generator_for``).

        Without a ``rate`` it is that of validation.
        """
        rate = self._rate if rate is None else rate
        free = self._ordinary[tokens]
        # Never more than the label slots, whose number depends on the length alone.
        count = np.minimum(np.rint(rate * free.sum(axis=1)).astype(np.int64), round(rate * (self.sequence_length - 2)))
        noisy, chosen = tokens, np.zeros(tokens.shape, dtype=bool)
        for corruption in self._corruptions:
            noisy, more = corruption(noisy, free & ~chosen, count, generators)
            chosen |= more
        rows, columns = np.nonzero(chosen)
        used = chosen.sum(axis=1)
        # Number of each chosen position within its row.
        slot = np.arange(len(rows)) - np.repeat(np.cumsum(used) - used, used)
        positions = np.zeros((len(tokens), label_slots(self._config, rate, self.sequence_length)), dtype=np.int64)
        labels = np.full_like(positions, IGNORE)
        positions[rows, slot] = columns
        # Labels are the tokens of the plain text, not those of an earlier corruption.
        labels[rows, slot] = tokens[rows, columns]
        return Corrupted(noisy, positions, labels)


class _Overwrite:
    """Overwrite chosen tokens: the share ``masked`` of them with ``<mask>``, the share ``random`` at random."""

    def __init__(self, masked: float, random: float, vocabulary: CorruptionVocabulary) -> None:
        self._mask, self._to_mask, self._to_random = vocabulary.mask, masked, masked + random
        self._ordinary = np.flatnonzero(vocabulary.is_ordinary()).astype(np.int32)

    def __call__(self, tokens: Tokens, chosen: Mask, kind: Uniform, draw: Uniform) -> Tokens:
        noisy = tokens.copy()
        noisy[chosen & (kind < self._to_mask)] = self._mask
        random = chosen & (kind >= self._to_mask) & (kind < self._to_random)
        noisy[random] = self._ordinary[(draw[random] * len(self._ordinary)).astype(np.int64)]
        return noisy


def _uniforms(generators: Generators, planes: int, length: int) -> Float[np.ndarray, "planes n L"]:
    """Draw ``planes`` uniform numbers for every token, each row from its own generator."""
    out = np.empty((planes, len(generators), length))
    for row, generator in enumerate(generators):
        out[:, row] = generator.random((planes, length))
    return out


def _choose(eligible: Mask, count: Counts, score: Uniform) -> Mask:
    """The ``count`` eligible positions of each row with the lowest scores (all of them where there are fewer)."""
    order = np.argsort(np.where(eligible, score, np.inf), axis=1)
    count = np.minimum(count, eligible.sum(axis=1))
    chosen = np.empty_like(eligible)
    np.put_along_axis(chosen, order, np.arange(eligible.shape[1]) < count[:, None], axis=1)
    return chosen
