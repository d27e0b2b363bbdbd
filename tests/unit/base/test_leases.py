from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from capt.pretrain.base import leases
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.leases import LeasedTask, Leases
from capt.pretrain.base.process import born


def tasks(folder: Path, count: int, slow: float = 0.0) -> list[LeasedTask]:
    folder.mkdir(exist_ok=True)

    def task(number: int) -> LeasedTask:
        def run() -> None:
            time.sleep(slow)
            with (folder / "log").open("a") as log:
                log.write(f"{number} {os.getpid()}\n")
            (folder / str(number)).touch()

        return LeasedTask(str(number), (folder / str(number)).exists, run)

    return [task(number) for number in range(count)]


def test_processes_share_tasks_and_do_none_twice(tmp_path: Path) -> None:
    done = tasks(tmp_path / "done", 40, slow=0.005)
    children = []
    for _ in range(4):
        if (pid := os.fork()) == 0:
            try:
                Leases(tmp_path / "leases").share(done)
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    lines = [line.split() for line in (tmp_path / "done" / "log").read_text().splitlines()]
    assert Counter(number for number, _ in lines) == Counter(map(str, range(40)))
    assert len({pid for _, pid in lines}) > 1
    assert list((tmp_path / "leases").iterdir()) == []


def test_the_lease_of_a_process_that_is_gone_is_free_at_once(tmp_path: Path) -> None:
    done = tasks(tmp_path / "done", 1)
    if (pid := os.fork()) == 0:
        with Leases(tmp_path / "leases")._held("0"):
            os._exit(0)
    os.waitpid(pid, 0)
    assert [path.name for path in (tmp_path / "leases").iterdir()] == ["0.lease"]
    begin = time.monotonic()
    Leases(tmp_path / "leases").share(done)
    assert time.monotonic() - begin < 5
    assert done[0].is_done()


def test_the_lease_of_a_process_holds_while_one_of_its_threads_lives(tmp_path: Path) -> None:
    """The first thread of a killed process may be gone while another still writes."""
    (tmp_path / "leases").mkdir()
    end_of_a_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    program = (
        "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start(); "
        f"ctypes.CDLL(None).syscall({end_of_a_thread}, 0)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        owner = f"{leases._place()} {process.pid} {born(process.pid)} 0"
        (tmp_path / "leases" / "0.lease").write_text(owner)
        while ") Z" not in Path(f"/proc/{process.pid}/stat").read_text():
            time.sleep(0.01)
        lease, mine = tmp_path / "leases" / "0.lease", Leases(tmp_path / "leases")
        assert not mine._is_abandoned(lease, owner)
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert mine._is_abandoned(lease, owner)


def test_a_lease_of_another_host_holds_while_it_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Leases(tmp_path / "leases", expires=0.4)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(leases, "_place", lambda: "another-host")
        holding = Leases(tmp_path / "leases", beat=0.05)._held("0")
        assert holding.__enter__()
    begin = time.monotonic()
    while time.monotonic() - begin < 1.0:
        with mine._held("0") as got:
            assert not got
        time.sleep(0.05)
    holding.__exit__(None, None, None)
    with mine._held("0") as got:
        assert got


def test_a_lease_of_another_host_expires_by_the_clock_of_this_one(tmp_path: Path) -> None:
    done = tasks(tmp_path / "done", 1)
    mine = Leases(tmp_path / "leases", expires=0.4)
    path = tmp_path / "leases" / "0.lease"
    path.write_text("another-host 12 345 67")
    os.utime(path, (4e9, 4e9))  # its clock is in another century
    begin = time.monotonic()
    mine.share(done)
    assert 0.4 < time.monotonic() - begin < 10
    assert done[0].is_done()


def test_a_failed_task_is_free_again(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        Leases(tmp_path / "leases").share([LeasedTask("a", lambda: False, fail)])
    assert list((tmp_path / "leases").iterdir()) == []


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(DataError, match=r"leases: this file system has no hard links \(Operation not permitted\)"):
        Leases(tmp_path / "leases").share(tasks(tmp_path / "done", 1))
    assert list((tmp_path / "leases").iterdir()) == []


def test_a_lease_that_another_one_holds_is_only_read(tmp_path: Path) -> None:
    """Every process meets the leases of all others: that must not cost each of them writes to a shared disk."""
    folder = tmp_path / "leases"
    with Leases(folder)._held("0") as mine:
        assert mine
        os.utime(folder, (1, 1))
        with Leases(folder)._held("0") as theirs:
            assert not theirs
        assert folder.stat().st_mtime == 1
