"""The base class of the callbacks that send a run to an experiment tracker is here."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from pretrain.base.errors import ConfigError
from pretrain.base.files import read_json, write_json
from pretrain.base.records import Record, parse_record
from pretrain.base.sensitive import is_secret
from pretrain.config import flatten
from pretrain.engine import distributed
from pretrain.engine.loop import NEVER, Callback, Run


class _Identity(Record):
    """The content of ``RUN/<tracker>.json``, which says under what name the tracker knows the run."""

    id: str = Field(min_length=1, max_length=200)


class Tracker(Callback):
    """Sends the configuration and every logged row of metrics to a tracker, from rank 0 alone.

    ``RUN/<key>.json`` keeps the tracker's id of the run, so that a resumed run continues there. Configuration values
    that look like secrets are left out.
    """

    key: ClassVar[str]
    """The key of ``run.callbacks``, which is also the name of the package that must be installed."""

    def __init__(self) -> None:
        if importlib.util.find_spec(self.key) is None:
            raise ConfigError(
                f"run.callbacks.{self.key}: the package {self.key} is not installed; "
                "pip install 'capt-pretraining[track]', or remove the key"
            )
        self._open = False
        self._ended = False

    def on_start(self, run: Run) -> None:
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                path = run.dir / f"{self.key}.json"
                known = parse_record(_Identity, read_json(path), path).id if path.exists() else None
                identity = self.start(run, _shown(run), known)
                self._open = True
                write_json(path, {"id": identity})

    def on_metrics(self, run: Run, values: Mapping[str, float], split: str | None) -> None:
        if self._open:
            self.log({f"{split}/{name}" if split else name: value for name, value in values.items()}, run.progress.step)

    def next_due(self, run: Run) -> int:
        return NEVER

    def on_end(self, run: Run) -> None:
        self._ended = True

    def close(self, run: Run) -> None:
        if self._open:
            self._open = False
            self.finish(done=self._ended and run.finished, stopped=self._ended and not run.finished)

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
