"""Asks all hosts in parallel: facts, clocks, the run folder, the rendezvous."""

from __future__ import annotations

import json
import secrets
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from capt.launcher.preflight import probe
from capt.launcher.preflight.facts import Clock, ClockAnswer, Facts, Findings, Meeting, Seen, Survey, _Answer
from capt.launcher.ssh import Host, allow_hosts, ssh_command

# A conversation with the probe on one host, over ssh.


_MAX_BYTES = 1 << 20
_GRACE = 2.0


class LostError(Exception):
    """The host does not answer: ``reason`` in the words of ssh, and its exit code where it has ended."""

    def __init__(self, reason: str, exit_code: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.exit_code = reason, exit_code


class RefusedError(Exception):
    """The probe answered that it cannot do what it was asked: the host is there."""


class Session:
    """ssh to one host, with the probe at its end. Use as a context manager; nothing is left running."""

    def __init__(self, host: str, environment: Mapping[str, str]) -> None:
        """Start ssh; whether it arrives shows with the first answer. Raises ``LostError`` where there is no ssh."""
        program = Path(probe.__file__).read_bytes()
        argv = ssh_command(host, environment, program)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the session
        self._rest = b""
        self._until: float | None = None
        try:
            self._ssh = subprocess.Popen(
                argv, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr
            )
        except OSError as error:
            self._stderr.close()
            raise LostError(f"ssh cannot be started: {error.strerror}") from None
        self._send(program)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hang_up(self) -> None:
        """End the probe, which removes its files, and do not wait for it."""
        assert self._ssh.stdin is not None
        with suppress(OSError):  # ssh has ended
            self._ssh.stdin.close()
        self._until = self._until or time.monotonic() + _GRACE

    def close(self) -> None:
        """End the probe and ssh."""
        self.hang_up()
        assert self._ssh.stdout is not None
        assert self._until is not None
        try:
            self._ssh.wait(max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        self._ssh.stdout.close()
        self._stderr.close()

    def ask(self, what: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """The probe's answer.

        Raises:
            LostError: no answer within ``seconds``, or ssh has ended.
            RefusedError: the probe cannot do it.
        """
        self._send(json.dumps({"ask": what, **arguments}).encode() + b"\n")
        until = time.monotonic() + seconds
        while True:
            line = self._line(until)
            if line is None:
                raise LostError(f"no answer to {what!r} in {seconds:.0f} s")
            if not line.startswith(probe.MARK.encode()):  # what a login shell prints
                continue
            try:
                answer = json.loads(line[len(probe.MARK) :])
            except ValueError:
                answer = None
            if not isinstance(answer, dict):
                raise LostError(f"an answer to {what!r} that is none")
            if "error" in answer:
                raise RefusedError(_plain(str(answer["error"])))
            return answer

    def _send(self, data: bytes) -> None:
        assert self._ssh.stdin is not None
        with suppress(OSError):  # ssh has ended; reading says why
            self._ssh.stdin.write(data)
            self._ssh.stdin.flush()

    def _line(self, until: float) -> bytes | None:
        assert self._ssh.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._ssh.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    return None
                data = self._ssh.stdout.read1(1 << 16)  # type: ignore[attr-defined]
                self._rest += data
                if not data or len(self._rest) > _MAX_BYTES:
                    raise self._lost()
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _lost(self) -> LostError:
        try:
            code: int | None = self._ssh.wait(_GRACE)
        except subprocess.TimeoutExpired:
            code = None
        self._stderr.seek(0)
        said = self._stderr.read(_MAX_BYTES).decode(errors="replace").splitlines()
        lines = [plain for line in said if (plain := _plain(line).strip("@ "))]
        return LostError("; ".join(lines[-12:]) or f"ssh ended with exit code {code} and said nothing", code)


def _plain(text: str) -> str:
    """One line without the characters that would steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:400]


_AT_ONCE = 256
_LOGIN = 40.0
"""Seconds for ssh, which itself gives up a connection after 10, the login shell and the start of Python."""
_ANSWER = 60.0
"""Seconds for an answer that reads files: longer means a file system that hangs."""
_CLOCK_ROUNDS = 5
_A = TypeVar("_A", bound=_Answer)


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
    path = [entry for entry in forwarded.get("PYTHONPATH", "").split(":") if entry]
    with ExitStack() as stack, ThreadPoolExecutor(min(len(hosts), _AT_ONCE)) as pool:
        sessions: dict[str, Session] = {}

        def each(step: Callable[[Session, Findings], None]) -> None:
            reached = [one for one in found.hosts if not one.lost]
            for _ in pool.map(lambda one: _attempt(step, sessions[one.host.name], one), reached):
                pass

        for one in found.hosts:
            try:
                sessions[one.host.name] = stack.enter_context(Session(one.host.name, environment))
            except LostError as error:
                one.lost = error.reason
        # Facts first, as the next steps leave out hosts that are lost; the rendezvous last, for it takes the port.
        stack.callback(_hang_up, sessions)
        each(lambda session, one: _look(session, one, path))
        _share(found, each)
        _meet(found, sessions, each)
    return found


def _hang_up(sessions: Mapping[str, Session]) -> None:
    """End all before any is waited for."""
    for session in sessions.values():
        session.hang_up()


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _attempt(step: Callable[[Session, Findings], None], session: Session, one: Findings) -> None:
    try:
        step(session, one)
    except LostError as error:
        one.lost, one.exit_code = error.reason, error.exit_code


def _read(kind: type[_A], answer: dict[str, object], what: str) -> _A:
    try:
        return kind.model_validate(answer)
    except ValidationError:
        raise LostError(f"an answer to {what!r} that is none") from None


def _look(session: Session, one: Findings, path: list[str]) -> None:
    session.ask("now", _LOGIN)
    one.clock = min((_clock(session) for _ in range(_CLOCK_ROUNDS)), key=lambda clock: clock.bound)
    one.facts = _read(Facts, session.ask("facts", _ANSWER, pythonpath=path, folder=str(Path.cwd())), "facts")


def _clock(session: Session) -> Clock:
    """The offset by one question: the host looked at its clock at some moment of the round trip."""
    sent, begun = time.time(), time.monotonic()
    there = _read(ClockAnswer, session.ask("now", _ANSWER), "now").time
    half = (time.monotonic() - begun) / 2
    return Clock(there - (sent + half), half)


def _share(found: Survey, each: Callable[[Callable[[Session, Findings], None]], None]) -> None:
    """Write a file into the folder from this host and from every other one, and look for each other's."""
    folder = Path(found.folder)
    mine = folder / f".preflight-{found.token}"
    try:
        probe.write(str(mine), found.token)
    except OSError as error:
        found.here_writes = probe.problem(error)
        return
    index = {one.host.name: number for number, one in enumerate(found.hosts)}

    def exchange(session: Session, one: Findings) -> None:
        theirs = f"{mine}-{index[one.host.name]}"
        try:
            one.blind = not _read(Seen, session.ask("sees", _ANSWER, path=str(mine), text=found.token), "sees").seen
        except RefusedError as error:
            one.blind, one.writes = True, str(error)
            return
        try:
            session.ask("write", _ANSWER, path=theirs, text=found.token)
        except RefusedError as error:
            one.writes = str(error)
            return
        try:
            one.unseen = not one.blind and not probe.sees(theirs, found.token)["seen"]
        except OSError as error:
            one.writes = f"what it writes cannot be read here: {probe.problem(error)}"
        session.ask("remove", _ANSWER)

    try:
        each(exchange)
    finally:
        probe.remove()
        for left in folder.glob(f"{mine.name}-*"):  # of a host that was lost meanwhile
            left.unlink(missing_ok=True)


def _meet(
    found: Survey,
    sessions: Mapping[str, Session],
    each: Callable[[Callable[[Session, Findings], None]], None],
) -> None:
    """The first host takes the port of the rendezvous, and every host calls it there."""
    first = found.hosts[0]
    if first.lost:
        return

    def listen(session: Session, one: Findings) -> None:
        try:
            session.ask("listen", _ANSWER, port=found.port, token=found.token)
        except RefusedError as error:
            found.port_problem = str(error)

    def call(session: Session, one: Findings) -> None:
        try:
            answer = session.ask("connect", _ANSWER, address=found.address, port=found.port)
            one.meeting = _read(Meeting, answer, "connect")
        except RefusedError as error:
            one.no_meeting = str(error)

    _attempt(listen, sessions[first.host.name], first)
    if first.lost or found.port_problem:
        return
    each(call)
    if not first.lost:
        _attempt(lambda session, _: _close(session), sessions[first.host.name], first)


def _close(session: Session) -> None:
    session.ask("close", _ANSWER)
