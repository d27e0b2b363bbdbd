"""A web server on the loopback that answers ranges, and lies where a test has it lie."""

from __future__ import annotations

import datetime
import ipaddress
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base import stores


@dataclass
class WebServer:
    """What the server did, and what it is to do.

    Attributes:
        url: its address.
        faults: what becomes of the next answers: a status, or ``"cut"`` for half of the body.
        ranges: whether it answers ranges; else it sends whole files.
        requests: method and range of each request.
    """

    url: str = ""
    faults: list[int | str] = field(default_factory=list)
    ranges: bool = True
    requests: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def web_server(folder: Path, *, certificate: Path | None = None) -> Iterator[WebServer]:
    """Serve a folder; over TLS where ``certificate`` names a file with a certificate and its key."""
    made = WebServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            wanted = self.headers.get("Range", "")
            made.requests.append((self.command, wanted))
            fault = made.faults.pop(0) if made.faults else None
            path = folder / self.path.lstrip("/")
            if isinstance(fault, int) or not path.is_file():
                self.send_response(fault if isinstance(fault, int) else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content, found = path.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
            part = content[int(found[1]) : int(found[2]) + 1] if found and made.ranges else content
            self.send_response(206 if found and made.ranges else 200)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(part[: len(part) // 2] if fault == "cut" else part)
            if fault == "cut":
                self.close_connection = True

        def log_message(self, format: str, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    made.url = f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stores, "_FIRST_PAUSE", 0.001)
            patch.setattr(stores, "ATTEMPTS", 3)
            yield made
    finally:
        server.shutdown()
        server.server_close()


def write_certificate(path: Path) -> Path:
    """Write a certificate of 127.0.0.1 that signs itself, with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(host, critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return path
