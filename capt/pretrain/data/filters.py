"""Which documents a preparation leaves out: the keys that declare it, and the filters of single documents. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from capt.pretrain.base.errors import DataError
from capt.pretrain.config.base import PositiveInt, Section

_LOOKED_AT = 10_000
"""Characters by which the language of a document is told."""

# Thresholds of Gopher (Rae et al. 2021, "Scaling Language Models", table A1). A document above one of them is left out.
DUPLICATE_LINES, DUPLICATE_LINE_CHARACTERS = 0.30, 0.20
DUPLICATE_PARAGRAPHS, DUPLICATE_PARAGRAPH_CHARACTERS = 0.30, 0.20
TOP_NGRAM_CHARACTERS = {2: 0.20, 3: 0.18, 4: 0.16}
DUPLICATE_NGRAM_CHARACTERS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}

Filter = Callable[[str], bool]
"""Whether a document is left out."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Languages = Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(strict=False)]


class DocumentFilters(Section):
    """Filters of single documents, then the removal of duplicates; in the order of these keys.

    A document is judged by its first 16 Mi characters, of which there are hardly ever more.
    """

    min_words: PositiveInt | None = Field(None, description="leave out documents of fewer words")
    max_words: PositiveInt | None = Field(None, description="leave out documents of more words")
    repetition: bool = Field(
        False, description="leave out repetitive documents, by the thresholds of Gopher (Rae et al. 2021, table A1)"
    )
    languages: Languages = Field((), description="leave out documents of other languages than these, as en or [en, de]")
    exact: bool = Field(
        False, description="of documents that differ at most in case, spaces and Unicode form keep the first"
    )
    near: float | None = Field(
        None,
        ge=0.5,
        le=1.0,
        description="of documents whose sets of five words in a row have about this Jaccard similarity or more, and of "
        "those that these resemble in turn, keep the first (MinHash); 0.8 is usual",
    )

    @model_validator(mode="after")
    def _fit(self) -> DocumentFilters:
        if self.min_words and self.max_words and self.min_words > self.max_words:
            raise ValueError(f"min_words {self.min_words} is more than max_words {self.max_words}")
        if wrong := [
            each for each in self.languages if not (each.isalpha() and each.islower() and len(each) in (2, 3))
        ]:
            raise ValueError(f"languages: {wrong[0]!r} is not a code of ISO 639, such as en or de")
        return self

    @property
    def names(self) -> list[str]:
        """The names of the filters that are set, in their order."""
        return [name for name in type(self).model_fields if getattr(self, name)]

    @property
    def compares(self) -> bool:
        """Whether documents are compared with each other."""
        return self.exact or self.near is not None


def filters_of(declared: DocumentFilters) -> dict[str, Filter]:
    """The filters that ``declared`` names, by name and in order.

    Raises:
        DataError: a language is unknown.
        ModuleNotFoundError: ``py3langid``, which tells languages, is not installed.
    """
    filters: dict[str, Filter] = {}
    if (least := declared.min_words) is not None:
        filters["min_words"] = lambda text: len(text.split()) < least
    if (most := declared.max_words) is not None:
        filters["max_words"] = lambda text: len(text.split()) > most
    if declared.repetition:
        filters["repetition"] = is_repetitive
    if declared.languages:
        filters["languages"] = _language_filter(declared.languages)
    return filters


def _language_filter(wanted: Sequence[str]) -> Filter:
    import py3langid

    # py3langid ranks all languages that it knows, for any text.
    known = {name for name, _ in py3langid.rank("")}
    if unknown := [name for name in wanted if name not in known]:
        raise DataError(f"languages: {unknown[0]} is unknown; known: {', '.join(sorted(known))}")
    return lambda text: py3langid.classify(text[:_LOOKED_AT])[0] not in wanted


def is_repetitive(text: str) -> bool:
    """Whether a document is above one of Gopher's thresholds.

    They are the share of lines (paragraphs) that repeat an earlier one, by number and by characters; of the characters
    in the most frequent sequence of n words, for n from 2 to 4; and of those in sequences of n words that occur more
    than once, each character counted once, for n from 5 to 10. Characters are those of words.
    """
    # Gopher measures lines and paragraphs alike, by number and by characters.
    for parts, by_number, by_characters in (
        (re.split(r"\n+", text.strip()), DUPLICATE_LINES, DUPLICATE_LINE_CHARACTERS),
        (re.split(r"\n{2,}", text.strip()), DUPLICATE_PARAGRAPHS, DUPLICATE_PARAGRAPH_CHARACTERS),
    ):
        number, characters = repeated_parts(parts)
        if number > by_number or characters > by_characters:
            return True
    words = text.split()
    return any(top_ngram(words, n) > most for n, most in TOP_NGRAM_CHARACTERS.items()) or any(
        repeated_ngrams(words, n) > most for n, most in DUPLICATE_NGRAM_CHARACTERS.items()
    )


def repeated_parts(parts: Sequence[str]) -> tuple[float, float]:
    """The share of parts that equal an earlier one, by number and by characters."""
    seen: set[str] = set()
    number = characters = 0
    for part in parts:
        if part in seen:
            number, characters = number + 1, characters + len(part)
        seen.add(part)
    return number / max(1, len(parts)), characters / max(1, sum(map(len, parts)))


def top_ngram(words: Sequence[str], n: int) -> float:
    """The share of characters in the most frequent sequence of n words, all its occurrences; 0 if none repeats."""
    counts = Counter(zip(*(words[i:] for i in range(n)), strict=False))
    if not counts:
        return 0.0
    highest = max(counts.values())
    if highest == 1:
        return 0.0
    longest = max(sum(map(len, ngram)) for ngram, count in counts.items() if count == highest)
    return min(1.0, highest * longest / sum(map(len, words)))


def repeated_ngrams(words: Sequence[str], n: int) -> float:
    """The share of characters in sequences of n words that occur more than once, each character counted once."""
    ngrams = list(zip(*(words[i:] for i in range(n)), strict=False))
    counts = Counter(ngrams)
    covered = bytearray(len(words))
    for i, ngram in enumerate(ngrams):
        if counts[ngram] > 1:
            covered[i : i + n] = b"\1" * n
    return sum(len(word) for word, is_in in zip(words, covered, strict=True) if is_in) / max(1, sum(map(len, words)))
