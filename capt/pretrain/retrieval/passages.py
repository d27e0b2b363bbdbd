"""Passages of documents that are longer than an encoder reads: they overlap, and end at paragraphs or sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.retrieval.encoders import TextEncoder

_USUAL = 256
"""Tokens of a passage where the encoder reads texts of any length."""
_UNIT = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\s\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,40}")
"""A word, a part of what is longer than words are, or a letter of a script without spaces."""
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n")
_SENTENCE = re.compile(r"[.!?\u3002\uff01\uff1f][\"')\]\u201d\u2019]*$")
_SHRUNK = 0.75
"""The share of the room that is left to a passage which turned out to be too long."""

Passages = list[tuple[int, int]]
"""The first character of each passage in the text of a document, and the one after its last."""


class PassageCutter:
    """Cuts texts into passages that an encoder reads whole.

    Args:
        encoder: decides what is too long, and counts tokens.
        overlap: tokens that a passage has in common with the one before it; None = an eighth of a passage.

    Raises:
        ConfigError: the overlap is half of a passage or more.
    """

    def __init__(self, encoder: TextEncoder, overlap: int | None = None) -> None:
        self.length = encoder.limit("document") or _USUAL
        self._encoder, self._frame = encoder, encoder.lengths([""], "document")[0]
        # One token less than there is room for: a length that is reached may be one that was cut to it.
        self._room = max(1, self.length - self._frame - 1)
        self.overlap = self._room // 8 if overlap is None else overlap
        if not 0 <= self.overlap <= self._room // 2:
            raise ConfigError(
                f"--overlap {overlap}: passages have {self._room} tokens, of which at most half may overlap"
            )
        self._costs: dict[str, int] = {}

    def passages_of(self, texts: Sequence[str]) -> list[Passages]:
        """The passages of each text, without blank space around them; one of a text that is short enough."""
        lengths = self._encoder.lengths(texts, "document")
        return [
            [_stripped(text, 0, len(text))] if length < self.length else list(self._checked(text, 0, len(text)))
            for text, length in zip(texts, lengths, strict=True)
        ]

    def _checked(self, text: str, begin: int, end: int, room: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield passages of ``text[begin:end]``; the sum of the words' tokens was too low where one is too long."""
        room = self._room if room is None else room
        found = list(self._cut(text, begin, end, room))
        lengths = self._encoder.lengths([text[first:last] for first, last in found], "document")
        for (first, last), length in zip(found, lengths, strict=True):
            if length < self.length or room <= 1:
                yield first, last
            else:
                yield from self._checked(text, first, last, int(room * _SHRUNK))

    def _cut(self, text: str, begin: int, end: int, room: int) -> Iterator[tuple[int, int]]:
        units = [found.span() for found in _UNIT.finditer(text, begin, end)]
        costs = self._tokens([text[a:b] for a, b in units])
        if max(costs) > room:  # such as emoji or base64, of which a token may be less than a letter
            units = [part for unit, cost in zip(units, costs, strict=True) for part in _parts(*unit, cost, room)]
            costs = self._tokens([text[a:b] for a, b in units])
        ends = self._ends(text, units)
        total = np.concatenate([[0], np.cumsum(costs)])
        overlap, first = min(self.overlap, room // 2), 0
        while True:
            after = max(int(np.searchsorted(total, total[first] + room, side="right")) - 1, first + 1)
            if after >= len(units):
                yield units[first][0], units[-1][1]
                return
            # The strongest end in the second half of the passage, the last of them.
            half = first + (after - first + 1) // 2
            after = half + max(range(after - half + 1), key=lambda i: (ends[half + i], i))
            yield units[first][0], units[after - 1][1]
            back = max(int(np.searchsorted(total, total[after] - overlap)), first + 1)
            # The overlap begins with a sentence where one begins in it.
            first = next((i for i in range(back, after) if ends[i]), back if back < after else after)

    def _tokens(self, units: Sequence[str]) -> list[int]:
        new = list({unit for unit in units if unit not in self._costs})
        if new:
            counts = self._encoder.lengths(new, "document")
            self._costs |= {unit: max(1, count - self._frame) for unit, count in zip(new, counts, strict=True)}
        return [self._costs[unit] for unit in units]

    def _ends(self, text: str, units: Sequence[tuple[int, int]]) -> list[int]:
        """Tell for each unit what ends before it: 2 a paragraph, 1 a sentence or a line, 0 neither."""
        ends = [0] * (len(units) + 1)
        for number in range(1, len(units)):
            gap = text[units[number - 1][1] : units[number][0]]
            if _PARAGRAPH.search(gap):
                ends[number] = 2
            elif "\n" in gap or (_SENTENCE.search(text[slice(*units[number - 1])]) is not None):
                ends[number] = 1
        return ends


def _parts(begin: int, end: int, cost: int, room: int) -> Passages:
    """Divide a unit so that each part has room, if all its letters have about the same number of tokens."""
    step = max(1, (end - begin) * room // cost)
    return [(start, min(end, start + step)) for start in range(begin, end, step)]


def _stripped(text: str, begin: int, end: int) -> tuple[int, int]:
    part = text[begin:end]
    return begin + len(part) - len(part.lstrip()), begin + len(part.rstrip())
