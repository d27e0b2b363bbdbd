"""A map over processes that keeps the order and holds only a few items at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from threading import Thread
from typing import Any, TypeVar

# The type of the function that long work calls to show how far it is.


ProgressCallback = Callable[[int, int], None]
"""Called as ``callback(done, total)``, both in the caller's unit: rows, bytes or batches."""


T = TypeVar("T")
R = TypeVar("R")

_function: Callable[[Any], Any]


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """``map(function, items)`` on ``workers`` processes (1: in this one), at most ``2 * workers`` items in flight.

    ``function`` is sent to each process once. Processes are spawned, not forked: a fork of a process that runs threads
    (torch, NCCL) may hang. They end with this process, however it ends.
    """
    if workers == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_install, initargs=(function,)) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(_call_function, item))
                if len(waiting) == 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _install(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism: no threads in each of them
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """The pool of a process that was killed would wait for work without end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call_function(item: Any) -> Any:
    return _function(item)
