"""Kills of any process of supervised jobs, saves included: nothing is lost (``make soak`` kills a thousand times)."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import threading
from pathlib import Path

import pytest

from tests.kills import kill_at_random
from tests.support import start_forked


@pytest.mark.timeout(1800)  # above that of a job, which names its seed; beside others 50 kills take six minutes
@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_lose_nothing(tmp_path: Path, kills: int) -> None:
    assert kill_at_random(tmp_path, kills, seed=1, parallel=2).total() >= kills


def test_two_threads_that_ask_for_an_exit_code_hear_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    process, heard, read = start_forked(os._exit, 7), [], multiprocessing.forkserver.read_signed
    other = threading.Thread(target=lambda: heard.append(process.exitcode))

    def read_late(descriptor: int) -> int:
        monkeypatch.undo()
        other.start()
        other.join(0.5)
        return int(read(descriptor))

    monkeypatch.setattr(multiprocessing.forkserver, "read_signed", read_late)
    process.join()
    other.join()
    assert (process.exitcode, heard) == (7, [7])
