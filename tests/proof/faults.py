"""Moves from outside: crashes, cuts, repairs, and people who start the job a second time."""

from __future__ import annotations

from collections.abc import Iterator

from tests.proof.moves import Move, move
from tests.proof.saving import _ended, _named
from tests.proof.state import FAILED, NODES, TORN, Checkpoint, Head, Settings, State
from tests.proof.supervising import _forget_links, _set_head, _without


@move(help=True)
def crash_node(state: State, settings: Settings) -> Iterator[Move]:
    """A node is gone suddenly: its processes, what it had not made durable, and perhaps the newest rename."""
    if not state.faults:
        return
    for node in range(NODES):
        if not state.up[node]:
            continue
        ranks = [rank for rank in state.ranks if rank.node == node]
        down = _without(state, ranks, freed=False)
        up = (*state.up[:node], False, *state.up[node + 1 :])
        visible, partial = (
            tuple(_forgotten(each, node) for each in folders) for folders in (state.visible, state.partial)
        )
        gone = down._replace(up=up, visible=visible, partial=partial, faults=state.faults - 1)
        yield f"NODE {node} CRASHES", gone
        writer = {rank.gen for rank in ranks if rank.index == 0}
        kept = tuple(each for each in visible if each.synced or each.gen not in writer)
        if kept != visible:
            yield f"NODE {node} CRASHES and forgets a rename", gone._replace(visible=kept)


def _forgotten(folder: Checkpoint, node: int) -> Checkpoint:
    return folder._replace(files=tuple((gen, TORN if place == node else place) for gen, place in folder.files))


@move(help=True)
def kill_rank(state: State, settings: Settings) -> Iterator[Move]:
    """The process of a rank is killed, or ends with an error."""
    for rank in state.ranks if state.faults else ():
        if rank.alive:
            yield f"{_named(rank).upper()} IS KILLED", _ended(state, rank, FAILED)._replace(faults=state.faults - 1)


@move(help=True)
def crash_head(state: State, settings: Settings) -> Iterator[Move]:
    """The host of a head is gone; nothing tells the nodes."""
    for number, head in enumerate(state.heads if state.faults else ()):
        if not head.ended:
            yield (
                f"HEAD {number} CRASHES",
                state._replace(
                    heads=_set_head(state, number, Head("dead")),
                    links=_forget_links(state, number),
                    faults=state.faults - 1,
                ),
            )


def _set_link(state: State, number: int, node: int, whole: bool) -> State:
    links = (*state.links[number][:node], whole, *state.links[number][node + 1 :])
    return state._replace(links=(*state.links[:number], links, *state.links[number + 1 :]))


@move(help=True)
def cut(state: State, settings: Settings) -> Iterator[Move]:
    """A head and a node no longer hear each other. The last word that was answered was said just now, or a tick ago.

    Where the lease is counted from the arrival of the answer instead, the answer may have been a tick under way.
    """
    for number, head in enumerate(state.heads if state.faults else ()):
        for node in range(NODES) if not head.ended else ():
            if not state.links[number][node]:
                continue
            broken = _set_link(state, number, node, False)._replace(faults=state.faults - 1)
            yield f"THE LINK FROM HEAD {number} TO NODE {node} IS CUT", broken
            served = [rank for rank in state.ranks if rank.head == number and rank.node == node and state.serves(rank)]
            if served:
                age, words = (-1, "early") if settings.without == "age of the word" else (1, "late")
                aged = broken._replace(ranks=broken.put(*(rank._replace(age=age) for rank in served)))
                yield f"THE LINK FROM HEAD {number} TO NODE {node} IS CUT, {words}", aged


@move(help=True)
def repair(state: State, settings: Settings) -> Iterator[Move]:
    """A link is whole again, or a node comes back, empty."""
    for number, head in enumerate(state.heads):
        for node in range(NODES) if not head.ended else ():
            if not state.links[number][node]:
                whole = _set_link(state, number, node, True)
                ranks = tuple(
                    rank._replace(age=0) if rank.head == number and rank.node == node and whole.serves(rank) else rank
                    for rank in state.ranks
                )
                silent = tuple(0 if each == node else ticks for each, ticks in enumerate(head.silent))
                heads = _set_head(state, number, head._replace(silent=silent))
                yield f"the link from head {number} to node {node} is whole", whole._replace(ranks=ranks, heads=heads)
    for node in range(NODES):
        if not state.up[node]:
            yield f"node {node} is back", state._replace(up=(*state.up[:node], True, *state.up[node + 1 :]))


@move(help=True)
def second_head(state: State, settings: Settings) -> Iterator[Move]:
    """Somebody types ``capt resume`` on another host, since the first head has died, or without knowing of it."""
    if state.operators and state.gens and (settings.careless or all(head.ended for head in state.heads)):
        head = Head("gather", 0, settings.hosts, settings.restarts)
        yield (
            "SOMEBODY STARTS A SECOND HEAD",
            state._replace(
                heads=(*state.heads, head), links=(*state.links, (True,) * NODES), operators=state.operators - 1
            ),
        )
