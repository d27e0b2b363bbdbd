"""Selection of the documents that a preparation leaves out: its keys, and the filters of single documents. No torch."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field, model_validator

from capt.pretrain.config.base import PositiveInt, Section

Filter = Callable[[str], bool]
"""Return true for a document that is left out."""


class DocumentFilters(Section):
    """Filters of single documents, then the removal of duplicates; in the order of these keys.

    A document is judged by its first 16 Mi characters, of which there are hardly ever more.
    """

    min_words: PositiveInt | None = Field(None, description="leave out documents of fewer words")
    max_words: PositiveInt | None = Field(None, description="leave out documents of more words")
    exact: bool = Field(
        False, description="of documents that differ at most in case, spaces and Unicode form keep the first"
    )

    @model_validator(mode="after")
    def _fit(self) -> DocumentFilters:
        if self.min_words and self.max_words and self.min_words > self.max_words:
            raise ValueError(f"min_words {self.min_words} is more than max_words {self.max_words}")
        return self

    @property
    def names(self) -> list[str]:
        """The names of the filters that are set, in their order."""
        return [name for name in type(self).model_fields if getattr(self, name)]


def filters_of(declared: DocumentFilters) -> dict[str, Filter]:
    """Return the filters of single documents that ``declared`` names, by name and in order."""
    filters: dict[str, Filter] = {}
    if (least := declared.min_words) is not None:
        filters["min_words"] = lambda text: len(text.split()) < least
    if (most := declared.max_words) is not None:
        filters["max_words"] = lambda text: len(text.split()) > most
    return filters
