"""The head's end of a line to a host: to any program there, and to the supervisor of a node."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from capt.launcher.supervisor import processes
from capt.launcher.supervisor.messages import (
    LONGEST,
    MARK,
    REPORT,
    SILENCE,
    GPUs,
    Met,
    News,
    RankNews,
    Stacks,
    Up,
    packed,
)
from capt.launcher.supervisor.node import PROGRAM
from capt.launcher.supervisor.output import Output
from capt.pretrain.base.files import printable

_SUSPENDED = 2.0
ANSWER = 30.0
"""Seconds for ssh, which itself gives up a connection after 10, or srun, the login shell and the start of Python."""


class Client(Protocol):
    """The process of an ssh or srun that a line runs through, or a connection with the same streams and ends."""

    stdin: Any
    stdout: Any
    stderr: Any

    def poll(self) -> int | None:
        """The exit code (0: the node has seen all its ranks end); None while the line is open."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises ``subprocess.TimeoutExpired``."""


class Line:
    """The way to a program on one host, which speaks in lines that begin with ``mark``; nothing waits for it."""

    mark: bytes
    most_words = 8
    """Lines of ssh or a login shell that say why a host is lost, at most."""

    def __init__(self, host: str, client: Client, greeting: bytes) -> None:
        self.host, self._client = host, client
        self._process = client if isinstance(client, subprocess.Popen) else None
        for pipe in self._pipes():
            if not pipe.closed:
                os.set_blocking(pipe.fileno(), False)
        self._unsent, self._line, self._said = greeting, b"", b""
        self._last_words: deque[str] = deque(maxlen=self.most_words)
        self.heard = time.monotonic()
        self.lost = ""
        """Reason why nothing is to be heard of this host any more; empty while it answers."""
        self.exit_code: int | None = None
        """The exit code of a connection that has ended."""
        self.in_order = False

    def say(self, words: bytes) -> None:
        """Send ``words``; nothing happens when the host is lost."""
        self._unsent += words
        self.write()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the pipes that are to be waited for."""
        stdin, stdout, stderr = self._pipes()
        for pipe in (stdout, stderr):
            if not pipe.closed:
                selector.register(pipe, selectors.EVENT_READ, self)
        if self._unsent and not stdin.closed:
            selector.register(stdin, selectors.EVENT_WRITE, self)

    def write(self) -> None:
        """Send what the pipe takes."""
        stdin = self._pipes()[0]
        with suppress(BlockingIOError):
            try:
                while self._unsent and not stdin.closed:
                    self._unsent = self._unsent[os.write(stdin.fileno(), self._unsent) :]
            except (BrokenPipeError, ConnectionResetError):  # reading says why
                self._unsent = b""

    def read(self) -> None:
        """Take what has come from the program and what it has started."""
        stdout = self._pipes()[1]
        self._read_errors()
        *lines, self._line = (self._line + self._take(stdout)).split(b"\n")
        for line in lines:
            if line.startswith(self.mark) and not self.lost:
                self.heard = time.monotonic()
                self._understand(line.removeprefix(self.mark))
        if len(self._line) > LONGEST:
            self._give_up("a word without an end")
        if stdout.closed and not self.lost:
            with suppress(subprocess.TimeoutExpired):
                self.exit_code = self._client.wait(2.0)
            self._read_errors()  # its last words
            self._give_up(self._end())

    def judge(self) -> None:
        """Give a host up that is silent."""

    def hang_up(self) -> None:
        """End the program, which ends what it has started."""
        self._unsent = b""
        self._pipes()[0].close()

    def is_ending(self) -> bool:
        """Return true where the connection is still there, and can be expected to end."""
        return self._client.poll() is None and not self.lost

    def close(self) -> None:
        """End the connection. The end is ``in_order`` when the program has ended by itself, with 0."""
        self.in_order = self._client.poll() == 0
        if self._process is not None:
            processes.kill_tree(self._process)
        self._client.wait()
        with suppress(OSError):
            self.read()
        for pipe in self._pipes():
            pipe.close()

    def _pipes(self) -> tuple[Any, Any, Any]:
        return self._client.stdin, self._client.stdout, self._client.stderr

    def _read_errors(self) -> None:
        *lines, self._said = (self._said + self._take(self._pipes()[2])).replace(b"\r", b"\n").split(b"\n")
        # A line that does not end is handed on in pieces.
        if len(self._said) > LONGEST:
            lines, self._said = [*lines, self._said], b""
        for line in filter(None, lines):
            self._print(line)

    def _take(self, pipe: Any) -> bytes:
        data = b""
        with suppress(BlockingIOError):
            # Bounded, so that a host that prints all the time does not keep the others waiting.
            while not pipe.closed and len(data) < LONGEST:
                try:
                    chunk = os.read(pipe.fileno(), 1 << 16)
                except (ConnectionResetError, TimeoutError):
                    chunk = b""
                if not chunk:
                    pipe.close()
                data += chunk
        return data

    def _print(self, line: bytes) -> None:
        """Keep a line of stderr: what ssh or a login shell says tells why a host cannot be reached."""
        self._last_words.append(printable(line.decode(errors="replace"), 400))

    def _understand(self, line: bytes) -> None:
        """Take a line of the program, without its mark."""
        raise NotImplementedError

    def _end(self) -> str:
        """Say why the connection has ended."""
        raise NotImplementedError

    def _give_up(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._unsent = b""


class Link(Line):
    """The way to one host, and the supervisor at its end."""

    mark = MARK.encode()

    def __init__(self, host: str, client: Client, output: Output, greeting: bytes, answer: float = ANSWER) -> None:
        """Send the greeting; ``up`` is set when it has arrived, or ``lost`` says why not.

        A host is lost that has said nothing after ``answer`` seconds.
        """
        super().__init__(host, client, greeting)
        self._output, self._answer = output, answer
        self._begun = self._looked = self._awake = self.heard
        self.up: Up | None = None
        self.ranks: tuple[RankNews, ...] = ()
        self.idle = 0.0
        self.asked = 0
        """The stop signal that the supervisor was sent."""
        self.stacks: Stacks | None = None
        self.met: Met | None = None
        self.gpus: GPUs | None = None

    @classmethod
    def through(
        cls,
        host: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        path: list[str],
        output: Output,
        *,
        signalled: bool = False,
        answer: float = ANSWER,
    ) -> Link:
        """Run a command, such as ssh, which starts on the host a Python that executes ``PROGRAM``, given on its stdin.

        That Python imports from ``path``. ``signalled``: stop signals that others send to the supervisor are meant for
        the whole job, as those of Slurm are.
        """
        client = processes.start(command, environment, on_parent_death=signal.SIGKILL, piped=True)
        order = packed({"folder": str(Path.cwd()), "path": path, "signalled": signalled})
        return cls(host, client, output, PROGRAM + order, answer)

    def send(self, what: str, **details: Any) -> None:
        """Tell the node to do something; nothing happens when it is lost."""
        self.say(packed({"do": what, **details}))

    def judge(self) -> None:
        """Give a node up that is silent. Time counts from when this process continued, where it was suspended."""
        now = time.monotonic()
        if now - self._looked > _SUSPENDED:
            self._awake = now
        self._looked = now
        if self.up is None and now - max(self._begun, self._awake) > self._answer:
            self._give_up(f"no answer in {self._answer:g} s")
        elif self.up is not None and now - max(self.heard, self._awake) > SILENCE:
            self._give_up(f"nothing heard for {SILENCE:g} s")

    def _print(self, line: bytes) -> None:
        # Until the supervisor is up, ssh or a login shell speaks.
        if self.up is None:
            super()._print(line)
        else:
            self._output.put(self.host, line)

    def _understand(self, line: bytes) -> None:
        try:
            news = News.model_validate_json(line)
        except ValidationError:
            self._give_up("an invalid word")
            return
        # The node's own time comes back to it and renews its lease.
        self.send("beat", now=news.now)
        self.up = self.up or news.up
        self.ranks = news.ranks if news.ranks is not None else self.ranks
        self.idle, self.stacks = news.idle, news.stacks or self.stacks
        self.asked = news.asked or self.asked
        self.met, self.gpus = news.met or self.met, news.gpus or self.gpus
        if news.problem:
            self._give_up(printable(news.problem))

    def _end(self) -> str:
        code = self.exit_code
        if self.up is None and self._last_words:
            return "; ".join(self._last_words)
        return "the connection has ended" if code in (None, 255) else f"its supervisor has ended (exit code {code})"


_ENDING = 8.0


def end(lines: Sequence[Line]) -> None:
    """End the programs at the ends of ``lines``."""
    for line in lines:
        line.hang_up()
    # All were told first, so that hundreds end in the time of one.
    until = time.monotonic() + _ENDING
    while any(line.is_ending() for line in lines) and time.monotonic() < until:
        pump(lines, REPORT / 10)
    for line in lines:
        line.close()


def ask(asked: Iterable[Link], lines: Iterable[Link], what: str, **where: Any) -> dict[Link, Met]:
    """Have nodes listen for the others, or call the one that listens; their answers, also that of a lost one."""
    asked = list(asked)
    _wait_for("met", asked, lines, what, where=where)
    return {link: link.met or Met(problem=link.lost) for link in asked}


def ask_for_gpus(links: Iterable[Link]) -> None:
    """Have nodes say which GPUs they have; ``gpus`` of a link that is lost stays None."""
    links = list(links)
    _wait_for("gpus", links, links, "gpus")


def _wait_for(
    answer: Literal["met", "gpus"], asked: Sequence[Link], lines: Iterable[Link], what: str, **order: Any
) -> None:
    """Ask, and read on all ``lines`` until each link has its ``answer`` or is lost."""
    lines = list(lines)
    for link in asked:
        setattr(link, answer, None)
        link.send(what, **order)
    while any(getattr(link, answer) is None and not link.lost for link in asked):  # bounded: a silent host is lost
        pump(lines, REPORT / 10)


def pump(lines: Iterable[Line], seconds: float) -> None:
    """Read and write on all lines for so long, or until something has come."""
    lines = list(lines)
    with selectors.DefaultSelector() as selector:
        for line in lines:
            line.register(selector)
        if not selector.get_map():
            time.sleep(seconds)
        for key, _ in selector.select(seconds) if selector.get_map() else ():
            if not key.fileobj.closed:  # type: ignore[union-attr]
                key.data.write()
                key.data.read()
    for line in lines:
        line.judge()
