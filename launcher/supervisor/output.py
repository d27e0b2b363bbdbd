"""What the ranks of other hosts print, with the host before each line."""

from __future__ import annotations

import select
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

_KEPT = 20_000


def takes_output(descriptors: Sequence[int] = (1, 2)) -> bool:
    """Whether the terminals or pipes take anything now: one that was stopped (Ctrl-S, a pager) lets its writers wait.

    One that was closed takes nothing either, but nobody waits for it.
    """
    try:
        _, ready, _ = select.select([], descriptors, [], 0)
    except (OSError, ValueError):  # there is none
        return True
    return len(ready) == len(descriptors)


class Output:
    """Writes lines to stderr in a thread of its own.

    A terminal that was stopped (Ctrl-S, a pager) takes nothing. Whoever writes to it waits; the head must not, because
    the nodes live on its answers. What is too much is left out, the oldest first.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._left_out = 0
        self._over = False
        self._news = threading.Condition()
        self._writer = threading.Thread(target=self._write, name="output of the nodes", daemon=True)
        self._writer.start()

    def put(self, host: str, line: bytes) -> None:
        """Add a line."""
        with self._news:
            if len(self._lines) >= _KEPT:
                self._lines.popleft()
                self._left_out += 1
            self._lines.append(f"{host}: {line.decode(errors='replace')}\n")
            self._news.notify()

    def close(self, seconds: float) -> None:
        """Write what is left, if it is taken within so many seconds."""
        with self._news:
            self._over = True
            self._news.notify()
        self._writer.join(seconds)

    def _write(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines or self._over)
                lines, left_out = "".join(self._lines), self._left_out
                self._lines.clear()
                self._left_out = 0
                over = self._over
            if left_out:
                lines = f"[capt] {left_out} lines of the nodes were left out\n{lines}"
            with suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write(lines)
                sys.stderr.flush()
            if over:
                return
