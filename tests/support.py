"""What tests share: real process groups over gloo, started from one warm server process."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ["torch", "deepspeed", "deepspeed.runtime.zero.muon.original_muon", "pretrain.engine.run", "tests.support"]
_CONTEXT.set_forkserver_preload(_PRELOAD)


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


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


def skip_without(precision: str) -> None:
    """Skip a test of a precision that this machine has no units for."""
    from pretrain.base.errors import ConfigError
    from pretrain.engine.precision import check_precision

    try:
        check_precision(precision)
    except ConfigError as error:
        pytest.skip(str(error))


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run ``fn(*args)`` on ``world`` gloo ranks (one thread each) and return their results in rank order.

    ``fn`` must be a module-level function; what it returns travels by pickle, so return numpy arrays or floats.
    A failure on any rank fails the caller with that rank's stack trace.
    """
    results = _CONTEXT.Queue()
    port = free_port()
    processes = [
        _CONTEXT.Process(target=_rank_main, args=(fn, rank, world, port, args, results), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    out: list[Any] = [None] * world
    try:
        for _ in range(world):
            rank, value, error = results.get(timeout=timeout)
            if error is not None:
                raise AssertionError(f"rank {rank} of {world} failed:\n{error}")
            out[rank] = value
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    return out
