"""Current section of this rank, in shared memory, for the process that started it to see.

A rank that hangs cannot say so: it may be stopped, or hold the interpreter's lock without end. So it notes the
beginning of each *section* (fetch data, step, validate, save) in a page of shared memory, and its launcher, another
process, reads for how long it has been there, and how long the section took at most so far
(``capt.launcher.supervisor``).
The page is an inherited memory file (``CAPT_HEARTBEAT``, its descriptor): it has no name and leaves nothing behind.
Noting a section takes about a microsecond. Imports no torch.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Literal

Section = Literal["start", "data", "compile", "step", "validation", "retrieval", "save", "local", "end"]
SECTIONS: tuple[Section, ...] = (
    "start", "data", "compile", "step", "validation", "retrieval", "save", "local", "end"
)  # fmt: skip
HEARTBEAT, STACKS = "CAPT_HEARTBEAT", "CAPT_STACKS"
"""Variables that name the inherited descriptors of the page and of the file for stacks."""
HEADER = struct.Struct("<qqdd")
"""Number of the section, optimizer updates done, time of its beginning (CLOCK_MONOTONIC, seconds), and when an error
ended the rank (0: none has)."""
PAST = struct.Struct("<qd")
"""Record of a section: how often it has ended, and its longest duration in seconds, but for that of the first step:
libraries, kernels and connections are made ready in it, and it says nothing of the others."""
_LONGEST_TRACE = 50_000
SIZE = HEADER.size + len(SECTIONS) * PAST.size


class _Page:
    memory: mmap.mmap | None = None
    section = 0
    step = 0
    since = 0.0
    failed = 0.0
    stacks: int | None = None


def open_page() -> None:
    """Use the page and the file for stacks that the launcher handed down; without them nothing is noted."""
    descriptors = {}
    for name in (HEARTBEAT, STACKS):
        with suppress(KeyError, ValueError):
            descriptors[name] = int(os.environ.pop(name))  # no child of this process is the rank
    if HEARTBEAT in descriptors:
        with suppress(OSError, ValueError):
            _Page.memory = mmap.mmap(descriptors[HEARTBEAT], SIZE)
            _Page.since = time.monotonic()
            _note()
    if STACKS in descriptors:
        with suppress(OSError, ValueError):
            faulthandler.register(signal.SIGQUIT, file=descriptors[STACKS], all_threads=True)
            _Page.stacks = descriptors[STACKS]


def enter(section: Section, step: int | None = None) -> Section:
    """Note that ``section`` begins, with ``step`` optimizer updates done (None: as before); returns the one before."""
    before = SECTIONS[_Page.section]
    now = time.monotonic()
    # No launcher reads along: the section is kept for `current` alone.
    if _Page.memory is None:
        _Page.section, _Page.since = SECTIONS.index(section), now
        return before
    place = HEADER.size + _Page.section * PAST.size
    count, longest = PAST.unpack_from(_Page.memory, place)
    # The first step does not count, see `PAST`.
    if count or before != "step":
        longest = max(longest, now - _Page.since)
    PAST.pack_into(_Page.memory, place, count + 1, longest)
    _Page.section, _Page.since = SECTIONS.index(section), now
    if step is not None:
        _Page.step = step
    _note()
    return before


def current() -> tuple[Section, float]:
    """The section that this rank is in, and for how many seconds; 0 where it has noted none."""
    return SECTIONS[_Page.section], time.monotonic() - _Page.since if _Page.since else 0.0


def note_compilations() -> None:
    """Note each compilation of torch as a section of its own, wherever it begins; without a compiled module, nothing.

    A step that compiles takes minutes. It may be any step: the first one with another shape, mask or mode does.
    """
    compiler = sys.modules.get("torch._dynamo.callback")  # seconds to import
    if compiler is None or _Page.memory is None:
        return
    interrupted: list[Section] = []
    compiler.callback_handler.register_start_callback(lambda _: interrupted.append(enter("compile")))
    compiler.callback_handler.register_end_callback(lambda _: enter(interrupted.pop()))


def fail(trace: str, summary: str) -> None:
    """Note that an error ends this rank, where it was raised, and what it says in one line, which comes last.

    Ranks that fall over its closed connections note theirs later.
    """
    _Page.failed = time.monotonic()
    if _Page.stacks is not None:
        with suppress(OSError):
            os.write(_Page.stacks, f"{trace[-_LONGEST_TRACE:]}\n{summary}\n".encode(errors="replace"))
    if _Page.memory is not None:
        _note()


def _note() -> None:
    assert _Page.memory is not None
    HEADER.pack_into(_Page.memory, 0, _Page.section, _Page.step, _Page.since, _Page.failed)
