"""A model of the local checkpoints: three hosts, each with the files of its rank and copies of another's.

Permanent checkpoints after step 0 are left out: the other model has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

from tests.proof.explore import Found, search

HOSTS = (0, 1, 2)
DOWN, GATHER, SAVE = "down", "gather", "save"
FETCH, CLEAN, CLAIM, READY = range(4)  # where a host is while the job starts
OF_ANOTHER, OF_THE_LAST, OF_THIS = range(3)  # the incarnation that a folder names; the last one is valid during a start
WRITE, PLACE, REMOVE, MADE = range(4)  # while it saves


class Kept(NamedTuple):
    """A host's part of a checkpoint: the step, who wrote it, the files (by rank's host); ``placed``: renamed."""

    step: int
    gen: int
    world: tuple[int, ...]
    files: frozenset[int]
    placed: bool


class Memory(NamedTuple):
    """A state of the model. ``kept`` and ``lives`` are the hosts' folders, ``at`` is where each host of a start is."""

    phase: str = GATHER
    hosts: tuple[int, ...] = HOSTS
    at: tuple[int, ...] = (FETCH,) * len(HOSTS)
    kept: tuple[frozenset[Kept], ...] = (frozenset(),) * len(HOSTS)
    lives: tuple[int, ...] = (OF_ANOTHER,) * len(HOSTS)
    """The incarnation that each folder names (``owner.json`` beside ``RUN/incarnation.json``)."""
    source: tuple[int, int] = (0, 0)
    """Step and writer of the checkpoint from which the attempt continues."""
    step: int = 0
    gen: int = 1
    done: int = 0
    """The newest step that all hosts had."""
    line: tuple[tuple[int, int], ...] = ()
    """The steps of the run as it went, and who made them: a step that is made again ends what came after it."""
    lost: frozenset[int] = frozenset()
    """Hosts that were lost or left out since all had the newest checkpoint."""
    crashes: int = 0
    kills: int = 0


class Rules(NamedTuple):
    """Limits of the search. ``without`` leaves out one thing that the protocol needs."""

    crashes: int = 1
    kills: int = 2
    steps: int = 2
    fewest: int = 2
    """Fewest hosts of an attempt, of the three."""
    without: str = ""


Move = Iterator[tuple[str, Memory, bool]]


def explore_memory(rules: Rules) -> Found:
    """Every state that can be reached."""
    first = Memory(crashes=rules.crashes, kills=rules.kills)

    def moves(state: Memory) -> Move:
        yield from _faults(state)
        yield from {DOWN: _start, GATHER: _gather, SAVE: _save}[state.phase](state, rules)

    return search(first, moves, _broken, lambda state: state.step == rules.steps)


def _broken(state: Memory) -> str:
    if state.phase != GATHER:
        return ""
    step, gen = state.source
    if gen < 0:
        return f"the checkpoint of step {step} is put together of two"
    if step and (step, gen) not in state.line:
        return f"the job goes on from step {step} of a future that was left"
    if len(state.lost) <= 1 and step < state.done:
        return f"all hosts had step {state.done}, and the job goes on from {step}"
    return ""


def _set(values: tuple[frozenset[Kept], ...], host: int, new: frozenset[Kept]) -> tuple[frozenset[Kept], ...]:
    return (*values[:host], new, *values[host + 1 :])


def _move_to(state: Memory, host: int, at: int) -> tuple[int, ...]:
    place = state.hosts.index(host)
    return (*state.at[:place], at, *state.at[place + 1 :])


def _own(state: Memory, host: int, key: tuple[int, int]) -> Kept | None:
    return next((each for each in state.kept[host] if (each.step, each.gen) == key), None)


def _faults(state: Memory) -> Move:
    """The job dies, and with it perhaps a host with its memory."""
    if state.phase == DOWN:
        return
    down = state._replace(phase=DOWN, at=(), source=(0, 0), step=0)
    if state.kills:
        yield "THE JOB IS KILLED", _renamed(down._replace(kills=state.kills - 1)), True
    for host in state.hosts if state.crashes else ():
        lives = (*state.lives[:host], OF_ANOTHER, *state.lives[host + 1 :])
        empty = _set(state.kept, host, frozenset())
        lost = state.lost | {host}
        gone = down._replace(kept=empty, lives=lives, lost=lost, crashes=state.crashes - 1)
        yield f"HOST {host} IS LOST", _renamed(gone), True


def _renamed(state: Memory) -> Memory:
    """The same without temporary folders, and with the writers counted from 1: such states are one."""
    kept = [[each for each in of if each.placed] for of in state.kept]
    number = {gen: index for index, gen in enumerate(sorted({each.gen for of in kept for each in of}), 1)}
    line = tuple((step, number[gen]) for step, gen in state.line if gen in number)
    folders = tuple(frozenset(each._replace(gen=number[each.gen]) for each in of) for of in kept)
    named = state._replace(kept=folders, line=line, gen=len(number))
    return min((_turned(named, by) for by in range(len(HOSTS))), key=_order)


def _turned(state: Memory, by: int) -> Memory:
    """The same with other names of the hosts; who copies to whom stays."""

    def names(hosts: Iterable[int]) -> list[int]:
        return sorted((host + by) % len(HOSTS) for host in hosts)

    kept = [
        frozenset(e._replace(world=tuple(names(e.world)), files=frozenset(names(e.files))) for e in of)
        for of in (state.kept[host - by] for host in HOSTS)
    ]
    lives = tuple(state.lives[host - by] for host in HOSTS)
    hosts, lost = tuple(names(state.hosts)), frozenset(names(state.lost))
    return state._replace(kept=tuple(kept), lives=lives, hosts=hosts, lost=lost)


def _order(state: Memory) -> tuple[object, ...]:
    kept = [sorted((e.step, e.gen, e.world, sorted(e.files)) for e in of) for of in state.kept]
    return kept, state.lives, state.hosts, sorted(state.lost)


def _start(state: Memory, rules: Rules) -> Move:
    """The job starts on some of the hosts (one that was lost is empty) and chooses a checkpoint."""
    for count in range(rules.fewest, len(HOSTS) + 1):
        for hosts in combinations(HOSTS, count):
            lost = state.lost | (set(state.hosts) - set(hosts))
            source = _choose(state, hosts, rules)
            lives = state.lives
            if source == (0, 0):
                lives = (OF_ANOTHER,) * len(HOSTS)
            elif rules.without != "new life":
                lives = tuple(min(life, OF_THE_LAST) for life in lives)
            started = state._replace(
                phase=GATHER, hosts=hosts, at=(FETCH,) * count, source=source, step=source[0], gen=state.gen + 1,
                lives=lives, lost=lost,
            )  # fmt: skip
            yield f"the job starts on hosts {hosts} from step {source[0]}", started, False


def _choose(state: Memory, hosts: tuple[int, ...], rules: Rules) -> tuple[int, int]:
    """The newest checkpoint that is whole over all hosts; (0, 0) for the permanent one."""
    held = [
        each
        for host in hosts
        if state.lives[host] != OF_ANOTHER or rules.without == "life"
        for each in state.kept[host]
        if each.placed
    ]
    for step in sorted({each.step for each in held}, reverse=True):
        found = [each for each in held if each.step == step]
        if frozenset[int]().union(*(each.files for each in found)) >= set(found[0].world):
            return step, found[0].gen if len({each.gen for each in found}) == 1 else -1
    return 0, 0


def _gather(state: Memory, rules: Rules) -> Move:
    """Every host gets all files, removes what else it has, and says that its folder is of the new life."""
    worlds = [each.world for kept in state.kept for each in kept if (each.step, each.gen) == state.source]
    for host, at in zip(state.hosts, state.at, strict=True):
        own, lives = _own(state, host, state.source), list(state.lives)
        if at == FETCH and state.step and not (own and own.files >= set(worlds[0])):
            others = state.kept[host] - ({own} if own else set())
            if lives[host] == OF_ANOTHER:
                lives[host] = OF_THIS
                others = others if rules.without == "claim" else frozenset()
            new = Kept(*state.source, worlds[0], frozenset(worlds[0]), True)
            words, kept = f"fetches step {state.step}", others | {new}
        elif at in (FETCH, CLEAN):
            words, kept, at = "removes the rest", frozenset({own} if own else set()), CLEAN
        elif at == CLAIM:
            words, kept = "is of this life", state.kept[host]
            lives[host] = OF_THIS
        else:
            continue
        after = state._replace(kept=_set(state.kept, host, kept), lives=tuple(lives), at=_move_to(state, host, at + 1))
        yield f"host {host} {words}", after, False
    if all(at == READY for at in state.at) and state.step < rules.steps:
        rest = tuple(life if life == OF_THIS else OF_ANOTHER for life in state.lives)
        yield "the job trains", _next(state._replace(lives=rest, done=state.step, lost=frozenset())), False


def _next(state: Memory) -> Memory:
    """A step, after which each host makes a temporary folder."""
    step = state.step + 1
    line = (*(each for each in state.line if each[0] < step), (step, state.gen))
    kept = state.kept
    for host in state.hosts:
        kept = _set(kept, host, kept[host] | {Kept(step, state.gen, state.hosts, frozenset(), False)})
    return state._replace(phase=SAVE, at=(WRITE,) * len(state.hosts), step=step, line=line, kept=kept)


def _save(state: Memory, rules: Rules) -> Move:
    """Files are written; copied, and put in place; the checkpoint before goes when all hosts have the new one."""
    key = (state.step, state.gen)
    for place, (host, at) in enumerate(zip(state.hosts, state.at, strict=True)):
        own = _own(state, host, key)
        if own is None or at == MADE:
            continue
        rest = state.kept[host] - {own}
        if at == WRITE:
            words, own = "writes", own._replace(files=frozenset({host}))
        elif at == PLACE:
            if min(state.at) < PLACE:
                continue
            copies = set() if rules.without == "copies" else {state.hosts[place - 1]}
            words, own = f"has step {state.step}", own._replace(files=own.files | copies, placed=True)
        else:
            if min(state.at) < REMOVE and rules.without != "all before any removes":
                continue
            words, rest = "removes what was before", frozenset()
        after = state._replace(kept=_set(state.kept, host, rest | {own}), at=_move_to(state, host, at + 1))
        if min(after.at) >= REMOVE:
            after = after._replace(done=state.step, lost=frozenset())
        yield f"host {host} {words}", after, False
    if min(state.at) == MADE and state.step < rules.steps:
        yield f"the job makes step {state.step + 1}", _next(state), False
