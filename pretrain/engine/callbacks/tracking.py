"""The base class of the callbacks that send a run to an experiment tracker is here."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from pretrain.base import distributed
from pretrain.base.files import read_json, write_json
from pretrain.base.records import Record, parse_record
from pretrain.base.sensitive import is_secret
from pretrain.config import flatten
from pretrain.engine.loop import NEVER, Callback, Run
from pretrain.registry import require_tracker

logger = logging.getLogger(__name__)


class _Identity(Record):
    """The content of ``RUN/<tracker>.json``, which says under what name the tracker knows the run."""

    id: str = Field(min_length=1, max_length=200)


class Tracker(Callback):
    """Sends the configuration and every logged row of metrics to a tracker, from rank 0 alone.

    ``RUN/<key>.json`` keeps the tracker's id of the run, so that a resumed run continues there. Configuration values
    that look like secrets are left out. A tracker that fails while the run continues costs a warning.
    """

    key: ClassVar[str]
    """The key of ``run.callbacks``, which is also the name of the package that must be installed."""

    def __init__(self) -> None:
        require_tracker(self.key)
        self._open = False
        self._ended = False

    def on_start(self, run: Run) -> None:
        with distributed.synchronize_errors(patient=True):  # a server that is down is asked for minutes
            if distributed.rank() == 0:
                path = run.dir / f"{self.key}.json"
                known = parse_record(_Identity, read_json(path), path).id if path.exists() else None
                identity = self.start(run, _shown(run), known)
                self._open = True
                write_json(path, {"id": identity})

    def on_metrics(self, run: Run, values: Mapping[str, float], split: str | None) -> None:
        if self._open:
            row = {f"{split}/{name}" if split else name: value for name, value in values.items()}
            self._tell(lambda: self.log(row, run.progress.step))

    def next_due(self, run: Run) -> int:
        return NEVER

    def on_end(self, run: Run) -> None:
        self._ended = True

    def close(self, run: Run) -> None:
        if self._open:
            self._open = False
            done, stopped = self._ended and run.finished, self._ended and not run.finished
            self._tell(lambda: self.finish(done=done, stopped=stopped))

    def _tell(self, call: Callable[[], None]) -> None:
        """Nothing that goes wrong at the tracker ends the run, whose rows are in ``metrics.jsonl``."""
        try:
            call()
        except Exception as error:
            logger.warning("run.callbacks.%s: not sent: %s: %s", self.key, type(error).__name__, error)

    @abstractmethod
    def start(self, run: Run, config: Mapping[str, Any], known: str | None) -> str:
        """Begin a run at the tracker, or continue the run ``known``; return its id. Raises ``ConfigError``."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send a row of metrics. Called on rank 0."""

    @abstractmethod
    def finish(self, *, done: bool, stopped: bool) -> None:
        """Send what is left and end: all steps are ``done``, the run has ``stopped`` early, or (neither) it failed."""


def title(run: Run) -> str:
    """Return what a run is called where nobody has named it: the last part of its folder."""
    return Path(run.dir).resolve().name


def _shown(run: Run) -> dict[str, Any]:
    """Return the configuration as dotted keys, without values that look like secrets."""
    flat = flatten(run.job.model_dump(mode="json", by_alias=True))
    return {key: value for key, value in flat.items() if not is_secret(key.rpartition(".")[2], str(value))}
