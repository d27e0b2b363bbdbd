"""``run.callbacks.prometheus`` serves the newest figures of the run to a Prometheus server, as text over HTTP."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.engine import heartbeat
from capt.pretrain.engine.loop import NEVER, Callback, Run

logger = logging.getLogger(__name__)

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


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

    def __init__(self, *, port: int = 9400, host: str = "127.0.0.1") -> None:
        self._host, self._port = host, port
        self._values: dict[tuple[str, str], float] = {}
        self._server: ThreadingHTTPServer | None = None

    def on_start(self, run: Run) -> None:
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
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
        for (name, split), value in sorted(self._values.items()):
            gauge = "capt_" + _NOT_IN_NAMES.sub("_", name)
            if gauge != known:
                lines.append(f"# TYPE {gauge} gauge")
                known = gauge
            label = f'{{split="{_NOT_IN_NAMES.sub("_", split)}"}}' if split else ""
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
