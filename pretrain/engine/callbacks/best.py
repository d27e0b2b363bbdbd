"""Finds the best checkpoint by a validation metric, and keeps the link and the record that name it."""

from __future__ import annotations

import math
from pathlib import Path

from pretrain.base import distributed
from pretrain.base.errors import ConfigError
from pretrain.config.schema import CheckpointSection
from pretrain.engine.checkpoint.folders import point
from pretrain.engine.checkpoint.layout import step_folder
from pretrain.engine.durable import write_error
from pretrain.engine.loop import Run
from pretrain.engine.run_folder import Best, read_best, write_best

LINK = "best"


class BestCheckpoint:
    """Remembers the best validation value of ``checkpoint.best``; ``RUN/best.json`` and ``checkpoints/best`` name it.

    A record of a step that the run has not reached (it resumed from an earlier checkpoint) does not count.
    """

    def __init__(self, run: Run) -> None:
        self._section: CheckpointSection = run.job.checkpoint
        self._value = -math.inf
        with distributed.synchronize_errors():
            record = read_best(run.dir) if self._section.best is not None else None
        if record is None or record.step > run.progress.step:
            return
        if (record.metric, record.mode) == (self._section.best, self._section.best_mode):
            self._value = self._signed(record.value)

    def is_improved(self, run: Run) -> bool:
        """Whether the validation of this very step is the best so far. The same on every rank.

        Raises:
            ConfigError: the validation does not report the metric.
        """
        if self._section.best is None or run.validated_at != run.progress.step:
            return False
        if self._section.best not in run.validation:
            raise ConfigError(
                f"checkpoint.best: validation reports no {self._section.best!r}; it reports "
                f"{', '.join(sorted(run.validation)) or 'nothing (there is no validation data)'}"
            )
        value = run.validation[self._section.best]
        return math.isfinite(value) and self._signed(value) > self._value

    def record(self, run: Run) -> None:
        """Call after the checkpoint of this step has been committed. Collective. Raises ``CheckpointError``."""
        assert self._section.best is not None
        value = run.validation[self._section.best]
        self._value = self._signed(value)
        best = Best(metric=self._section.best, mode=self._section.best_mode, value=value, step=run.progress.step)
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                try:
                    point(LINK, step_folder(run.dir, run.progress.step))
                    write_best(run.dir, best)
                except OSError as error:
                    raise write_error(run.dir / LINK, error) from error

    def _signed(self, value: float) -> float:
        return value if self._section.best_mode == "max" else -value


def best_checkpoint(run_dir: Path) -> Path | None:
    """The folder that ``checkpoints/best`` points to, if it is there."""
    link = run_dir / "checkpoints" / LINK
    return link.resolve() if link.is_symlink() and link.exists() else None
