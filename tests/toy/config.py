"""Configuration of the toy task."""

from __future__ import annotations

import os
import signal
from typing import Literal

from pretrain.config.base import Section
from pretrain.config.schema import Job
from pretrain.engine import distributed


class Fault(Section):
    """Something that goes wrong on one rank at one step."""

    kind: Literal["none", "term", "nan", "nan_gradient"] = "none"
    step: int = 0
    rank: int = 0

    def hits(self, kind: str, step: int) -> bool:
        return (kind, step, distributed.rank()) == (self.kind, self.step, self.rank)

    def strike(self, step: int) -> None:
        if self.hits("term", step):
            os.kill(os.getpid(), signal.SIGTERM)


class ToyJob(Job):
    """A job with a width and a fault."""

    width: int = 13
    fault: Fault = Fault()


JOB = ToyJob
