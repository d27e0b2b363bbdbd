"""Text, shards and vectors on a web server: ranges are read, and a server that lies or fails is not believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from capt.pretrain.base import stores
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.base.stores import MissingError, chunks, exists, look_up, read_small
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.paths import resolve_files
from capt.pretrain.data.shards import ShardSet
from capt.pretrain.retrieval import bucket as vectors
from capt.pretrain.retrieval.bucket import BucketVectors
from capt.pretrain.retrieval.store import VectorIdentity
from tests.unit.data.faulty import faulty_store
from tests.unit.data.test_shards import build
from tests.unit.data.web import WebServer, web_server, write_certificate

pytest.importorskip("aiohttp")
CONTENT = bytes(np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "file").write_bytes(CONTENT)
    with web_server(tmp_path) as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "CHUNK", 9000)
        patch.setattr(stores, "_SMALL", 3000)
        yield made


@pytest.mark.parametrize(
    ("faults", "ranges"),
    [([], True), ([503, 500, 429], True), ([None, "cut", 500, "cut"], True), ([], False), ([None, "cut"], False)],
)
def test_a_file_is_whole_or_asked_for_again(faults: list[int | str], ranges: bool, server: WebServer) -> None:
    server.faults, server.ranges = list(faults), ranges
    assert b"".join(chunks(look_up(f"{server.url}/file"))) == CONTENT
    asked = {wanted for method, wanted in server.requests if method == "GET" and wanted}
    assert asked == {f"bytes={begin}-{min(begin + 9000, 50_000) - 1}" for begin in range(0, 50_000, 9000)}


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (404, "does not exist in the store"),
        (410, "does not exist in the store"),
        (401, "the store refuses access"),
        (403, "the store refuses access"),
        (503, "could not be looked up in 3 attempts"),
    ],
)
def test_an_answer_is_called_what_it_is(status: int, says: str, server: WebServer) -> None:
    """fsspec takes each of them for a missing file, and a set would be taken for one without validation text."""
    server.faults = [status] * 20
    if status in (404, 410):
        assert not exists(f"{server.url}/file")
    else:
        with pytest.raises(DataError, match=says) as caught:
            exists(f"{server.url}/file")
        assert not isinstance(caught.value, MissingError)
    with pytest.raises(DataError, match=says):
        look_up(f"{server.url}/file")


def test_a_server_that_is_not_there(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"looked up in 3 attempts: ClientConnectorError.*refused|Connect call failed"):
        look_up("http://127.0.0.1:9/file")


def test_a_file_that_is_replaced_while_it_is_read(server: WebServer, tmp_path: Path) -> None:
    parts = chunks(look_up(f"{server.url}/file"))
    next(parts)
    (tmp_path / "file").write_bytes(CONTENT[::-1])
    with pytest.raises(DataError, match="replaced in the store while it was read; start again"):
        list(parts)


def test_text_reads_as_on_disk(server: WebServer, tmp_path: Path) -> None:
    rows = [{"text": f"Row {i} of the table, " + "with words " * (i % 50)} for i in range(300)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=100)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server.faults = [500, "cut"]
    there = resolve_files([f"{server.url}/{name}" for name in ("b.jsonl", "c.parquet")], "data.files")
    here = resolve_files([str(tmp_path / name) for name in ("b.jsonl", "c.parquet")], "data.files")
    assert list(FileCorpus(there, "text", None)) == list(FileCorpus(here, "text", None))


NAMES = {name: name for name in ("a b", "c#1", "[x]", "x", "\u00fc\u65e5")}
NAMES |= {"a%20b": "a b", "what%3F": "what?", "50%25": "50%", "d%2520e": "d%20e"}
"""Addresses, and the names of their files."""


def texts(*urls: str) -> list[str]:
    return [passage.text for passage in FileCorpus(resolve_files(urls, "data.files"), "text", None)]


def test_names_in_addresses(server: WebServer, tmp_path: Path) -> None:
    for name in {*NAMES.values()}:
        (tmp_path / f"{name}.txt").write_text(f"This is {name}.\n")
    for address, name in NAMES.items():
        assert texts(f"{server.url}/{address}.txt") == [f"This is {name}."]
    assert texts(f"{server.url}/x.txt?download=true") == ["This is x."]
    assert sorted(texts(f"{server.url}/*.txt")) == sorted(f"This is {name}." for name in {*NAMES.values()})


def test_a_redirection_is_followed_and_its_signature_not_shown(
    server: WebServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("This is a.\n")
    (tmp_path / "login.html").write_text("Who are you?\n")
    server.moved = {f"/{name}.txt": "/a.txt?X-Amz-Signature=hunter2" for name in ("moved", "refused", "failing")}
    server.moved |= {"/again.txt": "/again.txt?sig=hunter2", "/secret.txt": "/login.html"}
    assert texts(f"{server.url}/moved.txt") == ["This is a."]
    for name, faults, told in (
        ("refused", [403] * 20, "the store refuses access"),
        ("failing", [500] * 20, "in 3 attempts: .*Internal Server Error"),
        ("again", [], "again.txt could not be looked up: TooManyRedirects"),
        ("secret", [], r"secret\.txt leads to a web page, \S+/login\.html, as where a login is needed: download"),
    ):
        server.faults = [*faults]
        with pytest.raises(DataError, match=told) as caught:
            texts(f"{server.url}/{name}.txt")
        assert "hunter2" not in str(caught.value)
    assert "hunter2" not in caplog.text


def test_a_server_that_says_or_gives_too_little(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("Some words.\n\n" * 4000)
    monkeypatch.setattr(stores, "_MOST_WHOLE", 60_000)
    server.ranges = False
    assert len(texts(f"{server.url}/a.txt")) == 4000
    monkeypatch.setattr(stores, "_MOST_WHOLE", 40_000)
    with pytest.raises(DataError, match=r"the server sends no parts of a file, and 52,000 bytes .*download it, or use"):
        texts(f"{server.url}/a.txt")
    server.lengths = False
    with pytest.raises(DataError, match=r"a\.txt: the server does not say how long the file is; download it"):
        texts(f"{server.url}/a.txt")


def test_shards_read_as_on_disk_and_other_bytes_are_refused(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "CHUNK", 15_000)
    local = build(tmp_path / "set")
    there = ShardSet.open_url(f"{server.url}/set", tmp_path / "cache", 1 << 30, at_once=None, check=True)
    np.testing.assert_array_equal(there.read(5, 31_000), local.read(5, 31_000))
    (first, *_) = sorted((tmp_path / "set").glob("shard-*.bin"))
    first.write_bytes(bytes(first.stat().st_size))
    with pytest.raises(DataError, match=rf"{first.name}: expected SHA-256 .* changed or damaged"):
        ShardSet.open_url(f"{server.url}/set", tmp_path / "other", 1 << 30, at_once=None, check=True)


def test_vectors_are_read_by_their_list_and_not_written(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = VectorIdentity("m", "t", "p", 32, "mean", 3)
    rows, names = np.arange(6, dtype=np.float32).reshape(2, 3), [text_hash("a"), text_hash("b")]
    with faulty_store():
        monkeypatch.setattr(vectors, "WRITABLE", ("faulty",))
        made = BucketVectors(f"faulty:/{tmp_path}/vectors", identity, tmp_path / "first", 1 << 20)
        made.add(names, rows)
        made.close()
        made.reload()
        made.finish(2)
    there = BucketVectors(f"{server.url}/vectors", identity, tmp_path / "cache", 1 << 20)
    assert (there.vectors(names) == rows).all()
    assert len(BucketVectors(f"{server.url}/none", identity, tmp_path / "cache", 1 << 20)) == 0
    with pytest.raises(DataError, match=r"a text has no vector there, and http:// is only read; encode into"):
        there.add([text_hash("c")], rows[:1])
    (tmp_path / "vectors" / identity.key / "index.json").write_text("[]")
    with pytest.raises(DataError, match=r"index\.json is no list of blocks"):
        BucketVectors(f"{server.url}/vectors", identity, tmp_path / "cache", 1 << 20)


def test_a_certificate_is_checked(tmp_path: Path) -> None:
    """A self-signed one is refused immediately; one that ``SSL_CERT_FILE`` names is trusted."""
    pytest.importorskip("cryptography")
    certificate = write_certificate(tmp_path / "certificate.pem")
    (tmp_path / "file").write_bytes(CONTENT)
    with web_server(tmp_path, certificate=certificate) as server:
        with pytest.raises(DataError, match=r"could not be looked up: ClientConnectorCertificateError.*self.signed"):
            read_small(f"{server.url}/file")
        code = f"from capt.pretrain.base.stores import *; print(len(read_small({server.url + '/file'!r})))"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "SSL_CERT_FILE": str(certificate)}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        assert done.stdout.split() == [str(len(CONTENT))]
