"""A headless Chromium that tests drive over a pipe with the DevTools protocol; needs the standard library alone."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-sync",
    "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


class Browser:
    """A Chromium with one page. ``events`` holds what the page reported since the last :meth:`open`."""

    def __init__(self, profile: Path, timeout: float = 60.0) -> None:
        assert CHROMIUM is not None
        self.events: list[dict[str, Any]] = []
        self._timeout, self._number, self._buffer = timeout, 0, b""
        to_read, self._write = _pipe()
        self._read, to_write = _pipe()

        def connect() -> None:  # Chromium reads commands from descriptor 3 and answers on 4
            os.dup2(to_read, 3)
            os.dup2(to_write, 4)

        with (profile.parent / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(  # the pipes' own descriptors are closed in the child by exec
                [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
                preexec_fn=connect, close_fds=False, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        target = self._call("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command to the page."""
        return self._call(method, parameters, self._session)

    def open(self, path: Path) -> None:
        """Load a file and wait for its ``load`` event."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + self._timeout
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive(deadline)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _call(self, method: str, parameters: dict[str, Any], session: str | None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + self._timeout
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._read, 1 << 16) if ready else b""
            if not chunk:
                raise TimeoutError("Chromium has ended" if ready else f"no answer in {self._timeout:g} s")
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        event: dict[str, Any] = json.loads(message)
        if "method" in event:
            self.events.append(event)
        return event


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are not 3 or 4, which are to be those of Chromium."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
