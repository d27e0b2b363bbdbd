"""Words for amounts, colours and objects, and the spelling of hurried writers."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from pretrain.vision_language.microworld.nlvr1.meaning import SOME, Amount, How, Meaning

Said = tuple[str, Meaning]
"""A sentence without its full stop, and what it means."""

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Words:
    """Draws words; one object a sentence, so that a sentence keeps to digits or to number words."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self._digits = rng.random() < 0.35

    def pick(self, *options: str) -> str:
        """One of the options."""
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def number(self, number: int) -> str:
        """``2`` or ``two``."""
        return str(number) if self._digits else _NUMBERS[number]

    def count(self, amount: Amount, singular: str, plural: str | None = None) -> Phrase:
        """``exactly two black blocks``, ``a tower``, ``no box``: an amount of things."""
        plural = f"{singular}s" if plural is None else plural
        number, noun = self.number(amount.number), singular if amount.number == 1 else plural
        if amount.number == 0:
            return Phrase(f"no {self.pick(singular, plural)}", plural=False)
        if amount == SOME:
            return Phrase(self.pick(f"a {singular}", f"a {singular}", f"at least {number} {singular}"), plural=False)
        how = self.pick("exactly", "exactly", "only", "", "", "") if amount.how == "exactly" else amount.how
        return Phrase(f"{how} {number} {noun}".strip(), plural=amount.number > 1)

    def there(self, phrase: Phrase) -> str:
        """``There are two towers``."""
        return f"There {'are' if phrase.plural else 'is'} {phrase.text}"

    def colours(self, colours: tuple[str, ...]) -> str:
        """``black and blue``; ``""`` for none."""
        return " and ".join(self.rng.sample(colours, len(colours)))


class Phrase(NamedTuple):
    """Words for things, and whether their verb stands in the plural."""

    text: str
    plural: bool


def draw_amount(rng: Random, most: int, some: float = 0.4) -> Amount:
    """An amount of up to ``most`` things; "some" (one at least) with the given probability."""
    if rng.random() < some:
        return SOME
    chance = rng.random()
    how: How = "exactly" if chance < 0.76 else "at least" if chance < 0.96 else "at most"
    if how == "exactly" and rng.random() < 0.1:
        return Amount("exactly", 0)
    least = 2 if how == "at least" and most > 1 else 1
    return Amount(how, rng.randint(least, most))


def listed(phrases: list[str]) -> str:
    """``one``, ``one and another``, ``one, another and a third``."""
    return phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"


def hurried(text: str, rng: Random) -> str:
    """The sentence as a worker may have typed it: capitals and full stops at will, now and then a slip."""
    if rng.random() < 0.15:
        text = text.replace("at least", "atleast").replace("At least", "Atleast")
    if rng.random() < 0.03:
        place = rng.randrange(1, len(text) - 1)
        text = text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    if rng.random() < 0.03 and text[0] == "A":
        text = text[1:]
    elif rng.random() < 0.4:
        text = text[0].lower() + text[1:]
    return text + "." if rng.random() < 0.55 else text
