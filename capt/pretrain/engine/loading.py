"""Batches that other processes assemble, and the limit on waiting for them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from capt.pretrain.base.errors import DataError, RunFailedError, UserError, is_passing, user_text
from capt.pretrain.base.process import die_with_parent
from capt.pretrain.config.schema import LoaderSection
from capt.pretrain.engine import interruption
from capt.pretrain.engine.rank import give_back_freed_memory

logger = logging.getLogger(__name__)

BatchT = TypeVar("BatchT")
AssembleStep = Callable[[int], Sequence[BatchT]]
"""Makes this rank's micro-batches, dataclasses of tensors and plain values, of the step with this number."""
_POLL = 1
"""Seconds between two looks at whether a signal has come or the time is up."""
_BEGINNING = 30.0
"""Seconds in which all workers have begun; they take milliseconds."""
_PEEK = 0.005
_ATTEMPTS = 3
_GRACE = 5.0
"""Seconds that a batch may still take after a stop signal: the run then ends with the step, as it should."""


@dataclass(frozen=True)
class _Step(Generic[BatchT]):
    """The micro-batches of a step with one tensor for each field of all of them, laid end to end.

    A tensor from another process holds a file descriptor of this one for as long as it lives: so a step needs one
    descriptor a field, whatever the accumulation.
    """

    kind: type[BatchT]
    tensors: dict[str, Tensor]
    rows: dict[str, list[int]]
    others: list[dict[str, Any]]

    @classmethod
    def of(cls, parts: Sequence[BatchT]) -> _Step[BatchT]:
        names = [name for name, value in vars(parts[0]).items() if isinstance(value, Tensor)]
        return cls(
            type(parts[0]),
            {name: torch.cat([getattr(part, name) for part in parts]) for name in names},
            {name: [len(getattr(part, name)) for part in parts] for name in names},
            [{name: value for name, value in vars(part).items() if name not in names} for part in parts],
        )

    def parts(self) -> list[BatchT]:
        """The micro-batches, as views of the tensors."""
        split = [tensor.split(self.rows[name]) for name, tensor in self.tensors.items()]
        return [
            self.kind(**dict(zip(self.tensors, values, strict=True)), **rest)
            for values, rest in zip(zip(*split, strict=True), self.others, strict=True)
        ]

    def pin_memory(self) -> _Step[BatchT]:
        """The step in page-locked memory."""
        return replace(self, tensors={name: tensor.pin_memory() for name, tensor in self.tensors.items()})


class LoaderFailedError(RunFailedError):
    """The processes that assemble batches on this host died or hang: a fault of the machine, not of the input."""

    everywhere = False
    passing = True


class _Fault(NamedTuple):
    """Reason why a step cannot be assembled, and whether a machine is at fault."""

    text: str
    passing: bool


class _Steps(Dataset[Any]):
    """The micro-batches of this rank by the number of a step; what is wrong where assembling fails."""

    def __init__(self, assemble: AssembleStep[Any]) -> None:
        self._assemble = assemble

    def __getitem__(self, number: int) -> _Step[Any] | _Fault:
        try:
            return _Step.of(self._assemble(number))
        except (UserError, OSError) as error:  # torch would send the stack trace of this process as the message
            text = user_text(error)
            if text is None:
                raise
            return _Fault(text, is_passing(error))


def training_batches(
    assemble: AssembleStep[BatchT], numbers: Sequence[int], loader: LoaderSection
) -> Iterator[list[BatchT]]:
    """This rank's micro-batches of the steps that ``assemble`` knows by these ``numbers``.

    ``loader.workers`` processes assemble them ahead of the training.

    Raises:
        DataError: the data cannot be read.
        LoaderFailedError: a process has died, or does not begin; nothing has come for ``loader.timeout_minutes``.
        Interrupted: a stop signal has come, and no data since.
    """
    forking = multiprocessing.get_context("fork")  # children of this rank, whatever Python's default
    begun = forking.Semaphore(0) if loader.workers else None  # it takes shared memory
    steps: DataLoader[Any] = DataLoader(
        _Steps(assemble),
        # An item is a whole step: torch neither batches nor collates.
        batch_size=None,
        sampler=numbers,
        num_workers=loader.workers,
        multiprocessing_context=forking if loader.workers else None,
        prefetch_factor=loader.prefetch if loader.workers else None,
        pin_memory=torch.cuda.is_available(),
        collate_fn=_identity,
        worker_init_fn=partial(_start_worker, os.getpid(), begun),
        # The wait ends every second, for a look at signals and at the time.
        timeout=_POLL if loader.workers else 0,
    )
    arriving = _start_workers(steps, begun) if loader.workers else iter(steps)
    for number in range(len(numbers)):
        step = _next(arriving, number, loader) if loader.workers else next(arriving)
        if isinstance(step, _Fault):
            error = DataError(step.text)
            error.passing = step.passing
            raise error
        yield step.parts()


def _start_workers(steps: DataLoader[Any], begun: Any) -> Iterator[Any]:
    """An iterator whose workers have all begun.

    A process that is forked at the moment in which a thread of this one begins or ends may find a lock of the
    interpreter taken that nobody will give back, and then does not begin. All are then forked once more.
    """
    for _ in range(_ATTEMPTS):
        arriving = iter(steps)
        if _have_begun(steps.num_workers, begun):
            return arriving
        _kill_workers(arriving)
        # Taken back from the workers that had begun.
        while begun.acquire(block=False):
            pass
        logger.warning("a loader worker did not begin within %g s; all of this rank are started again", _BEGINNING)
    raise LoaderFailedError(f"loader workers do not begin: {_ATTEMPTS} times one did not within {_BEGINNING:g} s")


def _have_begun(workers: int, begun: Any) -> bool:
    until = time.monotonic() + _BEGINNING
    try:
        return all(_begins(begun, until) for _ in range(workers))
    except RuntimeError as error:  # of torch, where one has died
        raise _dead_worker(error) from error


def _begins(begun: Any, until: float) -> bool:
    """Wait until one more worker begins; False if too late. ``acquire(timeout=...)`` has a clock that may jump."""
    while not begun.acquire(block=False):
        if time.monotonic() > until:
            return False
        time.sleep(_PEEK)
    return True


def _next(arriving: Iterator[Any], number: int, loader: LoaderSection) -> Any:
    """Wait for step ``number``, with a look at the clock every second. Workers take turns: the number tells which."""
    worker, begin, stop_heard = number % loader.workers, time.monotonic(), 0.0
    while True:
        try:
            return next(arriving)
        except RuntimeError as error:
            # torch names a time-out in the text of the error alone.
            if not str(error).startswith("DataLoader timed out"):
                raise _dead_worker(error) from error
        now = time.monotonic()
        if heard := interruption.recorded_signal():
            stop_heard = stop_heard or now
            if now - stop_heard > _GRACE:
                _kill_workers(arriving)
                interruption.interrupt(heard, f"while no data came for {now - begin:.0f} s (loader worker {worker})")
        if now - begin > 60 * loader.timeout_minutes:
            _kill_workers(arriving)
            raise LoaderFailedError(
                f"no data for {now - begin:.0f} s: loader worker {worker} of {loader.workers} has not answered. A file "
                "system that hangs does this; if batches merely take so long, raise loader.timeout_minutes"
            )


def _kill_workers(arriving: Any) -> None:
    """Kill the workers: torch would ask them to stop, and wait for the one that hangs."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises wherever the rank is just then
    for process in arriving._workers:
        process.kill()
    for process in arriving._workers:
        process.join(1.0)
    signal.signal(signal.SIGCHLD, before)


def _dead_worker(error: RuntimeError) -> Exception:
    text = " ".join(f"{error.__cause__ or ''} {error}".split())
    if "Caught" in text:  # an error of our own, in the worker
        return error
    remedies = {
        "Bus error": "shared memory is full (df -h /dev/shm), or a data file was cut short while it was read",
        "Killed": "the host's memory is full: set loader.workers or loader.prefetch lower",
    }
    remedy = next((remedy for word, remedy in remedies.items() if word in text), "dmesg may say more")
    return LoaderFailedError(f"a loader worker has died ({text[:200]}): {remedy}")


def _start_worker(rank: int, begun: Any, worker: int) -> None:
    die_with_parent(rank)  # torch's workers look every five seconds, and hold what they inherited so long
    give_back_freed_memory()
    # a scheduler that signals every process of a job must not take the loaders from a rank that is about to save
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    begun.release()


def _identity(step: Any) -> Any:
    return step
