"""Configuration of the toy task."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import DataError
from capt.pretrain.config.base import Section
from capt.pretrain.config.schema import Job


def listening(parent: int) -> list[str]:
    """The addresses (hexadecimal, as the kernel shows them) at which a process and its children take connections."""
    children = [Path(file).read_text().split() for file in Path(f"/proc/{parent}/task").glob("*/children")]
    sockets = set()
    for pid in (parent, *(int(child) for each in children for child in each)):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return sorted({row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets})


class Fault(Section):
    """Something that goes wrong on one rank at one step; at step 0 while preparing."""

    kind: Literal[
        "none", "term", "nan", "nan_gradient", "refuse", "crash", "wait", "kill", "stop", "hang", "flip",
        "flip_master", "move", "replace", "link_checkpoints",
        "replace_checkpoints", "nan_update", "slow_data", "slow_forward", "outage", "listens",
        "validation_refused", "validation_crash", "unfit_validation", "prune",
    ] = "none"  # fmt: skip
    step: int = 0
    rank: int = 0
    everywhere: bool = False
    """True if all ranks are slow."""
    once: str = ""
    """A file that is made by the fault, which does not strike again."""

    def delay(self, kind: str) -> None:
        """Make this rank slow by 20 ms, in every step."""
        if kind == self.kind and (self.everywhere or distributed.rank() == self.rank):
            time.sleep(0.02)

    def hits(self, kind: str, step: int) -> bool:
        if (kind, step, distributed.rank()) != (self.kind, self.step, self.rank):
            return False
        if self.once:
            if Path(self.once).exists():
                return False
            Path(self.once).touch()
        return True

    def strike(self, step: int) -> None:
        if self.hits("term", step):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.hits("outage", step):  # the test has seen to it that files of the run cannot be used now
            raise OSError(errno.ESTALE, "Stale file handle", "run")
        if self.hits("listens", step):
            Path(self.once).write_text("\n".join(listening(os.getppid())))
        if self.hits("refuse", step):
            raise DataError("data.files: no text")
        if self.hits("crash", step):
            raise RuntimeError("a fault of the program")
        if self.hits("wait", step):
            time.sleep(1.5)
        if self.hits("kill", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.hits("stop", step):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.hits("hang", step):
            libc, semaphore = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
            libc.sem_init(semaphore, 0, 0)
            libc.sem_wait(semaphore)  # forever, and with the interpreter's lock


class ToyJob(Job):
    """A job with a width, a fault, and a table with sparse gradients under an optimizer of its own."""

    width: int = 13
    table: Literal["none", "adagrad", "sparse_adam"] = "none"
    fault: Fault = Fault()
    exports: str = ""
    """A folder that every checkpoint has a copy of."""
    guided: bool = False
    """True if its validations decide something that a checkpoint has to hold."""
    bad_samples: tuple[int, ...] = ()
    """Samples whose loss is ``badness`` times as large."""
    badness: float = 100.0
    avoid: tuple[int, int] | None = None
    """Samples, from the first up to before the second, that are not used."""


JOB = ToyJob
