"""The tests that a process collects: the same ones in the same order, in any process, at any time and place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Variables of another user on another machine; the second process also starts at another second.
ELSEWHERE = {
    "PYTHONHASHSEED": "7",
    "USER": "nobody",
    "LOGNAME": "nobody",
    "TZ": "Asia/Tokyo",
    "LC_ALL": "C",
    "COLUMNS": "61",
}


def test_another_process_collects_the_same_tests_in_the_same_order(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Workers of xdist refuse to start when their lists differ: bytes packed at import held the second in their id."""
    config = request.config
    arguments = [str(Path(config.invocation_params.dir, argument)) for argument in config.args]
    chosen = [f"{option}={config.getoption(option)}" for option in ("-m", "-k")]
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        **os.environ,
        **ELSEWHERE,
        "HOME": str(home),
        "TMPDIR": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *chosen, *arguments)
    listed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert listed.returncode == 0, listed.stdout[-2000:] + listed.stderr[-2000:]
    there = listed.stdout.partition("\n\n")[0].splitlines()
    assert there == [item.nodeid for item in request.session.items]
