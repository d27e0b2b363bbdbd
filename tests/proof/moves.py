"""A move of the model, and which functions of the code make it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.proof.state import Settings, State

Move = tuple[str, State]
"""An event, in words, and the state after it."""


class Rule(NamedTuple):
    """Moves of one kind, and the functions (``module:name``) that make them."""

    moves: Callable[[State, Settings], Iterator[Move]]
    code: tuple[str, ...]
    help: bool = False
    """True if it comes from outside (faults, repairs, people), so that nobody may rely on it."""


RULES: list[Rule] = []


def move(
    *code: str, help: bool = False
) -> Callable[[Callable[[State, Settings], Iterator[Move]]], Callable[..., Iterator[Move]]]:
    """Enter a kind of moves into the model."""

    def enter(moves: Callable[[State, Settings], Iterator[Move]]) -> Callable[..., Iterator[Move]]:
        RULES.append(Rule(moves, code, help))
        return moves

    return enter
