"""A proxy on the loopback that spoils answers of the server behind it."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Proxy:
    """Orders to the proxy.

    Attributes:
        port: where it listens.
        faults: what becomes of the next answers: a status, ``"cut"`` for half of the body, or seconds that it takes.
    """

    port: int = 0
    faults: list[int | str | float] = field(default_factory=list)


@contextmanager
def proxy_of(port: int) -> Iterator[Proxy]:
    """A proxy of the server at a port of this host."""
    made = Proxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = made.faults.pop(0) if made.faults else None
            if isinstance(fault, int):
                self.send_response(fault)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if isinstance(fault, float):
                time.sleep(fault)
            server = http.client.HTTPConnection("127.0.0.1", port)
            server.request(self.command, self.path, body, dict(self.headers.items()))
            answer = server.getresponse()
            content = answer.read()
            server.close()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)
            self.close_connection = fault == "cut"

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _pass_on  # noqa: N815 (names of the library)

        def log_message(self, format: str, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
