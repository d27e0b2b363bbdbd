"""Nodes that call the head, where the head cannot call them: the pods of a Kubernetes job.

Every node connects to the head and says its number. What follows is what a supervisor and its head say to each other
over ssh (:mod:`capt.launcher.supervisor.messages`). The output of its ranks stays with the node.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from capt.launcher.supervisor.link import Link
from capt.launcher.supervisor.node import Supervisor
from capt.launcher.supervisor.output import Output
from capt.launcher.supervisor.ranks import listening

_GREETING = b"\n"
_HELLO = "capt-pod {}\n"
_LONGEST = 64
_HEARING, _AGAIN, _POLL = 2.0, 1.0, 0.2
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""A head whose machine has vanished says nothing: a node that waits notices it within half a minute."""


class Door:
    """Accepts the calls of nodes in a thread; each call waits until it is answered."""

    def __init__(self, port: int, nodes: int) -> None:
        """Listen. Raises ``OSError`` where the port is taken."""
        self._door, self._nodes = listening("", port), nodes
        self._calls: dict[int, socket.socket] = {}
        self._changed = threading.Lock()
        threading.Thread(target=self._serve, name="calls of the nodes", daemon=True).start()

    def waiting(self) -> set[int]:
        """The numbers of the nodes that have called and are still there."""
        with self._changed:
            for number, call in list(self._calls.items()):
                if _is_readable(call, 0):  # a node says nothing before it is greeted: it has hung up
                    self._calls.pop(number).close()
            return set(self._calls)

    def link(self, number: int, host: str, output: Output) -> Link:
        """The line to a node that has called; one that is lost already where it has not."""
        waits = number in self.waiting()
        with self._changed:
            call = self._calls.pop(number, None) if waits else None
        if call is not None:
            return Link(host, _Connection(call), output, _GREETING)
        # A line whose other end is closed: the job sees a lost node, without a case of its own.
        reading, writing = socket.socketpair()
        link = Link(host, _Connection(reading), output, b"")
        writing.close()
        link.lost = "it has not called"
        return link

    def _serve(self) -> None:
        while True:
            call, _ = self._door.accept()
            with suppress(OSError, ValueError):
                call.settimeout(_HEARING)
                # Byte by byte: what follows the first line belongs to the supervisor.
                hello = b""
                while not hello.endswith(b"\n") and len(hello) < _LONGEST and (more := call.recv(1)):
                    hello += more
                number = int(hello.decode().removeprefix("capt-pod "))
                if hello.decode() == _HELLO.format(number) and 0 <= number < self._nodes:
                    call.settimeout(None)
                    with self._changed:
                        # A pod that calls anew takes the place of its older call, which is closed below.
                        before, self._calls[number] = self._calls.get(number), call
                    call = before  # type: ignore[assignment]
            if call is not None:
                call.close()


def attend(address: str, port: int, number: int) -> signal.Signals:
    """Be a node: call the head, and again whenever it is gone, until a signal asks this process to end; which.

    Ranks die with the line to the head, and with this process.
    """
    asked: list[signal.Signals] = []
    at_work: list[Supervisor] = []

    def stop(received: int, _: Any) -> None:
        asked.append(signal.Signals(received))
        for supervisor in at_work:
            supervisor.stop(asked[-1])

    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, stop)
    while not asked:
        with suppress(OSError):
            line = _call(address, port, number, lambda: bool(asked))
            if line is not None:
                _serve(line, at_work, asked)
                continue
        until = time.monotonic() + _AGAIN
        while not asked and time.monotonic() < until:
            time.sleep(_POLL)
    return asked[0]


def _serve(line: socket.socket, at_work: list[Supervisor], asked: list[signal.Signals]) -> None:
    """Do what the head says until it hangs up; a signal that comes meanwhile finds the supervisor in ``at_work``."""
    with line, os.fdopen(os.dup(line.fileno()), "wb", buffering=0) as outward:
        supervisor = Supervisor(line.fileno(), outward.fileno())
        at_work.append(supervisor)
        try:
            for received in asked:
                supervisor.stop(received)
            supervisor.run()
        finally:
            at_work.remove(supervisor)


def _call(address: str, port: int, number: int, stopped: Callable[[], bool]) -> socket.socket | None:
    """Connect to the head, and wait to be greeted; None where it hangs up, or is not there."""
    line = socket.create_connection((address, port), _HEARING)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        line.setsockopt(socket.IPPROTO_TCP, option, value)
    line.sendall(_HELLO.format(number).encode())
    while not stopped():
        if _is_readable(line, _POLL):
            if line.recv(1) == _GREETING:
                line.settimeout(None)
                return line
            break
    line.close()
    return None


def _is_readable(line: socket.socket, seconds: float) -> bool:
    """Return true where there is something to read, or the end, within ``seconds``; for any number of open files."""
    poller = select.poll()
    poller.register(line, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


class _Connection:
    """A connection with the streams of a process, as a line has them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.stdin: Any = _Outward(connection)
        self.stdout: Any = os.fdopen(os.dup(connection.fileno()), "rb", buffering=0)
        self.stderr: Any = os.fdopen(os.open(os.devnull, os.O_RDONLY), "rb", buffering=0)
        self.stderr.close()

    def poll(self) -> int | None:
        """0 once the node has hung up, which it does when its ranks have ended."""
        return 0 if self.stdout.closed else None

    def wait(self, timeout: float | None = None) -> int:
        """End the connection: nobody is left to wait for."""
        self._connection.close()
        return 0


class _Outward:
    """The way to the node. Closed, it tells the node that nothing more comes, and still lets it answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.closed = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)
