"""How VQA's official evaluator normalises answers, with its quirks: other normalisers score some answers otherwise.

Written from the behaviour of ``vqaEval.py`` of https://github.com/GT-Vision-Lab/VQA (commit a013f00).
"""

from __future__ import annotations

import re

_ARTICLES = {"a", "an", "the"}
_NUMBERS = dict(
    zip(
        ("none", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
        map(str, (0, *range(11))),
        strict=True,
    )
)
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
_MOST_PERIODS = 32
"""The evaluator passes a flag (of value 32) where the number of replacements belongs."""

_CONTRACTIONS = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't "
    "he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've "
    "must've mustn't needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't "
    "shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's "
    "something'd something'd've something'll that's there'd there'd've there're there's they'd they'd've "
    "they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's "
    "where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't "
    "wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've"
)


def _without_one_apostrophe(word: str) -> list[str]:
    return [word[:i] + word[i + 1 :] for i, letter in enumerate(word) if letter == "'"]


_MENDED = {wrong: word for word in _CONTRACTIONS.split() for wrong in _without_one_apostrophe(word)}
_MENDED["somebody'd"] = "somebodyd"


def strip_punctuation(text: str) -> str:
    """Punctuation removed where it is next to a blank, or anywhere if a comma is between two digits somewhere.

    Elsewhere it becomes a blank: ``t-shirt`` is ``t shirt``, ``yes, sir`` is ``yes sir``. What decides is the text
    as given. Then the first 32 periods go that no digit follows.
    """
    stripped = text
    has_thousands = _COMMA.search(text) is not None
    for mark in _PUNCTUATION:
        beside_blank = f"{mark} " in text or f" {mark}" in text
        stripped = stripped.replace(mark, "" if beside_blank or has_thousands else " ")
    return _PERIOD.sub("", stripped, count=_MOST_PERIODS)


def plain_words(text: str) -> str:
    """Words in lower case, without articles, ``none`` and ``zero`` to ``ten`` as digits, apostrophes put back."""
    words = (_NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(_MENDED.get(word, word) for word in words if word not in _ARTICLES)


def normalise(text: str) -> str:
    """`strip_punctuation`, then `plain_words`: what the evaluator makes of both answers before it compares them."""
    return plain_words(strip_punctuation(text))


def normalise_answer(text: str) -> str:
    """An answer as the official vocabulary has it: `normalise`, and then without the commas that are left."""
    return normalise(text).replace(",", "")
