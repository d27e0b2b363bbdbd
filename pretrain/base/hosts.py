"""Which ranks of a job share a host."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from capt.pretrain.base import distributed


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, as a ring in the order of their first ranks: the ranks of each, and this process's rank."""

    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @cached_property
    def of(self) -> dict[int, int]:
        """The number of each rank's host."""
        return {rank: number for number, ranks in enumerate(self.ranks) for rank in ranks}

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this host. The first one makes and removes folders."""
        return self.ranks[self.of[self.rank]]

    @property
    def leads(self) -> bool:
        """Whether this process is the first rank of its host."""
        return self.rank == self.local[0]

    def peer(self, rank: int) -> int | None:
        """Return the rank on the next host that keeps the replica of ``rank``; None where there is one host only."""
        if len(self.ranks) == 1:
            return None
        own = self.of[rank]
        there = self.ranks[(own + 1) % len(self.ranks)]
        return there[self.ranks[own].index(rank) % len(there)]


def find_hosts() -> Hosts:
    """Ask all ranks on which host they are. Collective."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, (name, boot) in enumerate(distributed.gather_objects(_this_host())):
        ranks.setdefault((name, boot), []).append(rank)
    return Hosts(tuple(map(tuple, ranks.values())), distributed.rank())


def _this_host() -> tuple[str, str]:
    """Return the host's name and the id of its boot: containers may all have the same name."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot
