"""The hub's API for one data set, ``datasets/user/set``, on the loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
from huggingface_hub import constants

from capt.pretrain.base import stores


@dataclass
class Hub:
    """Files of the hub, and its requests.

    Attributes:
        revisions: the files of each revision, by their names.
        refused: whether files are not given to this user.
        requests: method, path and bytes of the answer of each request.
    """

    revisions: dict[str, dict[str, bytes]]
    refused: bool = False
    requests: list[tuple[str, str, int]] = field(default_factory=list)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": name}


def _tree(files: dict[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    begin = f"{folder}/" if folder else ""
    inner = {name: content for name, content in files.items() if name.startswith(begin)}
    here = [_entry(name, each) for name, each in inner.items() if recursive or "/" not in name.removeprefix(begin)]
    folders = {name.removeprefix(begin).partition("/")[0] for name in inner if "/" in name.removeprefix(begin)}
    return here + [{"type": "directory", "oid": "0" * 40, "size": 0, "path": f"{begin}{name}"} for name in folders]


@contextmanager
def hub_server(revisions: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """Serve the data set; ``hf://`` leads there."""
    made = Hub(revisions)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def send(self, code: int, value: Any, error: str = "") -> None:
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            made.requests.append((self.command, self.path.partition("?")[0], len(body)))
            self.send_response(code)
            if error:
                self.send_header("X-Error-Code", error)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            given = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, _, query = self.path.partition("?")
            words = [unquote(word) for word in path.strip("/").split("/")]
            if words[:4] == ["api", "datasets", "user", "set"]:
                self.ask(words[4:], parse_qs(query), given)
            elif words[:4] == ["datasets", "user", "set", "resolve"]:
                self.give(words[4], "/".join(words[5:]))
            else:
                self.send(401, {}, "RepoNotFound")

        do_POST = do_GET  # noqa: N815 (a name of the library)

        def ask(self, words: list[str], query: dict[str, list[str]], given: bytes) -> None:
            what, revision = words[0] if words else "revision", words[1] if len(words) > 1 else "main"
            files = made.revisions.get(revision)
            if files is None:
                self.send(404, {}, "RevisionNotFound")
            elif what == "revision":
                self.send(200, {"id": "user/set", "sha": "0" * 40, "private": False, "tags": [], "siblings": []})
            elif what == "tree":
                found = _tree(files, "/".join(words[2:]), recursive=query.get("recursive", [""])[0].lower() == "true")
                self.send(200 if found else 404, found or {}, "" if found else "EntryNotFound")
            else:
                names = json.loads(given)["paths"] if given.startswith(b"{") else parse_qs(given.decode())["paths"]
                folders = [each for each in _tree(files, "", recursive=False) if each["type"] == "directory"]
                known = {name: _entry(name, content) for name, content in files.items()}
                known |= {each["path"]: each for each in folders}
                self.send(200, [known[name] for name in names if name in known])

        def give(self, revision: str, name: str) -> None:
            content = made.revisions.get(revision, {}).get(name)
            if made.refused or content is None:
                self.send(403 if made.refused else 404, b"", "GatedRepo" if made.refused else "EntryNotFound")
                return
            begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
            self.send(206, content[int(begin) : int(end) + 1])

        def log_message(self, format: str, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            url = f"http://127.0.0.1:{server.server_port}"
            patch.setattr(constants, "ENDPOINT", url)
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            patch.setattr(stores, "_FIRST_PAUSE", 0.001)
            stores._hub.cache_clear()
            yield made
    finally:
        stores._hub.cache_clear()
        server.shutdown()
        server.server_close()
