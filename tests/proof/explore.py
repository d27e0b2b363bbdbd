"""Explores a model, breadth first, to the last state."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

import tests.proof.faults
import tests.proof.supervising  # noqa: F401 - they enter their moves
from tests.proof.invariants import broken, may_rest
from tests.proof.moves import RULES
from tests.proof.state import Settings, State

S = TypeVar("S", bound=Hashable)
Moves = Callable[[S], Iterable[tuple[str, S, bool]]]
"""Moves from a state: words, the state after it, and whether it comes from outside (nobody may rely on it)."""


class Found(NamedTuple):
    """States seen, the first thing that is wrong with the shortest way to it, and in which states all may rest."""

    states: int
    moves: int
    problem: str
    trace: tuple[str, ...]
    ends: tuple[Any, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"{number:3d}  {words}" for number, words in enumerate(self.trace, 1))
        return f"{self.problem or 'nothing is wrong'} ({self.states:,} states, {self.moves:,} moves)\n{steps}"


def explore(settings: Settings, omit: str = "", limit: int = 2_000_000) -> Found:
    """Every state of the protocol that any order of moves leads to; ``omit`` names a kind of moves that is left out."""
    rules = [rule for rule in RULES if rule.moves.__name__ != omit]

    def moves(state: State) -> Iterable[tuple[str, State, bool]]:
        return ((words, after, rule.help) for rule in rules for words, after in rule.moves(state, settings))

    return search(settings.start(), moves, lambda state: broken(state, settings), may_rest, limit)


def search(
    first: S, moves: Moves[S], broken: Callable[[S], str], may_rest: Callable[[S], bool], limit: int = 2_000_000
) -> Found:
    """Every state that can be reached; ends where one breaks an invariant, rests too early, or cannot reach an end."""
    gc.disable()  # nothing here is a cycle, and looking for some takes as long as the search
    try:
        return _search(first, moves, broken, may_rest, limit)
    finally:
        gc.enable()


def _search(first: S, moves: Moves[S], broken: Callable[[S], str], may_rest: Callable[[S], bool], limit: int) -> Found:
    states, numbers = [first], {first: 0}  # a state is hashed once a move, and a number represents it then
    came: list[tuple[int, str]] = [(-1, "")]
    back: list[list[int]] = [[]]
    queue, resting, made = deque([0]), [], 0

    def found(problem: str, number: int) -> Found:
        trace = []
        while number > 0:
            number, words = came[number]
            trace.append(words)
        return Found(len(states), made, problem, tuple(reversed(trace)), tuple(states[each] for each in resting))

    while queue:
        number = queue.popleft()
        if problem := broken(states[number]):
            return found(problem, number)
        rests = True
        for words, after, help in moves(states[number]):
            made += 1
            if (to := numbers.get(after)) is None:
                to = numbers[after] = len(states)
                states.append(after)
                came.append((number, words))
                back.append([])
                queue.append(to)
            if not help:
                rests = False
                back[to].append(number)
        if rests:
            if not may_rest(states[number]):
                return found("nothing moves, and the job is not over", number)
            resting.append(number)
        if len(states) > limit:
            raise AssertionError(f"more than {limit:,} states")
    ending, todo = set(resting), list(resting)
    while todo:
        for before in back[todo.pop()]:
            if before not in ending:
                ending.add(before)
                todo.append(before)
    if stuck := next((number for number in range(len(states)) if number not in ending), 0):
        return found("from here the job never ends", stuck)
    return found("", 0)
