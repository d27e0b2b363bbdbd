"""Asks all hosts at the same time: facts, clocks, the run folder, the rendezvous."""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from capt.launcher.preflight import probe
from capt.launcher.preflight.facts import Answer, Clock, ClockAnswer, Done, Facts, FileFound, Findings, Meeting, Survey
from capt.launcher.ssh import Host, allow_hosts, ssh_command
from capt.launcher.supervisor import processes
from capt.launcher.supervisor.link import Line, end, pump
from capt.pretrain.base.files import printable

_LOGIN = 40.0
"""Seconds for ssh, which itself gives up a connection after 10, the login shell and the start of Python."""
_ANSWER = 60.0
"""Seconds for an answer that reads files: longer means a file system that hangs."""
_CLOCK_ROUNDS = 5
_POLL = 0.1


class Session(Line):
    """ssh to one host, with the probe at its end.

    Attributes:
        answer: to the last question; None while it is open, was refused, or the host is lost.
        refused: why the probe cannot do what it was asked; the host is there.
    """

    mark = probe.MARK.encode()
    most_words = 12

    def __init__(self, host: str, environment: Mapping[str, str]) -> None:
        """Start ssh; whether it arrives shows with the first answer. Raises ``OSError`` where there is no ssh."""
        program = Path(probe.__file__).read_bytes()
        command = ssh_command(host, environment, program)
        client = processes.start(command, environment, on_parent_death=signal.SIGKILL, piped=True)
        super().__init__(host, client, program)
        self.answer: Any = None
        self.refused = ""

    def ask(self, what: str, seconds: float, kind: type[Answer], arguments: Mapping[str, Any]) -> None:
        """Ask the probe; a host that does not answer within ``seconds`` is lost."""
        self._what, self._seconds, self._kind = what, seconds, kind
        self.answer, self.refused = None, ""
        self._sent, self._begun = time.time(), time.monotonic()
        self.say(json.dumps({"ask": what, **arguments}).encode() + b"\n")

    @property
    def waits(self) -> bool:
        """Return true while the last question is open."""
        return not (self.lost or self.refused) and self.answer is None

    @property
    def clock(self) -> Clock:
        """The offset by the last question: the host looked at its clock at some moment of the round trip."""
        half = (self.heard - self._begun) / 2
        return Clock(self.answer.time - (self._sent + half), half)

    def judge(self) -> None:
        """Give a host up that has not answered in time."""
        if self.waits and time.monotonic() - self._begun > self._seconds:
            self._give_up(f"no answer to {self._what!r} in {self._seconds:.0f} s")

    def _understand(self, line: bytes) -> None:
        try:
            answer = json.loads(line)
            if "error" in answer:
                self.refused = printable(str(answer["error"]), 400) or "refused"
            else:
                self.answer = self._kind.model_validate(answer)
        except (ValidationError, ValueError, TypeError):
            self._give_up(f"an invalid answer to {self._what!r}")

    def _end(self) -> str:
        lines = [words for line in self._last_words if (words := line.strip("@ "))]
        return "; ".join(lines) or f"ssh ended with exit code {self.exit_code} and said nothing"


def survey(
    hosts: tuple[Host, ...],
    *,
    run_dir: Path,
    address: str,
    port: int,
    environment: Mapping[str, str],
    forwarded: Mapping[str, str],
) -> Survey:
    """Ask every host. Nothing is left on any of them, and the run folder is not made.

    Args:
        hosts: the rendezvous is on the first of them.
        run_dir: its nearest folder that exists is the one that must be shared and writable.
        address: of the rendezvous, as the other hosts reach it.
        port: of the rendezvous.
        environment: of this host's ssh.
        forwarded: the variables that the ranks get.
    """
    folder = existing(run_dir)
    here = Facts.model_validate(probe.facts())
    found = Survey(here, [Findings(host) for host in hosts], address, port, secrets.token_hex(8), str(folder))
    found.environment = dict(forwarded)
    allow_hosts(len(hosts))
    sessions: dict[str, Session] = {}
    try:
        for one in found.hosts:
            try:
                sessions[one.host.name] = Session(one.host.name, environment)
            except OSError as error:
                one.lost = f"ssh cannot be started: {error.strerror}"
        asking = _Asking(found.hosts, sessions)
        # Facts first, as the next steps leave out hosts that are lost; the rendezvous last, for it takes the port.
        _look(asking, [entry for entry in forwarded.get("PYTHONPATH", "").split(":") if entry])
        _share(found, asking)
        _meet(found, asking)
    finally:
        end([*sessions.values()])
    return found


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


class _Asking:
    """The hosts and the lines to them."""

    def __init__(self, hosts: list[Findings], sessions: Mapping[str, Session]) -> None:
        self._hosts, self._sessions = hosts, sessions

    def __call__(
        self,
        what: str,
        kind: type[Answer] = Done,
        *,
        seconds: float = _ANSWER,
        of: Iterable[Findings] | None = None,
        own: Callable[[Findings], Mapping[str, Any]] = lambda _: {},
        **arguments: Any,
    ) -> list[tuple[Findings, Session]]:
        """Ask hosts at the same time; return those that have answered or refused. The others are lost from there on.

        Args:
            what: the question, by the name of a function of the probe.
            kind: the answer.
            seconds: for the answer.
            of: the hosts; None for all.
            own: arguments of each host.
            arguments: those of all.
        """
        asked = [(one, self._sessions[one.host.name]) for one in (self._hosts if of is None else of) if not one.lost]
        for one, session in asked:
            session.ask(what, seconds, kind, {**arguments, **own(one)})
        lines = [session for _, session in asked]
        while any(session.waits for session in lines):  # bounded: a silent host is lost
            pump([session for session in lines if session.waits], _POLL)
        for one, session in asked:
            one.lost, one.exit_code = session.lost, session.exit_code
        return [(one, session) for one, session in asked if not one.lost]


def _look(ask: _Asking, path: list[str]) -> None:
    ask("now", ClockAnswer, seconds=_LOGIN)
    for _ in range(_CLOCK_ROUNDS):
        for one, session in ask("now", ClockAnswer):
            one.clock = min(one.clock or session.clock, session.clock, key=lambda clock: clock.bound)
    for one, session in ask("facts", Facts, pythonpath=path, folder=str(Path.cwd())):
        one.facts = session.answer


def _share(found: Survey, ask: _Asking) -> None:
    """Write a file into the folder from this host and from every other one, and look for each other's."""
    mine = Path(found.folder) / f".preflight-{found.token}"
    try:
        probe.write(str(mine), found.token)
    except OSError as error:
        found.here_writes = probe.problem(error)
        return
    theirs = {one.host.name: f"{mine}-{number}" for number, one in enumerate(found.hosts)}
    try:
        for one, session in ask("sees", FileFound, path=str(mine), text=found.token):
            one.blind, one.writes = bool(session.refused) or not session.answer.found, session.refused
        able = [one for one in found.hosts if not one.writes]
        for one, session in ask("write", of=able, own=lambda one: {"path": theirs[one.host.name]}, text=found.token):
            one.writes = session.refused
        until = time.monotonic() + probe.PATIENCE
        for one in found.hosts:
            if not (one.lost or one.blind or one.writes):
                one.unseen, one.writes = _unseen(theirs[one.host.name], found.token, until - time.monotonic())
        ask("remove")
    finally:
        probe.remove()
        for left in mine.parent.glob(f"{mine.name}-*"):  # of a host that was lost meanwhile
            left.unlink(missing_ok=True)


def _unseen(path: str, token: str, patience: float) -> tuple[bool, str]:
    """Return whether this host does not see a file of another one, and why it cannot be read."""
    try:
        return not probe.sees(path, token, patience)["found"], ""
    except OSError as error:
        return False, f"what it writes cannot be read here: {probe.problem(error)}"


def _meet(found: Survey, ask: _Asking) -> None:
    """The first host takes the port of the rendezvous, and every host calls it there."""
    first = found.hosts[:1]
    for _, session in ask("listen", of=first, port=found.port, token=found.token):
        found.port_problem = session.refused
    if first[0].lost or found.port_problem:
        return
    for one, session in ask("connect", Meeting, address=found.address, port=found.port):
        one.meeting, one.no_meeting = session.answer, session.refused
    ask("close", of=first)
