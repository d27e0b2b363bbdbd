"""The head's end of the line to the supervisor of one node."""

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

_MARK = MARK.encode()
_SUSPENDED = 2.0
ANSWER = 30.0
"""Seconds for ssh, which itself gives up a connection after 10, or srun, the login shell and the start of Python."""


class Client(Protocol):
    """What a line runs through: the process of an ssh or srun, or a connection with the same streams and ends."""

    stdin: Any
    stdout: Any
    stderr: Any

    def poll(self) -> int | None:
        """The exit code (0: the node has seen all its ranks end); None while the line is open."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises ``subprocess.TimeoutExpired``."""


class Link:
    """The way to one host, and the supervisor at its end."""

    def __init__(self, host: str, client: Client, output: Output, greeting: bytes, answer: float = ANSWER) -> None:
        """Say the greeting; whether it arrives shows when ``up`` is there, or ``lost`` says why not.

        A host is lost that has said nothing after ``answer`` seconds.
        """
        self.host, self._output = host, output
        self._client, self._answer = client, answer
        self._process: subprocess.Popen[bytes] | None = None
        for pipe in self._pipes():
            if not pipe.closed:
                os.set_blocking(pipe.fileno(), False)
        self._unsent, self._line, self._said = greeting, b"", b""
        self._last_words: deque[str] = deque(maxlen=8)
        self._begun = self._looked = self._awake = self.heard = time.monotonic()
        self.up: Up | None = None
        self.ranks: tuple[RankNews, ...] = ()
        self.idle = 0.0
        self.asked = 0
        """The stop signal that the supervisor was sent."""
        self.stacks: Stacks | None = None
        self.met: Met | None = None
        self.gpus: GPUs | None = None
        self.lost = ""
        """Why nothing is to be heard of this node any more."""
        self.in_order = False

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
        told = packed({"folder": str(Path.cwd()), "path": path, "signalled": signalled})
        link = cls(host, client, output, PROGRAM + told, answer)
        link._process = client
        return link

    def send(self, what: str, **details: Any) -> None:
        """Tell the node to do something; nothing happens when it is lost."""
        self._unsent += packed({"do": what, **details})
        self.write()

    def register(self, selector: selectors.BaseSelector) -> None:
        """What is to be waited for."""
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
        """Take what has come from the node and its ranks."""
        _, stdout, stderr = self._pipes()
        *lines, self._said = (self._said + self._take(stderr)).replace(b"\r", b"\n").split(b"\n")
        # A line that does not end is handed on in pieces.
        if len(self._said) > LONGEST:
            lines, self._said = [*lines, self._said], b""
        for line in filter(None, lines):
            # Until the supervisor is up, ssh or a login shell speaks: it tells why a host cannot be reached.
            if self.up is None:
                self._last_words.append(printable(line.decode(errors="replace"), 400))
            else:
                self._output.put(self.host, line)
        *lines, self._line = (self._line + self._take(stdout)).split(b"\n")
        for line in lines:
            self._understand(line)
        if len(self._line) > LONGEST:
            self._give_up("a word without an end")
        if stdout.closed and not self.lost:
            self._give_up(self._end())

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

    def hang_up(self) -> None:
        """End the node, which ends its ranks."""
        self._unsent = b""
        self._pipes()[0].close()

    def is_ending(self) -> bool:
        """Whether the connection is still there, and can be expected to end."""
        return self._client.poll() is None and not self.lost

    def close(self) -> None:
        """End the connection. The end is ``in_order`` when the node has seen all its ranks end."""
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

    def _take(self, pipe: Any) -> bytes:
        data = b""
        with suppress(BlockingIOError):
            # Bounded, so that a node that prints all the time does not keep the others waiting.
            while not pipe.closed and len(data) < LONGEST:
                try:
                    chunk = os.read(pipe.fileno(), 1 << 16)
                except (ConnectionResetError, TimeoutError):
                    chunk = b""
                if not chunk:
                    pipe.close()
                data += chunk
        return data

    def _understand(self, line: bytes) -> None:
        if not line.startswith(_MARK) or self.lost:
            return
        try:
            news = News.model_validate_json(line[len(_MARK) :])
        except ValidationError:
            self._give_up("a word that is none")
            return
        self.heard = time.monotonic()
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
        """Why the connection has ended."""
        try:
            code: int | None = self._client.wait(2.0)
        except subprocess.TimeoutExpired:
            code = None
        if self.up is None and self._last_words:
            return "; ".join(self._last_words)
        return "the connection has ended" if code in (None, 255) else f"its supervisor has ended (exit code {code})"

    def _give_up(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._unsent = b""


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
    answer: Literal["met", "gpus"], asked: Sequence[Link], lines: Iterable[Link], what: str, **told: Any
) -> None:
    """Ask, and read on all ``lines`` until each link has its ``answer`` or is lost."""
    lines = list(lines)
    for link in asked:
        setattr(link, answer, None)
        link.send(what, **told)
    while any(getattr(link, answer) is None and not link.lost for link in asked):  # bounded: a silent host is lost
        pump(lines, REPORT / 10)


def pump(links: Iterable[Link], seconds: float) -> None:
    """Read and write on all lines for so long, or until something has come."""
    links = list(links)
    with selectors.DefaultSelector() as selector:
        for link in links:
            link.register(selector)
        if not selector.get_map():
            time.sleep(seconds)
        for key, _ in selector.select(seconds) if selector.get_map() else ():
            link = key.data
            if not key.fileobj.closed:  # type: ignore[union-attr]
                link.write()
                link.read()
    for link in links:
        link.judge()
