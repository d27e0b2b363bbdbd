"""At the end of a finished run: the commands that its user may want next."""

from __future__ import annotations

import logging

from pretrain.engine import distributed
from pretrain.engine.loop import NEVER, Callback, Run

logger = logging.getLogger(__name__)


class NextSteps(Callback):
    """Logs each line of the task's ``next_steps``. It comes last, when the checkpoint is already there."""

    def next_due(self, run: Run) -> int:
        return NEVER

    def on_end(self, run: Run) -> None:
        if run.finished and distributed.rank() == 0:
            for line in run.task.next_steps(run.dir):
                logger.info("next: %s", line)
