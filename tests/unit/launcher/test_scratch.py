"""Nothing of ranks is left among the temporary files, also of those that were killed."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capt.launcher.supervisor.ranks import LocalRanks, Scratch, _own_prefix

ROOT = Path(__file__).parents[3]
RANK = (
    "import os, signal, tempfile; from capt.pretrain.base.process import use_scratch; use_scratch()\n"
    "from multiprocessing import util; print(util.get_temp_dir(), tempfile.gettempdir(), flush=True)\n"
    "os.kill(os.getpid(), signal.SIGKILL)"
)
HOLDER = (
    "import time; from capt.launcher.supervisor.ranks import Scratch; made = Scratch()\n"
    "print(made.env, flush=True); time.sleep(60)"
)


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t") as short:  # names of sockets are short
        monkeypatch.setattr(tempfile, "tempdir", short)
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        yield Path(short)


def test_sockets_of_a_killed_rank_go_and_other_temporary_files_stay_where_they_are(
    temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = LocalRanks()
    ranks.start([sys.executable, "-c", RANK], os.environ)
    while None in ranks.codes:
        ranks.look(0.02)
    sockets, others = capfd.readouterr().out.split()
    assert ranks.codes == [-signal.SIGKILL]
    assert Path(sockets).is_relative_to(temporary)
    assert Path(sockets).parent.name.startswith("capt-r-")
    assert others == str(temporary)
    ranks.close()
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_is_not(temporary: Path) -> None:
    killed, living = (start_holder() for _ in range(2))
    killed.kill()
    killed.wait()
    (temporary / f"{_own_prefix()}link").symlink_to(ROOT)
    (temporary / f"{_own_prefix()}file").touch()
    scratch = Scratch()
    assert len(list(temporary.iterdir())) == 4  # of three processes two, the link and the file
    assert (ROOT / "pyproject.toml").exists()
    living.kill()
    living.wait()
    scratch.close()


def test_the_folder_of_another_host_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``TMPDIR`` may be shared, and its file system not show here who has locked what there."""
    with monkeypatch.context() as there:
        there.setattr(socket, "gethostname", lambda: "node-2")
        others = Scratch()
    fcntl.flock(others._lock, fcntl.LOCK_UN)
    Scratch().close()
    (kept,) = others.env.values()
    assert Path(kept).is_dir()
    others.close()
    assert list(temporary.iterdir()) == []


def start_holder() -> subprocess.Popen[bytes]:
    """A process that has a folder."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None
    with holder.stdout as said:
        assert said.readline()
    return holder


def test_where_a_socket_could_have_no_name_the_folder_lies_elsewhere(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep, short = temporary / ("d" * 60), temporary / "s"
    deep.mkdir()
    short.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr("capt.launcher.supervisor.ranks._SHORT", str(short))
    scratch = Scratch()
    (made,) = scratch.env.values()
    assert Path(made).parent == short
    scratch.close()
    assert [*deep.iterdir(), *short.iterdir()] == []


@pytest.mark.parametrize("late", [False, True])
def test_a_folder_that_another_process_takes_for_nobodys_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Two supervisors start on a host: one looks for folders without a lock when the other has just made its own."""
    mkdtemp, lock, made = tempfile.mkdtemp, fcntl.flock, []

    def make(**options: Any) -> str:
        made.append(mkdtemp(**options))
        if len(made) == 1 and not late:
            os.rmdir(made[0])
        return made[-1]

    def flock(file: int, operation: int) -> None:
        if len(made) == 1:
            os.rmdir(made[0])
        lock(file, operation)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    monkeypatch.setattr(fcntl, "flock", flock if late else lock)
    scratch = Scratch()
    assert list(scratch.env.values()) == made[1:]
    assert Path(made[1]).is_dir()
    scratch.close()


def test_where_no_folder_can_be_made_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "away"))
    monkeypatch.setattr("capt.launcher.supervisor.ranks._SHORT", str(tmp_path / "away"))
    scratch = Scratch()
    assert scratch.env == {}
    scratch.close()
