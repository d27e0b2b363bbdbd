"""The declared steps of a preparation: which documents are left out. No torch and no text: a login node checks them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from capt.pretrain.config.base import PositiveInt, Section


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Languages = Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(strict=False)]


class Steps(Section):
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
    def _fit(self) -> Steps:
        if self.min_words and self.max_words and self.min_words > self.max_words:
            raise ValueError(f"min_words {self.min_words} is more than max_words {self.max_words}")
        if wrong := [
            each for each in self.languages if not (each.isalpha() and each.islower() and len(each) in (2, 3))
        ]:
            raise ValueError(f"languages: {wrong[0]!r} is no code of ISO 639, such as en or de")
        return self

    @property
    def names(self) -> list[str]:
        """The names of the steps that are set, in their order."""
        return [name for name in type(self).model_fields if getattr(self, name)]

    @property
    def compares(self) -> bool:
        """Whether documents are compared with each other."""
        return self.exact or self.near is not None
