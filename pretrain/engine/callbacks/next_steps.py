"""At the end of a finished run: what came of it, and the commands that its user may want next."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import timedelta

from pretrain.base import distributed
from pretrain.base.errors import DataError
from pretrain.engine.judgement import best_of, direction, judge, judged_metric, series
from pretrain.engine.loop import NEVER, Callback, Run
from pretrain.engine.metrics_file import METRICS, read_metrics

logger = logging.getLogger(__name__)


class NextSteps(Callback):
    """Log time, tokens, validation and a judgement, and each line of the task's ``next_steps``.

    It comes last, when the checkpoint is already there, and nothing in it can fail the run.
    """

    def on_start(self, run: Run) -> None:
        self._began, self._first = time.monotonic(), run.progress.step

    def next_due(self, run: Run) -> int:
        return NEVER

    def on_end(self, run: Run) -> None:
        if run.finished and distributed.rank() == 0:
            for line in self._outcome(run):
                logger.info("%s", line)
            for line in run.task.next_steps(run.dir):
                logger.info("next: %s", line)

    def _outcome(self, run: Run) -> Iterator[str]:
        took = timedelta(seconds=round(time.monotonic() - self._began))
        since = f" since step {self._first}" if self._first else ""
        tokens = f", {run.progress.tokens:,} tokens" if run.progress.tokens else ""
        yield f"done: step {run.progress.step}{tokens}; {took}{since}"
        try:
            rows = read_metrics(run.dir / METRICS)
        except (DataError, OSError) as error:
            logger.warning("%s; no judgement of the run", error)
            return
        best = run.job.checkpoint.best
        metric = judged_metric(rows.validation, best)
        values = series(rows.validation, metric) if metric else []
        if metric is not None and direction(metric) and values:
            step, value = best_of(values, metric)
            yield f"validation: {metric} {values[-1][1]:.4g} at the end, best {value:.4g} at step {step}"
        yield f"judgement: {judge(rows.training, rows.validation, best)}"
