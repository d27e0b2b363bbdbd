"""When a run is done: what its user may do with it."""

from __future__ import annotations

import logging

from pretrain.engine import distributed
from pretrain.engine.loop import NEVER, Callback, Run

logger = logging.getLogger(__name__)


class NextSteps(Callback):
    """Last of the callbacks, so that the checkpoint is there. A line each, of the task's ``next_steps``."""

    def next_due(self, run: Run) -> int:
        return NEVER

    def on_end(self, run: Run) -> None:
        if run.finished and distributed.rank() == 0:
            for line in run.task.next_steps(run.dir):
                logger.info("next: %s", line)
