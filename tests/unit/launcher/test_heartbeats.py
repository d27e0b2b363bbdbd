"""Ranks note what they do in shared memory; who hangs is judged by it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from capt.launcher.supervisor.heartbeats import Page, Pulse, find_stall, is_stopped
from capt.pretrain.engine.heartbeat import HEADER, PAST, SECTIONS
from tests.support import run_head

STALL = 10.0


def pulse(step: int, section: str = "step", seconds: float = 0.1, times: int = 5, longest: float = 2.0) -> Pulse:
    return Pulse(section, step, seconds, times, longest)


def test_a_rank_hangs_beyond_three_times_its_longest_and_the_allowance() -> None:
    assert find_stall({0: pulse(7, seconds=16.0)}, STALL) is None
    stall = find_stall({0: pulse(7, seconds=16.1)}, STALL)
    assert stall is not None
    assert str(stall) == ("hangs: 16.1 s in step after step 7, which took 2.0 s at most so far (limit 16.0 s)")


def test_the_rank_that_is_furthest_behind_is_judged_and_not_those_that_wait_for_it() -> None:
    waits, saves = pulse(7, seconds=60.0), pulse(6, "save", seconds=60.0, longest=30.0)
    assert find_stall({0: saves, 1: waits}, STALL) is None
    stall = find_stall({0: pulse(7, "data", seconds=60.0), 1: waits}, STALL)
    assert stall is not None
    assert stall.rank == 0
    stall = find_stall({0: pulse(7, seconds=59.9), 1: pulse(7, seconds=60.0)}, STALL)
    assert stall is not None
    assert stall.rank == 1  # the first one there had nobody to wait for


@pytest.mark.parametrize(
    "unknown", [pulse(0, "start", 9999.0), pulse(1, seconds=9999.0, times=2), pulse(9, "end", 99.0)]
)
def test_what_is_not_known_yet_has_no_limit(unknown: Pulse) -> None:
    assert find_stall({0: unknown}, STALL) is None
    assert find_stall({}, STALL) is None


def test_a_process_is_seen_through_its_page() -> None:
    page = Page(0)
    script = (
        "import time; from capt.pretrain.engine import heartbeat as h; h.open_page(); h.enter('data', 41);"
        "h.enter('step'); time.sleep(.2); h.enter('step', 42); print(h.enter('save')); print('go', flush=True); input()"
    )
    try:
        with subprocess.Popen(
            [sys.executable, "-c", script], env={**os.environ, **page.env}, pass_fds=page.descriptors,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert page.read() is None or page.read().section == "start"  # type: ignore[union-attr]
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == ["step\n", "go\n"]
            seen = page.read()
            assert seen is not None
            assert (seen.section, seen.step, seen.times) == ("save", 42, 0)
            assert 0 <= seen.seconds < 30
            os.kill(process.pid, 19)
            assert _soon(lambda: is_stopped(process.pid))
            os.kill(process.pid, 18)
            assert _soon(lambda: not is_stopped(process.pid))
            process.communicate("\n")
    finally:
        page.close()


def _compile() -> dict[str, tuple[int, float]]:
    """Count the ends of each section, and its longest, in a process that compiles."""
    import torch

    from capt.pretrain.engine import heartbeat as h

    page = Page(0)
    os.environ.update(page.env)
    h.open_page()
    model = torch.compile(lambda x: x.sin(), backend=lambda graph, _: time.sleep(0.3) or graph)
    h.note_compilations()
    for size in (3, 4, 4, 4):  # the second size is compiled once more, for any size
        h.enter("step")
        model(torch.ones(size))
    h.enter("data")
    return {name: PAST.unpack_from(page._memory, HEADER.size + i * PAST.size) for i, name in enumerate(SECTIONS)}


def test_a_compilation_is_no_step_and_neither_is_the_first_step() -> None:
    """Three times the longest step is the limit: with a compilation in it, a hang would go unnoticed for minutes."""
    past = run_head(_compile)
    assert past["compile"][0] == 2
    assert past["compile"][1] > 0.3
    assert past["step"][0] == 6  # each is in two parts that compiles
    assert past["step"][1] < 0.3
    slow = (
        "import time; from capt.pretrain.engine import heartbeat as h; h.open_page(); h.enter('step'); time.sleep(.3);"
    )
    page = Page(0)
    try:
        script = slow + "[h.enter('step') for _ in range(4)]"
        env = {**os.environ, **page.env}
        subprocess.run([sys.executable, "-c", script], env=env, pass_fds=page.descriptors, check=True)
        seen = page.read()
    finally:
        page.close()
    assert seen is not None
    assert (seen.times, seen.longest < 0.2) == (4, True)


def test_an_unwatched_rank_notes_nothing() -> None:
    script = (
        "from capt.pretrain.engine import heartbeat as h; h.open_page(); print(h.enter('data', 3), h.enter('step'))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == "start data\n"


def test_a_note_is_cheap() -> None:
    script = (
        "import os, time; from capt.pretrain.engine import heartbeat as h\n"
        "fd = os.memfd_create('x'); os.ftruncate(fd, h.SIZE); os.environ[h.HEARTBEAT] = str(fd); h.open_page()\n"
        "begin = time.perf_counter()\n"
        "for _ in range(10000): h.enter('step', 1)\n"
        "print((time.perf_counter() - begin) / 10000)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(said.stdout) < 1e-4


def _soon(condition: object) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False
