"""The protocol holds in every state that crashes and cuts can lead to, and each part of it is needed.

``python -m tests.proof.test_protocol`` prints the ways to disaster of every part left out.
"""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.proof.explore import RULES, explore
from tests.proof.state import Settings

SPARE = Settings(faults=1, recovers=True)
HOLDS = {
    "two faults, a spare host": Settings(faults=2),
    "one fault, a spare host": SPARE,
    "one fault, three hosts that become two": Settings(faults=1, hosts=(0, 1, 2), policy="shrink", recovers=True),
    "one fault, waiting for the host": Settings(faults=1, policy="wait"),
    "one fault, and the job started again by hand": Settings(faults=1, operators=1, restarts=0, steps=1),
    "started a second time by mistake": Settings(faults=0, operators=1, careless=True),
}
EXTRA = ("refuse", "break_off", "end_ranks")
TORN, LOST, TWO = "looks whole and is torn", "was reported and is lost", "lives while a later one trains"
DISASTERS = {
    "fsync": (Settings(faults=1), TORN),
    "marker last": (Settings(faults=1), TORN),
    "commit before pruning": (Settings(faults=1), LOST),
    "durable name": (Settings(faults=1), LOST),
    "newest": (Settings(faults=1), "steps were committed in the order [1, 1]"),
    "hiding": (Settings(faults=1), TORN),
    "private folder": (HOLDS["one fault, and the job started again by hand"], TORN),
    "lock": (HOLDS["started a second time by mistake"], "two attempts hold the folder"),
    "wait": (SPARE, "a job that could go on has ended"),
    "age of the word": (Settings(faults=1), TWO),
    "waiting for the lease": (Settings(faults=2), TWO),
}


@pytest.mark.parametrize("case", HOLDS)
def test_no_order_of_events_breaks_the_protocol(case: str) -> None:
    found = explore(HOLDS[case])
    assert found.problem == "", str(found)
    done = [end for end in found.ends if any(head.does == "exit 0" for head in end.heads)]
    assert done, "some way must lead to the end"


@pytest.mark.parametrize("part", DISASTERS)
def test_each_part_of_the_protocol_is_needed(part: str) -> None:
    settings, problem = DISASTERS[part]
    found = explore(settings._replace(without=part))
    assert problem in found.problem, str(found)
    assert len(found.trace) > 3


def test_a_lease_that_is_longer_at_the_node_than_at_the_head() -> None:
    found = explore(SPARE._replace(silence=1))
    assert TWO in found.problem, str(found)
    assert "is cut" in str(found).lower()
    assert "head 0 starts attempt 2 on nodes (0, 2)" in str(found), "a readable way there"


def test_a_node_that_does_not_end_its_ranks_when_it_is_alone() -> None:
    found = explore(SPARE._replace(without="expiry"))
    assert TWO in found.problem, str(found)


@pytest.mark.parametrize(
    "kind", [name for rule in RULES if not rule.help and (name := rule.moves.__name__) not in EXTRA]
)
def test_each_kind_of_moves_is_needed(kind: str) -> None:
    found = explore(SPARE, omit=kind)
    assert found.problem in ("nothing moves, and the job is not over", "from here the job never ends"), str(found)


@pytest.mark.parametrize("kind", EXTRA)
def test_nobody_relies_on_what_only_hastens_the_end(kind: str) -> None:
    found = explore(SPARE, omit=kind)
    assert found.problem == "", str(found)


@pytest.mark.parametrize("name", sorted({name for rule in RULES for name in rule.code}))
def test_the_functions_that_make_the_moves_are_there(name: str) -> None:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    assert callable(found)


def _print() -> None:
    for name, settings in HOLDS.items():
        sys.stdout.write(f"{name}: {explore(settings)}\n")
    for part, (settings, _) in DISASTERS.items():
        sys.stdout.write(f"without {part}: {explore(settings._replace(without=part))}\n\n")


if __name__ == "__main__":
    _print()
