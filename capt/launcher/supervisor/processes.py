"""Child processes that receive our signals and never outlive us."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from capt.pretrain.base.files import open_for_append
from capt.pretrain.base.process import born, die_with_parent

log = logging.getLogger(__name__)


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    on_parent_death: signal.Signals,
    cwd: Path | None = None,
    output: Path | None = None,
    inherits: Sequence[int] = (),
    piped: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own (a terminal's Ctrl-C reaches only us, and we pass it on).

    Linux sends it ``on_parent_death`` when this process dies, however it dies. What it prints is appended to
    ``output``, or goes where ours goes; ``piped``, it is read here, as its input is written. It ``inherits`` these
    descriptors.
    """
    parent = os.getpid()
    with open_for_append(output) if output else nullcontext() as log:
        return subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE if piped else None,
            stdout=subprocess.PIPE if piped else log,
            stderr=subprocess.PIPE if piped else subprocess.STDOUT if log else None,
            start_new_session=True,
            pass_fds=inherits,
            preexec_fn=lambda: die_with_parent(parent, on_parent_death),
        )


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process, not what it started, and wake it if it is stopped; nothing happens when it has ended."""
    if process.returncode is None:  # not reaped: the pid is still its own
        with suppress(ProcessLookupError):  # this is called by signal handlers, in the midst of its reaping too
            os.kill(process.pid, number)
            os.kill(process.pid, signal.SIGCONT)


def signal_name(number: int) -> str:
    """The name of a signal; of the real-time signals, all of which end a process, only the first and last have one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process, its group, and its descendants (torchrun puts each rank into a session of its own)."""
    if process.returncode is not None:
        return
    below = descendants(process.pid)
    with suppress(ProcessLookupError):  # as in send
        os.killpg(process.pid, signal.SIGKILL)
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            children += map(int, path.read_text().split())
    return children + [pid for child in children for pid in descendants(child)]


def ended(process: subprocess.Popen[bytes]) -> bool:
    """True when a process has ended; what it started and left behind is killed before its pid is given back."""
    if process.returncode is not None:
        return True
    if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return False
    kill_tree(process)
    process.wait()
    return True


def end_recorded(recorded: Sequence[tuple[int, int]], seconds: float) -> list[int]:
    """SIGKILL processes that are no children of ours, by number and beginning; returns those that do not end."""
    until = time.monotonic() + seconds
    while left := [pid for pid, begun in recorded if born(pid) == begun]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return left
        time.sleep(0.05)
    return []


class _Stop:
    """State of the process: how many ``stop_signals`` blocks are open, and which signal is to be passed on."""

    blocks = 0
    asked: signal.Signals | None = None


def stop_asked() -> bool:
    """Return true where a stop signal came since the outermost open :func:`stop_signals` block began."""
    return _Stop.asked is not None


@contextmanager
def stop_signals(stop: Callable[[signal.Signals], None], kill: Callable[[], None]) -> Iterator[None]:
    """While active, SIGTERM, SIGUSR1, SIGHUP and Ctrl-C call ``stop``; a second Ctrl-C calls ``kill``.

    ``stop`` gets the signal to pass on: SIGUSR1 as it is, SIGTERM for the others, because the job's answer to both is
    to save and to exit with 75, while Python's answer to SIGINT is a stack trace on every rank. A signal that came in
    an outer block before this one began is passed on immediately: nobody sends it twice.
    """
    interrupts = 0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        asked = _Stop.asked = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            log.warning("second Ctrl-C: stopping immediately, without a checkpoint")
            kill()
            return
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        log.warning("%s: asking the job to save and stop (Ctrl-C twice: immediately)", name)
        stop(asked)

    handled = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup asked for it to be ignored
        handled.append(signal.SIGHUP)
    # Only the outermost block forgets: blocks within it must hear of a signal that came between them.
    if _Stop.blocks == 0:
        _Stop.asked = None
    _Stop.blocks += 1
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        if _Stop.asked is not None:
            stop(_Stop.asked)
        yield
    finally:
        _Stop.blocks -= 1
        for number, old in before.items():
            signal.signal(number, old)
