"""Processes of a forked ``capt`` that are forked as well, where the product would start an interpreter."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.resource_tracker
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from capt.launcher.supervisor import processes


def fork_ranks() -> None:
    """From now on ``processes.start`` forks this process, which has imported all, and runs ``python -m MODULE`` there.

    All else is as it was: the process is a child in a session of its own, with the kernel's signal at its parent's
    death, the environment and the descriptors that it was given, and no handler of a signal.
    """
    stand_in = SimpleNamespace(Popen=_Forked, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    processes.subprocess = stand_in  # type: ignore[assignment]


class _Forked:
    """Part of ``subprocess.Popen`` that ``capt.launcher.supervisor`` needs."""

    stdin = stdout = stderr = None

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        start_new_session: bool,
        pass_fds: Sequence[int],
        preexec_fn: Callable[[], None],
        stdin: None,
        stdout: IO[Any] | None,
        stderr: int | None,
    ) -> None:
        assert list(argv[:2]) == [sys.executable, "-m"], argv
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if start_new_session:
                    os.setsid()
                preexec_fn()
                _run(list(argv[2:]), env, cwd, pass_fds, stdout)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        """The exit code, or the negative number of a signal; None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if until is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("forked", timeout or 0.0)
            else:
                time.sleep(0.01)
        return self.returncode


def _run(
    words: list[str], env: Mapping[str, str], cwd: Path | None, kept: Sequence[int], output: IO[Any] | None
) -> None:
    take_over(env, cwd, kept, {} if output is None else {1: output.fileno(), 2: output.fileno()})
    sys.argv = words
    code = 0
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def take_over(env: Mapping[str, str], cwd: Path | None, kept: Sequence[int], streams: Mapping[int, int]) -> None:
    """Make this process, just forked, one that was started anew: with these standard streams, and ``kept`` open."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number, descriptor in streams.items():
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue
    if 0 in streams:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    tracker: Any = multiprocessing.resource_tracker._resource_tracker  # type: ignore[attr-defined]
    tracker._fd = tracker._pid = None  # its pipe is closed now; a new one is made where it is needed
    multiprocessing.set_start_method("fork", force=True)  # as in a new interpreter; the server set another
    logging.root.handlers.clear()  # those of the process that was forked: a rank sets its own
    logging.root.setLevel(logging.WARNING)
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
