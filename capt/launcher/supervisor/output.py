"""Output to a terminal that may take nothing: lines of the ranks of other hosts, and of the log here."""

from __future__ import annotations

import logging
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_KEPT = 20_000
_LAST_LINES = 2.0


def takes_output(descriptors: Sequence[int] = (1, 2)) -> bool:
    """Return true where terminals or pipes take output: one that was stopped (Ctrl-S, a pager) lets its writers wait.

    One that was closed takes nothing either, but nobody waits for it.
    """
    try:
        _, ready, _ = select.select([], descriptors, [], 0)
    except (OSError, ValueError):  # there is none
        return True
    return len(ready) == len(descriptors)


@contextmanager
def patient_log() -> Iterator[None]:
    """While active, what this process logs to stderr waits for a terminal that takes nothing, and the process does not.

    It looks after a job, which is to be stopped or started again nevertheless.
    """
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr
    ]
    output = Output()
    try:
        for handler in handlers:
            handler.setStream(output)
        yield
    finally:
        for handler in handlers:
            handler.setStream(sys.stderr)
        output.close(_LAST_LINES)


class Output:
    """Writes lines to stderr in a thread of its own.

    A terminal that was stopped (Ctrl-S, a pager) takes nothing, and blocks what writes to it. The head must not
    wait, because the nodes depend on its answers. What is too much is left out, the oldest first.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._left_out = 0
        self._over = False
        self._news = threading.Condition()
        self._writer = threading.Thread(target=self._write, name="output of the nodes", daemon=True)
        self._writer.start()

    def put(self, host: str, line: bytes) -> None:
        """Add a line of a host, which is put before it."""
        self.write(f"{host}: {line.decode(errors='replace')}\n")

    def write(self, lines: str) -> None:
        """Add what ends a line."""
        with self._news:
            if len(self._lines) >= _KEPT:
                self._lines.popleft()
                self._left_out += 1
            self._lines.append(lines)
            self._news.notify()

    def flush(self) -> None:
        """Do nothing: added lines are written as soon as the output takes them."""

    def close(self, seconds: float) -> None:
        """Write what is left, if it is taken within this number of seconds."""
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
            # Outside the lock: a terminal that takes nothing holds up this thread alone.
            with suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write(lines)
                sys.stderr.flush()
            if over:
                return
