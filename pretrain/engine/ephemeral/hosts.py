"""Which ranks share a host, and which host keeps the copies of which other one."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pretrain.base import distributed


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, as a ring in the order of their first ranks.

    Args:
        ranks: the ranks of each host, in order.
        rank: this process's rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @cached_property
    def of(self) -> dict[int, int]:
        """The number of each rank's host."""
        return {rank: number for number, ranks in enumerate(self.ranks) for rank in ranks}

    @property
    def mine(self) -> int:
        """The number of this process's host."""
        return self.of[self.rank]

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.ranks[self.mine]

    @property
    def leader(self) -> int:
        """The rank that makes and removes folders on this host."""
        return self.local[0]

    @property
    def leads(self) -> bool:
        """Whether this process is that rank."""
        return self.rank == self.leader

    def keeper(self, rank: int) -> int | None:
        """The rank of the next host that keeps the copies of ``rank``; None where there is one host only."""
        if len(self.ranks) == 1:
            return None
        host = self.of[rank]
        there = self.ranks[(host + 1) % len(self.ranks)]
        return there[self.ranks[host].index(rank) % len(there)]


def find_hosts() -> Hosts:
    """Ask all ranks where they are. Collective."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, (name, boot) in enumerate(distributed.gather_objects(_this_host())):
        ranks.setdefault((name, boot), []).append(rank)
    return Hosts(tuple(tuple(each) for each in ranks.values()), distributed.rank())


def _this_host() -> tuple[str, str]:
    """A host's name and the start of its kernel: containers may all be called the same."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot
