"""SIGTERM, SIGUSR1 and Ctrl-C: before the first step the rank unwinds and ends, later all ranks agree to stop.

From the first step on :class:`capt.pretrain.engine.interruption.StopSignals` takes the signals: then all ranks stop
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
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
GRACE = 6.0
"""Seconds for unwinding. A rank that waits in a collective, or in code that is not Python's, ends after them."""


class Interrupted(BaseException):
    """A stop signal came before the first step. It is no ``Exception``, so that no handler on the way catches it."""


class _State:
    training = False
    reason = ""
    exit_action: Callable[[], None] | None = None
    signal = 0


def install(exit_code: int) -> None:
    """Raise :class:`Interrupted` at a stop signal from now on; a rank that cannot unwind exits with ``exit_code``."""
    _State.training, _State.reason, _State.exit_action, _State.signal = False, "", None, 0
    # Python writes each signal's number into this pipe, also while the main thread is in C code.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in SIGNALS:
        signal.signal(number, _receive)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading, exit_code), name="signals", daemon=True).start()


def training_starts() -> None:
    """The first step is next: from here on :class:`StopSignals` handles signals, and this module ignores them."""
    _State.training = True


def reason() -> str:
    """Return the reason why this rank ends before its first step; empty when no signal has come."""
    return _State.reason


def record_signal(number: int) -> None:
    """Remember a stop signal that came after the first step; the ranks will agree on the step after which they stop."""
    _State.signal = number


def recorded_signal() -> int:
    """The stop signal that this process received after the first step; 0 for none."""
    return _State.signal


def stop_signal_name(number: int) -> str:
    """The name of a stop signal for a person: ``capt`` sends its ranks SIGTERM after Ctrl-C as well."""
    name = signal.Signals(number).name
    return {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM or Ctrl-C"}.get(name, name)


def interrupt(number: int, where: str) -> NoReturn:
    """End now, because the step after which the ranks would stop cannot be finished. Raises :class:`Interrupted`."""
    _State.reason = f"{stop_signal_name(number)} received {where}"
    raise Interrupted(_State.reason)


def set_exit_action(action: Callable[[], None] | None) -> None:
    """Set what a rank that cannot unwind does before it exits: it writes its status."""
    _State.exit_action = action


def _receive(number: int, frame: FrameType | None) -> None:
    if not _State.training and not _State.reason:  # a second signal must not interrupt the unwinding
        _State.reason = _reason_text(number)
        raise Interrupted(_State.reason)


def _reason_text(number: int) -> str:
    return f"{stop_signal_name(number)} received before the first step"


def _watch(reading: int, exit_code: int) -> None:
    """Runs in a thread, since Python's handlers wait until the main thread is back from C code."""
    while True:
        number = os.read(reading, 1)[0]
        # Not a stop signal, or handled by somebody else by now.
        if number not in SIGNALS or _State.training or signal.getsignal(number) is not _receive:
            continue
        time.sleep(GRACE)
        if _State.training:  # the first step came first
            continue
        _State.reason = _State.reason or _reason_text(number)
        try:
            if _State.exit_action is not None:
                _State.exit_action()
        finally:
            # This thread cannot unwind the main one.
            os._exit(exit_code)


# SIGTERM, SIGUSR1 and Ctrl-C are remembered until the ranks agree to stop.


class StopSignals:
    """Signal handlers that remember which signal came. A second Ctrl-C ends the process immediately.

    After a signal the handlers stay: launchers and schedulers often send it twice, and a late one must not end a job
    that is saving.
    """

    def __init__(self) -> None:
        self.received = 0
        """The number of the signal that this rank, or by agreement another rank, has received; 0 for none."""
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers: from now on a signal is remembered and does not end the process."""
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        record_signal(0)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self.received = number
        record_signal(number)

    def restore(self) -> None:
        """Put the previous handlers back, unless a signal has come."""
        if not self.received:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
