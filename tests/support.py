"""Helpers of tests: processes forked from one warm server, as ranks of real gloo groups or as ``capt`` commands.

The server has imported what `tests/preloaded.py` names and has done nothing else: it knows no process group, no device
and no thread. What is forked from it starts in milliseconds instead of the seconds that the imports take.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import multiprocessing.popen_forkserver
import os
import queue
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

Capt = Callable[..., tuple[int, str, str]]
"""The fixture ``capt``: it runs a command in this process, and returns its exit code and what is on both streams."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])


class _Popen(multiprocessing.popen_forkserver.Popen):
    """Reads the exit code once, whichever thread asks.

    A process that is started asks after all others of its caller, those that threads beside it wait for too. The server
    says each exit code once: a thread that came second would find the end of the pipe, and take it for the code 255.
    """

    def __init__(self, process: Any) -> None:
        self._reading = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and flag != os.WNOHANG:
            wait([self.sentinel])
        with self._reading:
            return super().poll()


class _Process(multiprocessing.context.ForkServerProcess):
    """A process forked from the server."""

    @staticmethod
    def _Popen(process: Any) -> _Popen:  # noqa: N802 (multiprocessing's name)
        return _Popen(process)


def free_port(together: int = 1) -> int:
    """The first of ``together`` TCP ports in a row that nobody listens on right now."""
    while True:
        with ExitStack() as sockets:
            port = 0
            try:
                for number in range(together):
                    each = sockets.enter_context(socket.socket())
                    each.bind(("", port + number if port else 0))
                    port = port or int(each.getsockname()[1])
                return port
            except (OSError, OverflowError):
                continue


def _rank_main(fn: Callable[..., Any], rank: int, world: int, port: int, args: tuple[Any, ...], results: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world)
        results.put((rank, fn(*args), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


class ClosedTerminal(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def flush(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


def skip_without(precision: str) -> None:
    """Skip a test of a precision that this machine has no units for."""
    from capt.pretrain.base.errors import ConfigError
    from capt.pretrain.engine.rank import check_precision

    try:
        check_precision(precision)
    except ConfigError as error:
        pytest.skip(str(error))


def start_ranks(fn: Callable[..., Any], world: int, *args: Any) -> tuple[list[Any], Any]:
    """Start ``fn(*args)`` on ``world`` gloo ranks; returns their processes, and the queue of what they return."""
    results = _CONTEXT.Queue()
    port = free_port()
    processes = [
        _Process(target=_rank_main, args=(fn, rank, world, port, args, results), daemon=True) for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes, results


def emulate_fp16() -> None:
    """Let this process, a rank of a test, compute in fp16 on a CPU without its units: slow, and right."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run ``fn(*args)`` on ``world`` gloo ranks (one thread each) and return their results in rank order.

    ``fn`` must be a module-level function; what it returns travels by pickle, so return numpy arrays or floats.
    A failure on any rank fails the caller with that rank's stack trace; so does a rank that dies, and ``timeout``
    seconds in which no rank returns.
    """
    processes, results = start_ranks(fn, world, *args)
    waited_for = dict(enumerate(processes))
    out: list[Any] = [None] * world
    deadline = time.monotonic() + timeout
    try:
        while waited_for:
            try:
                rank, value, error = results.get(timeout=1.0)
            except queue.Empty:
                dead = {rank: process.exitcode for rank, process in waited_for.items() if process.exitcode}
                assert not dead, f"ranks that ended without a word, with their exit codes: {dead}"
                assert time.monotonic() < deadline, f"after {timeout:g} s nothing is heard of ranks {list(waited_for)}"
                continue
            assert error is None, f"rank {rank} of {world} failed:\n{error}"
            del waited_for[rank]
            out[rank] = value
            deadline = time.monotonic() + timeout
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    return out


def train_job(mapping: dict[str, Any], resume: bool = False) -> int | str:
    """Run a job on this rank; its exit code, or the user's error."""
    from capt.pretrain.base.errors import UserError
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.config.load import job_from_mapping
    from capt.pretrain.engine.run import run_job

    quiet_libraries(debug=False)
    try:
        return run_job(job_from_mapping(mapping, "test"), resume=resume)
    except UserError as error:
        return f"{type(error).__name__}: {error}"


def train_seen(mapping: dict[str, Any], resume: bool = False) -> tuple[int | str, list[list[int]]]:
    """Result of :func:`train_job`, and the ids of the samples of this rank, step by step."""
    from capt.pretrain.registry import task_class

    seen: list[list[int]] = []
    task: Any = task_class(mapping["task"]["type"])
    step = task.step

    def noted(self: Any, engines: Any, batch: Any, progress: Any) -> Any:
        seen.append([int(i) for part in batch for i in part.ids])
        return step(self, engines, batch, progress)

    task.step = noted
    return train_job(mapping, resume), seen


def stopped_at(mapping: dict[str, Any], step: int | None) -> dict[str, Any]:
    """The job, stopped after a step."""
    return {**mapping, "schedule": {**mapping["schedule"], "stop_after": step}}


def run_capt(
    *arguments: str, cwd: Path, env: Mapping[str, str], timeout: float = 240.0, warm: bool = True
) -> CompletedProcess[str]:
    """Run ``capt ARGUMENTS`` to its end in a forked process: what it does from ``capt.launcher.cli.main`` on is the
    same, except that ranks are forked from it in turn, unless ``warm`` is False.

    A test of the start itself (the imports, their time, how the interpreter is started) needs a process of its own.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        output = [multiprocessing.reduction.DupFd(file.fileno()) for file in (out, err)]
        process = _Process(target=_capt_main, args=(arguments, str(cwd), dict(env), output, warm))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
        for file in (out, err):
            file.seek(0)
        said, log = (file.read().decode(errors="replace") for file in (out, err))
        assert process.exitcode is not None
        return CompletedProcess(["capt", *arguments], process.exitcode, said, log)


def start_capt(*arguments: str, cwd: Path, env: Mapping[str, str], log: Path) -> Any:
    """Start ``capt ARGUMENTS`` in a forked process, as :func:`run_capt`."""
    process = _Process(target=_capt_in_a_session, args=(arguments, str(cwd), dict(env), str(log)))
    process.start()
    return process


def _capt_in_a_session(arguments: tuple[str, ...], cwd: str, env: dict[str, str], log: str) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    _capt_main(arguments, cwd, env, [file, os.dup(file)])


def start_forked(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Start ``fn(*arguments)``, a module-level function, in a forked process."""
    process = _Process(target=fn, args=arguments)
    process.start()
    return process


def run_head(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``fn(*arguments)`` in a forked process, whose ranks are forked from it. It prints as this one does.

    ``fn`` must be a module-level function; what goes in and out travels by pickle.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    output = [multiprocessing.reduction.DupFd(number) for number in (1, 2)]
    process = _Process(target=_head, args=(fn, arguments, there, output))
    process.start()
    there.close()
    try:
        value, error = here.recv()
    except EOFError:
        value, error = None, "it ended without a word"
    process.join()
    assert error is None, error
    return value


def _head(fn: Callable[..., Any], arguments: tuple[Any, ...], result: Any, output: list[Any]) -> None:
    from tests.forked import fork_ranks

    fork_ranks()
    for number, file in enumerate(output, start=1):
        os.dup2(file.detach(), number)
    try:
        result.send((fn(*arguments), None))
    except BaseException:
        result.send((None, traceback.format_exc()))


def _capt_main(arguments: tuple[str, ...], cwd: str, env: dict[str, str], output: list[Any], warm: bool = True) -> None:
    from tests.forked import fork_ranks

    if warm:
        fork_ranks()
    for number, file in enumerate(output, start=1):
        os.dup2(file if isinstance(file, int) else file.detach(), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["capt", *arguments]
    from capt.launcher.cli import main

    main(list(arguments))
