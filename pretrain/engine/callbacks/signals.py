"""SIGTERM, SIGUSR1 and Ctrl-C are remembered until the ranks agree to stop."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from pretrain.engine import interruption

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


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
        interruption.record_signal(0)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self.received = number
        interruption.record_signal(number)

    def restore(self) -> None:
        """Put the previous handlers back, unless a signal has come."""
        if not self.received:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
