"""Signs of activity, on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capt.launcher.supervisor import activity
from capt.launcher.supervisor.activity import Activity


@pytest.mark.skipif(os.uname().machine not in activity._CALLS, reason="system calls have other numbers here")
@pytest.mark.parametrize(
    ("script", "waits"),
    [
        # represents a file system that answers late: a read of a named pipe sleeps as one of FUSE or Lustre does
        ("import os; os.mkfifo('{0}/file'); os.read(os.open('{0}/file', os.O_RDWR), 1)", True),
        ("import os, threading, time; os.mkfifo('{0}/file'); f = os.open('{0}/file', os.O_RDWR);"
         "threading.Thread(target=os.read, args=(f, 1)).start(); time.sleep(60)", True),
        ("import os; os.read(os.pipe()[0], 1)", False),
        ("import socket; socket.create_server(('127.0.0.1', 0)).accept()", False),
        ("import threading; threading.Event().wait()", False),
    ],
)  # fmt: skip
def test_a_call_about_a_file_is_waited_for_in_whatever_state(tmp_path: Path, script: str, waits: bool) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", script.format(tmp_path)])
    try:
        deadline = time.monotonic() + 20
        while (Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "S") and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        watch = Activity([process.pid])
        idle = 0.0
        for _ in range(10):
            time.sleep(0.1)
            idle = watch.idle()
        assert (idle < 0.5) == waits
    finally:
        process.kill()
        process.wait()
