"""A conversation with the probe on one host, over ssh."""

from __future__ import annotations

import json
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.preflight import probe
from launcher.ssh import ssh_command

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
