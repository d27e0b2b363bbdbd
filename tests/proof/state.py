"""State of a job in the model: heads, nodes, ranks, the lock, and the run folder. All of it can be hashed."""

from __future__ import annotations

from typing import NamedTuple

NODES = 3
LEASE = 2
"""Ticks after which a node that hears nothing of its head has killed its ranks (``messages.LEASE``)."""
SILENCE = 3
"""Ticks after which the head gives a silent node up (``messages.SILENCE``)."""

# where a rank is
BOOT, READY, TRAIN, WRITE, WROTE, SYNCED, COMMIT, MANIFEST, RENAME, POINT, PRUNE, PRUNED, DONE = range(13)
EXITED, FAILED, REFUSED = 20, 21, 22  # no process any more, but the supervisor of its node knows how it ended
WAITING = frozenset({READY, TRAIN, SYNCED, COMMIT, PRUNED})
"""In a collective, which a missing rank breaks."""

TORN, DURABLE = -1, NODES
"""Places of a file's bytes beside ``0 .. NODES - 1``: complete, but only in the memory of that node."""


class Rank(NamedTuple):
    """A rank of attempt ``gen``, started by ``head``; ``age`` is how long ago its head last answered its node."""

    gen: int
    index: int
    head: int
    world: int
    node: int
    at: int
    step: int = 0
    age: int = 0

    @property
    def alive(self) -> bool:
        """True while it is a process."""
        return self.at < EXITED


class Head(NamedTuple):
    """``capt``: what it does (gather, run, end, exit N, dead), on which hosts, and since when each is silent."""

    does: str
    gen: int = 0
    hosts: tuple[int, ...] = ()
    restarts: int = 0
    first: bool = True
    silent: tuple[int, ...] = (0,) * NODES
    code: int = 1

    @property
    def ended(self) -> bool:
        """True once it is no process."""
        return self.does == "dead" or self.does.startswith("exit")


class Checkpoint(NamedTuple):
    """A folder of a step: who wrote each file, and where its bytes are. ``synced``: its name lasts."""

    step: int
    gen: int
    files: tuple[tuple[int, int], ...]
    synced: bool = False

    @property
    def whole(self) -> bool:
        """True if every byte that the manifest describes is there."""
        return all(gen == self.gen and place != TORN for gen, place in self.files)


class State(NamedTuple):
    """Everything. ``links[h][n]`` is whether head h and node n hear each other; both see the folder."""

    heads: tuple[Head, ...]
    up: tuple[bool, ...]
    links: tuple[tuple[bool, ...], ...]
    ranks: tuple[Rank, ...] = ()
    lock: tuple[int, int] | None = None
    """Node and attempt that hold the folder's lock."""
    visible: tuple[Checkpoint, ...] = ()
    """Result of ``checkpoints_of``."""
    partial: tuple[Checkpoint, ...] = ()
    """Temporary folders of saves."""
    reported: int = 0
    """The newest step of which ``commit`` has returned."""
    gens: int = 0
    faults: int = 0
    operators: int = 0
    """Further heads that people may start on the folder."""

    @property
    def newest(self) -> int:
        """The step from which a resumed job continues."""
        return self.visible[-1].step if self.visible else 0

    def reaches(self, head: int, node: int) -> bool:
        """Return whether a head hears a node."""
        return self.up[node] and self.links[head][node] and not self.heads[head].ended

    def serves(self, rank: Rank) -> bool:
        """Return whether the head of a rank answers its node, which renews the lease."""
        head = self.heads[rank.head]
        return head.does == "run" and head.gen == rank.gen and self.reaches(rank.head, rank.node)

    def of(self, gen: int) -> list[Rank]:
        """The records of an attempt's ranks, in their order."""
        return [rank for rank in self.ranks if rank.gen == gen]

    def put(self, *changed: Rank) -> tuple[Rank, ...]:
        """The ranks, some of them replaced."""
        new = {(rank.gen, rank.index): rank for rank in changed}
        return tuple(new.get((rank.gen, rank.index), rank) for rank in self.ranks)


class Settings(NamedTuple):
    """Limits of the search. ``without`` leaves out one thing that the protocol needs."""

    hosts: tuple[int, ...] = (0, 1)
    policy: str = "spare"
    faults: int = 2
    operators: int = 0
    restarts: int = 2
    steps: int = 2
    keep: int = 1
    silence: int = SILENCE
    careless: bool = False
    """True if somebody may start a second head while the first lives."""
    recovers: bool = False
    """True if the job must end with 0 once it has been started."""
    without: str = ""

    def start(self) -> State:
        """A new run."""
        head = Head("gather", 0, self.hosts, self.restarts)
        links = ((True,) * NODES,)
        return State((head,), (True,) * NODES, links, faults=self.faults, operators=self.operators)
