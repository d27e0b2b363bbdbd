"""Callbacks that send the figures of a run elsewhere: to MLflow, to Weights & Biases, and to a Prometheus server."""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

from pydantic import Field

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError, UserError, user_text
from capt.pretrain.base.files import read_json, write_json
from capt.pretrain.base.records import Record, parse_record
from capt.pretrain.base.sensitive import is_secret
from capt.pretrain.config import flat_keys
from capt.pretrain.engine import heartbeat
from capt.pretrain.engine.loop import NEVER, Callback, Run
from capt.pretrain.registry import METRICS_PORT, require_tracker

logger = logging.getLogger(__name__)


class _Identity(Record):
    """The content of ``RUN/<tracker>.json``, which says under what name the tracker knows the run."""

    id: str = Field(min_length=1, max_length=200)


class Tracker(Callback):
    """Sends the configuration and every logged row of metrics to a tracker, from rank 0 alone.

    ``RUN/<key>.json`` keeps the tracker's id of the run, so that a resumed run continues there. Configuration values
    that look like secrets are left out. A tracker that fails at a resume, or later, costs a warning.
    """

    key: ClassVar[str]
    """The key of ``run.callbacks``, which is also the name of the package that must be installed."""

    def __init__(self) -> None:
        self._open = self._ended = self._resumes = False

    def on_resume(self, run: Run, *, newest: bool) -> None:
        self._resumes = True

    def on_start(self, run: Run) -> None:
        with distributed.synchronize_errors(patient=True):  # a server that is down is asked for minutes
            if distributed.rank() == 0:
                # One that a resume has added is refused where it cannot begin.
                known = self._resumes and self._identity(run).exists()
                _begin(self.key, lambda: self._begin(run), resumes=known)

    def _identity(self, run: Run) -> Path:
        return run.dir / f"{self.key}.json"

    def _begin(self, run: Run) -> None:
        require_tracker(self.key)
        path = self._identity(run)
        known = parse_record(_Identity, read_json(path), path).id if path.exists() else None
        identity = self.start(run, _shown(run), known)
        # Open before its id is kept: where the file cannot be written, `close` still ends it at the tracker.
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
        """Call the tracker. An error is logged and does not end the run, whose rows are in ``metrics.jsonl``."""
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


def _begin(key: str, call: Callable[[], None], *, resumes: bool) -> None:
    """Begin to send figures. A run that is resumed trains without them, rather than end for what only watches it."""
    try:
        call()
    except (UserError, ImportError, OSError) as error:
        if not resumes:
            raise
        logger.warning("%s; the run continues without run.callbacks.%s", user_text(error) or error, key)


def title(run: Run) -> str:
    """Return what a run is called where nobody has named it: the last part of its folder."""
    return Path(run.dir).resolve().name


def _shown(run: Run) -> dict[str, Any]:
    """Return the configuration as dotted keys, without values that look like secrets."""
    flat = flat_keys(run.job)
    return {key: value for key, value in flat.items() if not is_secret(key.rpartition(".")[2], str(value))}


# ``run.callbacks.mlflow`` sends the run to an MLflow server, by default that of ``MLFLOW_TRACKING_URI``.


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


# ``run.callbacks.wandb`` sends the run to Weights & Biases. It needs ``wandb login``, or ``WANDB_MODE=offline``.


class WeightsAndBiases(Tracker):
    """Keeps one W&B run for a run folder. No code, console output, command line or host name is sent.

    A resumed run does some steps again; W&B keeps the rows that it has already.

    Args:
        project: the W&B project.
        entity: the W&B user or team; unset = the default of the login.
        name: the run's name; unset = that of the run folder.
    """

    key = "wandb"

    def __init__(self, *, project: str, entity: str | None = None, name: str | None = None) -> None:
        super().__init__()
        self._project, self._entity, self._name = project, entity, name

    def start(self, run: Run, config: Mapping[str, Any], known: str | None) -> str:
        import wandb

        quiet = wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_meta=True, silent=True)
        try:
            self._run: Any = wandb.init(
                project=self._project, entity=self._entity, name=self._name or title(run), dir=str(run.dir),
                config=dict(config), id=known, resume="allow" if known else None, settings=quiet,
            )  # fmt: skip
        except wandb.Error as error:
            raise ConfigError(f"run.callbacks.wandb: {error}") from error
        return str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, done: bool, stopped: bool) -> None:
        self._run.finish(exit_code=0 if done or stopped else 1)


_NOT_IN_GAUGES = re.compile(r"[^a-zA-Z0-9_]")


class Prometheus(Callback):
    """Rank 0 answers ``GET /metrics`` with a gauge for each number of the newest rows of ``metrics.jsonl``.

    ``loss/mlm`` is ``capt_loss_mlm``; rows of a split have the label ``split``. ``capt_section_seconds`` is how long
    rank 0 has been in the section that its label names (data, step, validation, save): it grows while the job hangs,
    for rank 0 then waits for the others. The format is Prometheus' text format 0.0.4. Nothing but numbers is served,
    and the server ends with the run.

    Args:
        port: of the server; 0 takes a free one, which the log names.
        host: the address to listen on. By default the loopback interface alone; ``0.0.0.0`` lets other hosts ask.
    """

    def __init__(self, *, port: int = METRICS_PORT, host: str = "127.0.0.1") -> None:
        self._host, self._port, self._resumes = host, port, False
        self._values: dict[tuple[str, str], float] = {}
        self._server: ThreadingHTTPServer | None = None

    def on_resume(self, run: Run, *, newest: bool) -> None:
        self._resumes = True

    def on_start(self, run: Run) -> None:
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                _begin("prometheus", self._serve, resumes=self._resumes)

    def _serve(self) -> None:
        self._server = self._listen()
        Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        address, port = self._server.server_address[:2]
        logger.info("metrics for Prometheus: http://%s:%s/metrics", str(address), port)

    def on_metrics(self, run: Run, values: Mapping[str, float], split: str | None) -> None:
        rows = {(name, split or ""): float(value) for name, value in values.items()}
        # a new mapping instead of a changed one: the thread of the server may be reading
        self._values = {**self._values, ("step", ""): float(run.progress.step), **rows}

    def next_due(self, run: Run) -> int:
        return NEVER

    def close(self, run: Run) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def text(self) -> str:
        """The figures in Prometheus' text format."""
        lines: list[str] = []
        known = ""
        # Sorted, so that a gauge has its TYPE line once, before the values of all its splits.
        for (name, split), value in sorted(self._values.items()):
            gauge = "capt_" + _NOT_IN_GAUGES.sub("_", name)
            if gauge != known:
                lines.append(f"# TYPE {gauge} gauge")
                known = gauge
            label = f'{{split="{_NOT_IN_GAUGES.sub("_", split)}"}}' if split else ""
            # Python writes inf and nan, the format Inf and NaN.
            lines.append(f"{gauge}{label} {str(value).replace('inf', 'Inf').replace('nan', 'NaN')}")
        section, seconds = heartbeat.current()
        lines += ["# TYPE capt_section_seconds gauge", f'capt_section_seconds{{section="{section}"}} {seconds:.3f}']
        return "\n".join([*lines, ""])

    def _listen(self) -> ThreadingHTTPServer:
        callback = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/metrics":
                    self.send_error(404, "only /metrics is served")
                    return
                body = callback.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Write nothing: a scrape every few seconds is no news."""

        try:
            return ThreadingHTTPServer((self._host, self._port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"run.callbacks.prometheus: {self._host}:{self._port} cannot be listened on ({reason}); "
                "choose another port, or 0 for a free one"
            ) from error
