"""A machine that lacks something at a resume reports no typing error: nothing would try again."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.small_job import write_job
from tests.support import run_capt

ENV = dict(os.environ, CUDA_VISIBLE_DEVICES="")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


PORTS = {name: _free_port() for name in ("figures", "meeting")}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has stopped at step 2 of 4, and that shows its figures at a port."""
    folder = write_job(
        tmp_path_factory.mktemp("faults"),
        schedule={"max_steps": 4, "warmup_steps": 1},
        checkpoint={"every": 1},
        supervise={"restarts": 0},
        batch={"global": 8, "micro": 8},
    )
    port = f"run.callbacks={{prometheus: {{port: {PORTS['figures']}}}}}"
    options = ("--nproc", "1", "--master-port", str(PORTS["meeting"]), "run.dir=run", port)
    done = run_capt("pretrain", "job.yaml", *options, "schedule.stop_after=2", cwd=folder, env=ENV)
    assert done.returncode == 75, done.stderr
    return folder


@contextmanager
def _taken(name: str, folder: Path) -> Iterator[None]:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1" if name == "figures" else "", PORTS[name]))
        one.listen()
        yield


@contextmanager
def _moved(name: str, folder: Path) -> Iterator[None]:
    (folder / name).rename(folder / f"{name}.away")
    try:
        yield
    finally:
        (folder / f"{name}.away").rename(folder / name)


@contextmanager
def _held(name: str, folder: Path) -> Iterator[None]:
    with (folder / name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


Fault = Callable[[str, Path], AbstractContextManager[None]]
FAULTS: list[tuple[Fault, str, tuple[str, ...], int, str]] = [
    (_taken, "meeting", (), 1, "port"),
    (_taken, "meeting", ("--master-port", str(PORTS["meeting"]), "--nproc", "2"), 2, "port"),
    (_moved, "text.txt", ("--nproc", "1"), 1, "text.txt"),
    (_moved, "text.txt", ("optimizer.lr=1e-4",), 2, "text.txt"),
    (_held, "run/.training", (), 75, "another process is training"),
    (_taken, "figures", (), 0, "the run continues without run.callbacks.prometheus"),
]


@pytest.mark.parametrize(("fault", "name", "typed", "code", "said"), FAULTS)
def test_a_resume_ends_with_2_only_for_what_was_typed(
    stopped: Path, tmp_path: Path, fault: Fault, name: str, typed: tuple[str, ...], code: int, said: str
) -> None:
    run = stopped / "run"
    kept = shutil.copytree(run, tmp_path / "kept", symlinks=True)
    try:
        with fault(name, stopped):
            done = run_capt("resume", "run", *typed, cwd=stopped, env=ENV)
        assert done.returncode == code, done.stderr
        assert said in done.stderr
        state = json.loads((run / "status.json").read_text())["state"]
        assert state == ("stopped" if code else "done"), "a run that was not continued is as it was"
    finally:
        shutil.rmtree(run)
        shutil.copytree(kept, run, symlinks=True)


def test_the_same_faults_of_a_first_start_may_be_typed_wrong(stopped: Path) -> None:
    for number, (fault, name) in enumerate([(_taken, "meeting"), (_moved, "text.txt")]):
        with fault(name, stopped):
            options = ("--nproc", "1", "--master-port", str(PORTS["meeting"]), f"run.dir=new{number}")
            done = run_capt("pretrain", "job.yaml", *options, cwd=stopped, env=ENV)
        assert done.returncode == 2, done.stderr
