"""The two views of a text that belong together in the contrast: a row of `VIEWS` for each way to draw them. No torch.

Where both views hold the same words, an encoder with random weights finds a text by its copy: there is nothing left to
learn. Spans of one passage share its subject and few of its words (Contriever, Izacard et al. 2022, section 3.1;
coCondenser, Gao and Callan 2022, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from capt.pretrain.config.base import NonNegativeInt, PositiveInt, Section
from capt.pretrain.registry import load_entry, look_up_row

if TYPE_CHECKING:
    import numpy as np

GROUP = "capt.views"
"""The entry-point group of views of other distributions: name -> ``MODULE:ROW``, a `View`."""

Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Spans(Section):
    """The spans that views are cut to, in tokens of a passage without ``<s>`` and ``</s>``."""

    share: tuple[Share, Share] = Field(
        (0.1, 0.5), description="length of a view as a share of its passage: drawn from the first number to the second"
    )
    second_share: tuple[Share, Share] | None = Field(
        None, description="the same of the second view, such as [0.5, 1.0] beside short first ones; null = spans.share"
    )
    least: PositiveInt = Field(
        8, le=2**20, description="tokens of a view at least; a passage of fewer than two is short"
    )
    gap: NonNegativeInt = Field(0, le=2**20, description="neighbour: tokens between the two views")
    short: Literal["skip", "whole"] = Field(
        "skip",
        description="passages too short for two spans: skip leaves them out; whole has all of them in both views, the "
        "second one corrupted in jobs of text",
    )

    @model_validator(mode="after")
    def _goes_up(self) -> Spans:
        for name, share in (("share", self.share), ("second_share", self.second_share)):
            if share is not None and share[0] > share[1]:
                raise ValueError(f"spans.{name} {list(share)} goes down: give the smaller share first")
        return self

    @property
    def shortest(self) -> int:
        """Tokens of the shortest passage that has two spans."""
        return 2 * self.least + self.gap

    @property
    def need(self) -> str:
        """The tokens that two spans take at least, and the keys that say so."""
        gap = f", {self.gap:,} of them between them (spans.gap)" if self.gap else ""
        return f"two spans of spans.least {self.least} take {self.shortest:,} tokens{gap}"

    def lengths(self, tokens: int, longest: int, generator: np.random.Generator) -> tuple[int, int]:
        """Draw the lengths of both views of a passage of ``tokens``, each of ``longest`` at most."""
        first, second = (
            min(max(round(generator.uniform(*share) * tokens), self.least), longest, tokens)
            for share in (self.share, self.second_share or self.share)
        )
        return first, second


@dataclass(frozen=True)
class View:
    """A way to draw two views, beside the others in `VIEWS`.

    Attributes:
        about: both views, for descriptions of ``data.view``.
        draw: ``MODULE:FUNCTION``, from a passage's number of tokens, the `Spans`, the most tokens of a view, and the
            sample's own generator to two slices of the passage; None: both views are the whole text.
        corrupts: the second view is the corruption of the text, whatever else is trained.
    """

    about: str
    draw: str | None = None
    corrupts: bool = False

    @property
    def differs(self) -> bool:
        """True where the tokens of both views differ, and not their dropout alone."""
        return self.corrupts or self.draw is not None

    def function(self) -> Any:
        """The function that ``draw`` names; None where both views are the whole text."""
        return None if self.draw is None else load_entry(self.draw, GROUP, "data.view", "MODULE:FUNCTION")


VIEWS = {
    "corrupted": View("a text, and its corruption by the section corruption (CAPT)", corrupts=True),
    "dropout": View("a text under two dropouts (SimCSE)"),
    "crop": View("two spans of a passage, drawn independently", "capt.pretrain.data.views:crop"),
    "neighbour": View("two spans of a passage side by side", "capt.pretrain.data.views:neighbour"),
}
"""The values of ``data.view``."""

ABOUT = "; ".join(f"{name}: {view.about}" for name, view in VIEWS.items())


def find_view(name: str) -> View:
    """The view called ``name``, of this package or of `GROUP`. Raises ``ConfigError`` where there is none."""
    return look_up_row(name, VIEWS, GROUP, "data.view", View)


def draw_spans(
    draw: Any, passage: np.ndarray, spans: Spans, longest: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray] | None:
    """Cut two views out of a passage by the function of a `View`; None where the passage is too short."""
    if len(passage) < spans.shortest:
        return None
    first, second = draw(len(passage), spans, longest, generator)
    return passage[first], passage[second]


def drawn_lengths(draw: Any, tokens: int, spans: Spans, longest: int) -> list[int]:
    """Lengths of both views, of some draws from a passage of ``tokens``, for a plan."""
    from capt.pretrain.base.randomness import generator_for

    generator = generator_for("plan/spans", 0, 0, 0)
    drawn = [draw(tokens, spans, longest, generator) for _ in range(_DRAWN)]
    return [span.stop - span.start for both in drawn for span in both]


_DRAWN = 256
"""Draws by which a plan tells the lengths of views."""


def crop(tokens: int, spans: Spans, longest: int, generator: np.random.Generator) -> tuple[slice, slice]:
    """Two spans at independent places, which may overlap."""
    first, second = (
        slice(start, start + length)
        for length in spans.lengths(tokens, longest, generator)
        for start in (int(generator.integers(tokens - length + 1)),)
    )
    return first, second


def neighbour(tokens: int, spans: Spans, longest: int, generator: np.random.Generator) -> tuple[slice, slice]:
    """Two spans with ``spans.gap`` tokens between them, either of them before the other."""
    first, second = spans.lengths(tokens, longest, generator)
    room = tokens - spans.gap
    # What does not fit beside each other is shortened in proportion.
    if first + second > room:
        first = min(max(round(room * first / (first + second)), spans.least), room - spans.least)
        second = room - first
    is_first = bool(generator.integers(2))
    left, right = (first, second) if is_first else (second, first)
    start = int(generator.integers(room - left - right + 1))
    place = start + left + spans.gap
    before, after = slice(start, start + left), slice(place, place + right)
    return (before, after) if is_first else (after, before)
