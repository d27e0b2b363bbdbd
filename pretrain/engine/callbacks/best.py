"""Which checkpoint is the best one by a validation metric, and the link and record that say so."""

from __future__ import annotations

import json
import math
from pathlib import Path

from pretrain.config.schema import CheckpointSection
from pretrain.engine import distributed
from pretrain.engine.checkpoint.layout import step_folder
from pretrain.engine.checkpoint.save import point
from pretrain.engine.loop import Run
from pretrain.engine.safe_files import write_json
from tokenizer.errors import ConfigError

RECORD = "best.json"
LINK = "best"


class BestCheckpoint:
    """Remembers the best validation value of ``checkpoint.best``; ``RUN/best.json`` and ``checkpoints/best`` name it.

    A record of a step that the run has not reached (it resumed from an earlier checkpoint) does not count.
    """

    def __init__(self, run: Run) -> None:
        self._section: CheckpointSection = run.job.checkpoint
        self._value = -math.inf
        path = run.dir / RECORD
        if self._section.best is None or not path.is_file():
            return
        record = json.loads(path.read_text())
        same = (record["metric"], record["mode"]) == (self._section.best, self._section.best_mode)
        if same and record["step"] <= run.progress.step:
            self._value = self._signed(record["value"])

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
        return self._signed(run.validation[self._section.best]) > self._value

    def record(self, run: Run) -> None:
        """Call after the checkpoint of this step has been committed."""
        assert self._section.best is not None
        value = run.validation[self._section.best]
        self._value = self._signed(value)
        if distributed.rank() == 0:
            point(LINK, step_folder(run.dir, run.progress.step))
            mode = self._section.best_mode
            record = {"metric": self._section.best, "mode": mode, "value": value, "step": run.progress.step}
            write_json(run.dir / RECORD, record)

    def _signed(self, value: float) -> float:
        return value if self._section.best_mode == "max" else -value


def best_checkpoint(run_dir: Path) -> Path | None:
    """The folder that ``checkpoints/best`` points to, if it is there."""
    link = run_dir / "checkpoints" / LINK
    return link.resolve() if link.is_symlink() and link.exists() else None
