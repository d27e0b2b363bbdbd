"""``run.callbacks.mlflow`` sends the run to an MLflow server, by default that of ``MLFLOW_TRACKING_URI``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pretrain.base.errors import ConfigError
from pretrain.engine.callbacks.tracking import Tracker, title
from pretrain.engine.loop import Run

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_\-. /]")
"""Characters that MLflow refuses in the name of a metric or parameter."""


class MLflow(Tracker):
    """Keeps one MLflow run for a run folder: the keys of the configuration are its parameters.

    Args:
        experiment: the MLflow experiment, which is made where it does not exist.
        tracking_uri: the server or folder. Credentials belong into ``MLFLOW_TRACKING_USERNAME`` and ``_PASSWORD``.
        name: the run's name; unset = that of the run folder.
    """

    key = "mlflow"

    def __init__(self, *, experiment: str, tracking_uri: str | None = None, name: str | None = None) -> None:
        super().__init__()
        self._experiment, self._uri, self._name = experiment, tracking_uri, name

    def start(self, run: Run, config: Mapping[str, Any], known: str | None) -> str:
        import mlflow

        try:
            if self._uri is not None:
                mlflow.set_tracking_uri(self._uri)
            mlflow.set_experiment(self._experiment)
            begun = mlflow.start_run(run_id=known, run_name=self._name or title(run), log_system_metrics=False)
            if known is None:  # parameters of an MLflow run cannot be changed
                mlflow.log_params({_name(key): value for key, value in config.items()})
        except mlflow.MlflowException as error:
            raise ConfigError(f"run.callbacks.mlflow: {error}") from error
        return str(begun.info.run_id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        import mlflow

        mlflow.log_metrics({_name(name): value for name, value in values.items()}, step=step, synchronous=False)

    def finish(self, *, done: bool, stopped: bool) -> None:
        import mlflow

        mlflow.flush_async_logging()
        mlflow.end_run("FINISHED" if done else "KILLED" if stopped else "FAILED")


def _name(text: str) -> str:
    return _NOT_IN_NAMES.sub("_", text)
