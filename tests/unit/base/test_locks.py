"""The lock of a process ends with that process."""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import IO, Any

import pytest

from capt.pretrain.base import locks
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.locks import file_lock, is_locked, is_replaced, make_once


def _outlive(started: Event) -> None:
    started.set()
    time.sleep(60)


def test_a_forked_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    """Loader workers live some seconds longer than a rank that was killed, which is to be resumed immediately."""
    context = multiprocessing.get_context("fork")
    started = context.Event()
    worker = context.Process(target=_outlive, args=(started,))
    with file_lock(tmp_path / "lock"):
        worker.start()
        assert started.wait(60)
        assert is_locked(tmp_path / "lock")
    try:
        assert not is_locked(tmp_path / "lock")
        with file_lock(tmp_path / "lock", refusal="held by the worker"):
            pass
    finally:
        worker.kill()
        worker.join()


def test_a_lock_is_replaced_when_another_file_stands_at_its_path(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path):
        assert not is_replaced(path)
        path.rename(tmp_path / "moved")
        assert is_replaced(path)
        assert not is_replaced(tmp_path / "moved")
        path.touch()
        assert is_replaced(path)


def test_a_file_that_its_last_owner_has_removed_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner removes the file between our opening of it and our lock: a third process would lock a new file."""
    path = tmp_path / "lock"
    opened = []

    def open_before_the_owner_removes(lock: Path, **options: Any) -> IO[str]:
        file = locks_open(lock, **options)
        opened.append(file)
        if len(opened) == 1:
            lock.unlink()
        return file

    locks_open = locks.open_lock
    monkeypatch.setattr(locks, "open_lock", open_before_the_owner_removes)
    with file_lock(path, refusal="held by another", remove=True):
        assert is_locked(path)
        assert not is_replaced(path)
    assert len(opened) == 2
    assert all(file.closed for file in opened)
    assert not path.exists()


def test_what_is_there_is_found_without_its_lock(tmp_path: Path) -> None:
    with file_lock(tmp_path / "lock"):
        make_once(tmp_path / "lock", lambda: True, lambda: pytest.fail("it is made again"))


def test_one_makes_what_many_wait_for_and_none_takes_the_lock_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would else take it in turn, each in a new file."""
    waiting, opened, made = 40, list[Path](), list[int]()
    locks_open = locks.open_lock

    def count(path: Path, **options: Any) -> IO[str]:
        opened.append(path)
        return locks_open(path, **options)

    def make() -> None:
        until = time.monotonic() + 60
        while len(opened) < waiting and time.monotonic() < until:
            time.sleep(0.01)
        made.append(len(opened))

    def need() -> None:
        make_once(tmp_path / "lock", lambda: bool(made), make)

    monkeypatch.setattr(locks, "open_lock", count)
    threads = [threading.Thread(target=need) for _ in range(waiting)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == [waiting]
    assert len(opened) == waiting
    assert not (tmp_path / "lock").exists()


def test_what_could_not_be_made_is_made_by_the_next_one(tmp_path: Path) -> None:
    made = list[int]()

    def fail() -> None:
        raise DataError("no text")

    with pytest.raises(DataError, match="no text"):
        make_once(tmp_path / "lock", lambda: bool(made), fail)
    make_once(tmp_path / "lock", lambda: bool(made), lambda: made.append(1))
    assert made == [1]
    assert not (tmp_path / "lock").exists()
