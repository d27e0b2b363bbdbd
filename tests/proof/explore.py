"""Explores the model, breadth first, to the last state."""

from __future__ import annotations

import gc
from collections import deque
from typing import NamedTuple

import tests.proof.faults
import tests.proof.supervising  # noqa: F401 - they enter their moves
from tests.proof.invariants import broken, may_rest
from tests.proof.moves import RULES
from tests.proof.state import Settings, State


class Found(NamedTuple):
    """States seen, the first thing that is wrong with the shortest way to it, and how often each head ended how."""

    states: int
    moves: int
    problem: str
    trace: tuple[str, ...]
    ends: frozenset[tuple[str, ...]]

    def __str__(self) -> str:
        steps = "\n".join(f"{number:3d}  {words}" for number, words in enumerate(self.trace, 1))
        return f"{self.problem or 'nothing is wrong'} ({self.states:,} states, {self.moves:,} moves)\n{steps}"


def explore(settings: Settings, limit: int = 2_000_000) -> Found:
    """Every state that any order of moves leads to; ends at the first one in which something is wrong."""
    gc.disable()  # nothing here is a cycle, and looking for some takes as long as the search
    try:
        return _explore(settings, limit)
    finally:
        gc.enable()


def _explore(settings: Settings, limit: int) -> Found:
    first = settings.start()
    came: dict[State, tuple[State, str] | None] = {first: None}
    back: dict[State, list[State]] = {}
    queue, ends, moves = deque([first]), set(), 0
    resting: list[State] = []

    def found(problem: str, state: State | None) -> Found:
        trace = []
        while state is not None and (step := came[state]) is not None:
            state, words = step
            trace.append(words)
        return Found(len(came), moves, problem, tuple(reversed(trace)), frozenset(ends))

    while queue:
        state = queue.popleft()
        if problem := broken(state, settings):
            return found(problem, state)
        rests = True
        for rule in RULES:
            for words, after in rule.moves(state, settings):
                moves += 1
                if not rule.help:
                    rests = False
                    back.setdefault(after, []).append(state)
                if after not in came:
                    came[after] = (state, words)
                    queue.append(after)
        if rests:
            if not may_rest(state):
                return found("nothing moves, and the job is not over", state)
            resting.append(state)
            ends.add(tuple(head.does for head in state.heads))
        if len(came) > limit:
            raise AssertionError(f"more than {limit:,} states")
    alive, todo = set(resting), list(resting)
    while todo:
        for before in back.get(todo.pop(), ()):
            if before not in alive:
                alive.add(before)
                todo.append(before)
    if stuck := next((state for state in came if state not in alive), None):
        return found("from here the job never ends", stuck)
    return found("", None)
