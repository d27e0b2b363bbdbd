"""Notices that a rank hangs, by what the ranks note of themselves (:mod:`capt.pretrain.engine.heartbeat`).

A rank that is slow makes all others wait in a collective, so only the one that is furthest behind is judged: fewest
updates done, then the earliest section. It hangs where it has been in its section for longer than ``3 x`` the longest
time that this section took so far in this run, and ``stall`` seconds. Until a section has been seen three times on that
rank, and before the first step, there is no limit: nobody knows how long a compilation or a tokenizer takes. Then the
time-out of the process group applies (``engine.timeout_minutes``).
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import NamedTuple

from capt.pretrain.engine.heartbeat import HEADER, HEARTBEAT, PAST, SECTIONS, SIZE, STACKS

FACTOR = 3.0
LEAST_TIMES = 3
_MAX_STACKS = 1 << 16


class Pulse(NamedTuple):
    """The work of a rank: its section, updates done, seconds since the section began, and the section's past.

    ``failed`` is how many seconds ago an error ended the rank; None where none has.
    """

    section: str
    step: int
    seconds: float
    times: int
    longest: float
    failed: float | None = None

    def aged(self, seconds: float) -> Pulse:
        """The same, a number of seconds later."""
        failed = None if self.failed is None else self.failed + seconds
        return self._replace(seconds=self.seconds + seconds, failed=failed)


class Stall(NamedTuple):
    """A rank that hangs, and how long it may have taken; its text is what the rank does."""

    rank: int
    pulse: Pulse
    limit: float

    def __str__(self) -> str:
        return (
            f"hangs: {self.pulse.seconds:.1f} s in {self.pulse.section} after step {self.pulse.step}, "
            f"which took {self.pulse.longest:.1f} s at most so far (limit {self.limit:.1f} s)"
        )


class Page:
    """The page of one rank and the file for its stacks: memory without a name, which the rank inherits."""

    def __init__(self, rank: int) -> None:
        self._page = os.memfd_create(f"heartbeat-{rank}", 0)
        self._stacks = os.memfd_create(f"stacks-{rank}", 0)
        os.ftruncate(self._page, SIZE)
        self._memory = mmap.mmap(self._page, SIZE)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that the rank inherits."""
        return self._page, self._stacks

    @property
    def env(self) -> dict[str, str]:
        """Return the variables by which the rank finds them."""
        return {HEARTBEAT: str(self._page), STACKS: str(self._stacks)}

    def read(self) -> Pulse | None:
        """Return what the rank does; None where it has noted nothing yet."""
        number, step, since, failed = HEADER.unpack_from(self._memory, 0)
        if since == 0.0 or not 0 <= number < len(SECTIONS):
            return None
        times, longest = PAST.unpack_from(self._memory, HEADER.size + number * PAST.size)
        now = time.monotonic()
        return Pulse(SECTIONS[number], step, now - since, times, longest, now - failed if failed else None)

    def stacks(self) -> str:
        """The stacks that the rank wrote when it was asked for them by SIGQUIT."""
        return os.pread(self._stacks, _MAX_STACKS, 0).decode(errors="replace")

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def find_stall(pulses: dict[int, Pulse], stall: float) -> Stall | None:
    """The rank that hangs, of the ranks that have noted something."""
    # A rank that ends does not hang.
    judged = {rank: pulse for rank, pulse in pulses.items() if pulse.section != "end"}
    if not judged:
        return None
    # The rank that is furthest behind, and of several the one that is there longest: the others wait for it.
    behind = {rank: (pulse.step, SECTIONS.index(pulse.section), -pulse.seconds) for rank, pulse in judged.items()}
    rank = min(behind, key=behind.__getitem__)
    pulse = judged[rank]
    limit = FACTOR * pulse.longest + stall
    # A start has no usual length, nor has a section that was seen only a few times.
    if pulse.section == "start" or pulse.times < LEAST_TIMES or pulse.seconds <= limit:
        return None
    return Stall(rank, pulse, limit)


def is_stopped(pid: int) -> bool:
    """Return true where a process is suspended (SIGSTOP, a debugger)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
