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
from urllib.parse import quote, unquote

import pytest

from capt.pretrain.base import stores


@dataclass
class WebServer:
    """Requests to the server, and orders to it.

    Attributes:
        url: its address.
        faults: what becomes of the next answers: a status, or ``"cut"`` for half of the body.
        ranges: whether it answers ranges; else it sends whole files.
        lengths: whether it says how long a file is.
        moved: where the paths lead that are answered by a redirection.
        requests: method and range of each request.
    """

    url: str = ""
    faults: list[int | str] = field(default_factory=list)
    ranges: bool = True
    lengths: bool = True
    moved: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def web_server(folder: Path, *, certificate: Path | None = None) -> Iterator[WebServer]:
    """Serve a folder, and a page of its files; over TLS where ``certificate`` names one with its key."""
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
            name = unquote(self.path.partition("?")[0])
            path = folder / name.lstrip("/")
            if name in made.moved:
                self.send_response(302)
                self.send_header("Location", made.moved[name])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            page = "".join(f'<a href="{quote(file.name)}">x</a>' for file in folder.iterdir()) if name == "/" else ""
            if isinstance(fault, int) or not (page or path.is_file()):
                self.send_response(fault if isinstance(fault, int) else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content, found = page.encode() or path.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
            part = content[int(found[1]) : int(found[2]) + 1] if found and made.ranges else content
            self.send_response(206 if found and made.ranges else 200)
            if made.lengths:
                self.send_header("Content-Length", str(len(part)))
            else:
                self.close_connection = True
            if page or path.suffix == ".html":
                self.send_header("Content-Type", "text/html")
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
