"""Seeded hostile input, in this process: what every kind of fuzz test shares.

The invariant: whatever a file from somebody else holds, a command ends within ``LIMIT`` seconds with exit code 0 or 2,
says at most three lines, shows no traceback, writes nothing outside the folders it was given, and a refusal leaves
nothing behind. ``CAPT_FUZZ`` is the number of inputs of each kind (``make fuzz`` sets thousands); an input is a pure
function of kind and number, so ``CAPT_FUZZ_ONLY=kind:number`` repeats one.
"""

from __future__ import annotations

import io
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from capt.pretrain.base.errors import UserError, user_text

LIMIT = 5.0
INPUTS = int(os.environ.get("CAPT_FUZZ", "40"))


class Hang(BaseException):
    """The input took longer than ``LIMIT`` seconds. No ``Exception``, so that nothing swallows it."""


@dataclass(frozen=True)
class Outcome:
    """End of a command."""

    code: int
    text: str
    """Output on stderr."""


def inputs(kind: str, count: int | None = None) -> Iterator[tuple[int, random.Random]]:
    """Number and generator of each input of a kind; ``count`` bounds how many of a slow kind the suite takes."""
    chosen, _, number = os.environ.get("CAPT_FUZZ_ONLY", "").partition(":")
    if chosen:
        numbers: Sequence[int] = [int(number)] if chosen == kind else []
    else:
        numbers = range(INPUTS if count is None or "CAPT_FUZZ" in os.environ else min(INPUTS, count))
    for i in numbers:
        yield i, random.Random(f"{kind}:{i}")


def command(*arguments: str) -> Outcome:
    """Run ``capt`` in this process."""
    from capt.launcher.cli import main

    root = logging.getLogger()
    before = root.handlers[:], root.level
    errors = io.StringIO()
    code = 0
    try:
        root.handlers = [logging.StreamHandler(errors)]
        with (
            deadline(" ".join(arguments)),
            redirect_stderr(errors),
            redirect_stdout(io.StringIO()),
        ):
            main(list(arguments))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        root.handlers, root.level = before
    return Outcome(code, errors.getvalue())


def library(function: Callable[[], object]) -> Outcome:
    """Call a function of the library at its border: returning is exit 0, what ``user_text`` knows exit 2."""
    with deadline(repr(function)):
        try:
            function()
        except (UserError, OSError) as error:
            text = user_text(error)
            if text is None:
                raise
            return Outcome(2, f"error: {text}")
    return Outcome(0, "")


def check(outcome: Outcome, what: object, codes: tuple[int, ...] = (0, 2)) -> None:
    """The invariant on an outcome; ``what`` names the input in the failure."""
    assert outcome.code in codes, f"{what}: exit {outcome.code}\n{outcome.text}"
    assert "Traceback" not in outcome.text, f"{what}\n{outcome.text}"
    if outcome.code:
        lines = outcome.text.strip().splitlines()
        assert 1 <= len(lines) <= 3, f"{what}: {len(lines)} lines\n{outcome.text}"
        assert all(len(line) < 2000 and line.isprintable() for line in lines), f"{what}\n{outcome.text!r}"


@contextmanager
def deadline(what: str, seconds: float = LIMIT) -> Iterator[None]:
    """Raise :class:`Hang` when the block takes longer."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"over {seconds} s: {what}")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    begin = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - begin < seconds, f"over {seconds} s: {what}"  # C code does not hear the signal


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file, folder and link below ``folder`` with size, time of change and mode: compare before and after."""
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        found[str(path.relative_to(folder))] = (state.st_size, state.st_mtime_ns, state.st_mode)
    return found


def mutated(rng: random.Random, content: bytes) -> bytes:
    """Bytes with a few random damages: flips, cuts, doublings, insertions, long runs."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.choice((1, 10, 1000))]
        elif kind == 2:
            data[at:at] = data[at : at + rng.choice((1, 10, 1000))]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randint(1, 20))
        elif kind == 4:
            data[at:at] = rng.choice((b"\0", b"\xff\xfe", b"\n", b'"', b"{", b"]", b"../", b"${x}", b"-1", b"1e999"))
        else:
            data[at:at] = bytes([rng.randrange(256)]) * rng.choice((100, 5000))
    return bytes(data)


HOSTILE: tuple[object, ...] = (
    None, True, -1, 0, 1, 1 << 31, 1 << 63, 10**30, 0.5, -0.0, 1e308, "", " ", "\0", "\n", "a" * 5000, "../../x",
    "/etc/passwd", "${oc.env:HOME}", "${run.dir}", "NaN", "Infinity", "\ud7ff", "\u202e", [], [[]], {}, {"": {}},
    ["x"] * 100, {"a": {"b": {"c": 1}}}, "1_000", "0x10", "1e5", "true", "~", "!!int x", "<<", "&a", "*a",
)  # fmt: skip
"""Values that are likely to be the wrong one."""
