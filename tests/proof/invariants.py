"""Invariants of every state of the model."""

from __future__ import annotations

from itertools import pairwise

from tests.proof.state import BOOT, TRAIN, Settings, State


def broken(state: State, settings: Settings) -> str:
    """The first invariant that a state breaks, in words; empty when all hold."""
    for each in state.visible:
        if not each.whole:
            return f"the checkpoint of step {each.step} looks whole and is torn"
    if state.newest < state.reported:
        return f"the checkpoint of step {state.reported} was reported and is lost"
    steps = [each.step for each in state.visible]
    if any(after <= before for before, after in pairwise(steps)):
        return f"steps were committed in the order {steps}"
    trains = [rank for rank in state.ranks if rank.alive and rank.at > BOOT]
    if len({rank.gen for rank in trains if rank.index == 0}) > 1:
        return "two attempts hold the folder"
    if len({rank.gen for rank in trains if rank.at >= TRAIN}) > 1 and not settings.operators:
        return "a rank of an earlier attempt lives while a later one trains"
    for head in state.heads:
        if head.does == "exit 0" and state.newest < settings.steps:
            return "a job that is not done exits with 0"
        if settings.recovers and head.does in ("exit 1", "exit 2") and state.gens:
            return "a job that could go on has ended"
    return ""


def may_rest(state: State) -> bool:
    """Return whether nothing is left to be done: every head has ended, and no rank lives."""
    return all(head.ended for head in state.heads) and not any(rank.alive for rank in state.ranks)
