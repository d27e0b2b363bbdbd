"""SIGTERM, SIGUSR1 or Ctrl-C before the first step: what is being prepared is unwound, and the rank ends in seconds.

From the first step on :class:`pretrain.engine.callbacks.signals.StopSignals` takes the signals: then all ranks stop
after the same step. Before it there is nothing to save, and every rank ends by itself. Imports no torch, so that a rank
hears a signal from its first moment.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
GRACE = 6.0
"""Seconds for unwinding. A rank that waits in a collective, or in code that is not Python's, ends after them."""


class Interrupted(BaseException):
    """A stop signal came before the first step. No ``Exception``, so that nothing on the way swallows it."""


class _State:
    begun = False
    reason = ""
    last_words: Callable[[], None] | None = None


def install(exit_code: int) -> None:
    """From here on a stop signal raises :class:`Interrupted`; a rank that cannot unwind exits with ``exit_code``."""
    _State.begun, _State.reason, _State.last_words = False, "", None
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in SIGNALS:
        signal.signal(number, _receive)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading, exit_code), name="signals", daemon=True).start()


def begin() -> None:
    """The first step is next: from here on signals are no business of this module, and a late one changes nothing."""
    _State.begun = True


def reason() -> str:
    """Why this rank ends before its first step; empty when no signal has come."""
    return _State.reason


def before_exit(last_words: Callable[[], None] | None) -> None:
    """What a rank that cannot unwind still does: write its status."""
    _State.last_words = last_words


def _receive(number: int, frame: FrameType | None) -> None:
    if not _State.begun and not _State.reason:  # a second signal must not interrupt the unwinding
        _State.reason = _words(number)
        raise Interrupted(_State.reason)


def _words(number: int) -> str:
    return f"{signal.Signals(number).name} received before the first step"


def _watch(reading: int, exit_code: int) -> None:
    """Runs in a thread, since Python's handlers wait until the main thread is back from C code."""
    while True:
        number = os.read(reading, 1)[0]
        if number not in SIGNALS or _State.begun or signal.getsignal(number) is not _receive:
            continue
        time.sleep(GRACE)
        if _State.begun:  # the first step came first
            continue
        _State.reason = _State.reason or _words(number)
        try:
            if _State.last_words is not None:
                _State.last_words()
        finally:
            os._exit(exit_code)
