"""A map over processes that keeps the order and holds only a few items at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing.connection import wait
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from capt.pretrain.base.errors import DataError, UserError

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

# The type of the function that long work calls to show how far it is.


ProgressCallback = Callable[[int, int], None]
"""Called as ``callback(done, total)``, both in the caller's unit: rows, bytes or batches."""


T = TypeVar("T")
R = TypeVar("R")

_function: Callable[[Any], Any]


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of ``size``, one of which is in memory at a time; the last one may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


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


def run_alike(function: Callable[[], None], workers: int, watch: Callable[[], None] = lambda: None) -> None:
    """Run ``function`` in ``workers`` new processes until all have ended; ``watch`` is called every second.

    The first one that fails ends the others, and its error is raised here. ``function`` is sent by pickle, and the
    processes are spawned and end with this one as those of `ordered_map`.

    Raises:
        DataError: a process was killed.
    """
    context = multiprocessing.get_context("spawn")
    errors = context.SimpleQueue()
    processes = [context.Process(target=_run, args=(function, errors), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    try:
        running = list(processes)
        while running:
            wait([process.sentinel for process in running], timeout=1.0)
            watch()
            # What a process has sent says more than its exit code.
            if not errors.empty():
                raise errors.get()
            for process in running:
                if process.exitcode:
                    raise DataError(
                        f"a worker process ended with exit code {process.exitcode}, as where memory is short; start "
                        "again with fewer workers: what is finished is kept"
                    )
            running = [process for process in running if process.exitcode is None]
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _run(function: Callable[[], None], errors: SimpleQueue[Exception]) -> None:
    _install(lambda _: None)
    try:
        function()
    except (UserError, OSError, ImportError) as error:  # what a user is told in one line
        errors.put(error)


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
