"""The moves of heads and nodes: starting ranks, leases, giving a node up, starting again; and time."""

from __future__ import annotations

from collections.abc import Iterator

from tests.proof.moves import Move, move
from tests.proof.saving import _named
from tests.proof.state import BOOT, EXITED, FAILED, LEASE, NODES, REFUSED, Head, Rank, Settings, State


def _set_head(state: State, number: int, head: Head) -> tuple[Head, ...]:
    return (*state.heads[:number], head, *state.heads[number + 1 :])


def _forget_links(state: State, number: int) -> tuple[tuple[bool, ...], ...]:
    """The links with those of a head that is no more as they were at first: states that differ in them are one."""
    return (*state.links[:number], (True,) * NODES, *state.links[number + 1 :])


def _exits(state: State, number: int, how: str) -> State:
    """A head ends, and what supervisors remember of its ranks is of no use to anybody."""
    gone = [rank for rank in state.ranks if rank.head == number and not rank.alive]
    heads, links = _set_head(state, number, Head(how)), _forget_links(state, number)
    return _without(state, gone)._replace(heads=heads, links=links)


def _without(state: State, gone: list[Rank], *, freed: bool = True) -> State:
    """Processes that are no more; the kernel of a node that lives frees their lock."""
    keys = {(rank.gen, rank.index) for rank in gone}
    ranks = tuple(rank for rank in state.ranks if (rank.gen, rank.index) not in keys)
    held = {(rank.node, rank.gen) for rank in gone if rank.index == 0}
    return state._replace(ranks=ranks, lock=None if freed and state.lock in held else state.lock)


@move("capt.launcher.restart:supervise", "capt.launcher.backends.ssh:start")
def start(state: State, settings: Settings) -> Iterator[Move]:
    """A head that reaches its hosts starts a rank on each, once what it left there before has been killed."""
    for number, head in enumerate(state.heads):
        if head.does != "gather":
            continue
        hosts = _hosts(state, number, settings)
        if not hosts:
            continue
        gen = state.gens + 1
        left = [rank for rank in state.ranks if rank.head == number and rank.node in hosts]
        cleared = _without(state, left)
        new = tuple(Rank(gen, index, number, len(hosts), node, BOOT) for index, node in enumerate(hosts))
        running = Head("run", gen, hosts, head.restarts, head.first)
        yield (
            f"head {number} starts attempt {gen} on nodes {hosts}",
            cleared._replace(ranks=cleared.ranks + new, gens=gen, heads=_set_head(state, number, running)),
        )


def _hosts(state: State, number: int, settings: Settings) -> tuple[int, ...]:
    """The hosts of the next attempt; none while too few can be reached."""
    head = state.heads[number]
    reached = [node for node in range(NODES) if state.reaches(number, node)]
    if all(node in reached for node in head.hosts):
        return head.hosts
    if head.first or settings.policy == "wait":
        return ()
    if settings.policy == "shrink":
        return tuple(node for node in head.hosts if node in reached)
    spares = iter([node for node in reached if node not in head.hosts])
    chosen = [node if node in reached else next(spares, None) for node in head.hosts]
    return () if None in chosen else tuple(node for node in chosen if node is not None)


@move("capt.launcher.start:_attempt")
def give_up(state: State, settings: Settings) -> Iterator[Move]:
    """A head that cannot reach enough hosts ends with 1 in the end."""
    for number, head in enumerate(state.heads):
        if head.does == "gather" and not _hosts(state, number, settings):
            yield f"head {number} reaches too few hosts and exits with 1", _exits(state, number, "exit 1")


@move("capt.launcher.backends.watching:Watcher.watch")
def judge(state: State, settings: Settings) -> Iterator[Move]:
    """A head sees how ranks ended, or that a node has been silent for too long."""
    for number, head in enumerate(state.heads):
        if head.does != "run":
            continue
        ranks = {rank.node: rank for rank in state.of(head.gen)}
        heard = [node for node in head.hosts if state.reaches(number, node)]
        if len(heard) == len(head.hosts) and all(node in ranks and ranks[node].at == EXITED for node in heard):
            yield f"head {number} exits with 0", _exits(state, number, "exit 0")
            continue
        if any(node in ranks and ranks[node].at == REFUSED for node in heard):
            yield (
                f"head {number} sees a refusal",
                state._replace(heads=_set_head(state, number, head._replace(does="end", code=2))),
            )
        elif any(node not in ranks or ranks[node].at == FAILED for node in heard):
            yield (
                f"head {number} sees that a rank has failed",
                state._replace(heads=_set_head(state, number, head._replace(does="end", code=1))),
            )
        for node in head.hosts:
            if head.silent[node] >= settings.silence:
                yield (
                    f"head {number} gives node {node} up",
                    state._replace(heads=_set_head(state, number, head._replace(does="end", code=1))),
                )


@move("capt.launcher.supervisor.ranks:LocalRanks.kill")
def end_ranks(state: State, settings: Settings) -> Iterator[Move]:
    """Ranks that their head no longer wants are killed by their node, when the head reaches it."""
    for rank in state.ranks:
        head = state.heads[rank.head]
        if state.reaches(rank.head, rank.node) and (head.does != "run" or head.gen != rank.gen):
            yield f"{_named(rank)} is ended", _without(state, [rank])


@move("capt.launcher.restart:supervise", "capt.launcher.restart:resumed", "capt.launcher.requeue:again")
def restart(state: State, settings: Settings) -> Iterator[Move]:
    """A head that has seen all ranks end, or waited for longer than their lease, starts again or ends."""
    for number, head in enumerate(state.heads):
        if head.does != "end":
            continue
        reached = [state.reaches(number, node) for node in range(NODES)]
        waits = [node for node in head.hosts if not reached[node] and head.silent[node] < settings.silence]
        if any(reached[rank.node] for rank in state.of(head.gen)):
            continue
        if waits and settings.without != "waiting for the lease":
            continue
        if head.code == 2 or not head.restarts:
            yield f"head {number} exits with {head.code}", _exits(state, number, f"exit {head.code}")
        else:
            again = Head("gather", head.gen, head.hosts, head.restarts - 1, first=False)
            yield f"head {number} starts again", state._replace(heads=_set_head(state, number, again))


@move("capt.launcher.supervisor.heartbeats:find_stall")
def expire(state: State, settings: Settings) -> Iterator[Move]:
    """The supervisor of a node that is alone kills its ranks and ends."""
    for rank in state.ranks if settings.without != "expiry" else ():
        if rank.age >= LEASE:
            yield f"the lease of {_named(rank)} is over, and it is killed", _without(state, [rank])


@move()
def tick(state: State, settings: Settings) -> Iterator[Move]:
    """Time passes, for all alike; no lease passes its end without ``expire``."""
    if settings.without != "expiry" and any(rank.age >= LEASE for rank in state.ranks):
        return
    ranks = tuple(rank if state.serves(rank) else rank._replace(age=min(LEASE, rank.age + 1)) for rank in state.ranks)
    heads = []
    for number, head in enumerate(state.heads):
        if head.does in ("run", "end"):
            silent = tuple(
                min(settings.silence, ticks + 1) if node in head.hosts and not state.reaches(number, node) else ticks
                for node, ticks in enumerate(head.silent)
            )
            head = head._replace(silent=silent)
        heads.append(head)
    later = state._replace(ranks=ranks, heads=tuple(heads))
    if later != state:
        yield "a tick", later


@move()
def free(state: State, settings: Settings) -> Iterator[Move]:
    """A file server frees the lock of a node that is no more."""
    if state.lock is not None and not any((r.node, r.gen) == state.lock and r.alive for r in state.ranks):
        yield "the file server frees the lock of a lost node", state._replace(lock=None)
