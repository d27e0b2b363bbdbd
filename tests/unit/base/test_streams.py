"""Processes that are started without some of the standard streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

LOOK = """
import os, sys
from capt.pretrain.base.process import open_closed_streams
open_closed_streams()
print("to nobody", flush=True)
null = os.stat(os.devnull).st_rdev
sys.exit(sum(os.fstat(number).st_rdev == null for number in (0, 1, 2)) * 10 + os.open("x", os.O_CREAT | os.O_RDWR))
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_not_given_to_the_next_file(tmp_path: Path, closed: str) -> None:
    command = f'"$0" -c "$1" {closed}'
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = ["sh", "-c", command, sys.executable, LOOK]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(argv, env=env, cwd=tmp_path, check=False, **streams)  # type: ignore[call-overload]
    assert done.returncode == 10 * closed.count("&-") + 3, done.stderr


def test_a_rank_without_stdout_ends_as_it_would_with_it() -> None:
    """It ended with AttributeError and 1, whatever it had done, and was started again."""
    argv = ["sh", "-c", '"$0" -m capt.pretrain nowhere.yaml >&-', sys.executable]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "no configuration file 'nowhere.yaml'" in done.stderr
