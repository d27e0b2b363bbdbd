"""Text in a store: the same passages as from disk, whatever is between, and no secret anywhere."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import shutil
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fsspec.registry import _registry

from capt.pretrain.base import stores
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.stores import listed, without_secrets
from capt.pretrain.config.load import load_job
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.paths import held_out_files, resolve_files
from capt.pretrain.reliability import uploads
from tests.small_job import ROOT
from tests.unit.data import faulty
from tests.unit.data.faulty import FaultyStore, faulty_store

TEXTS = [f"Line {i} of the text, " + "with words " * (i % 50) for i in range(500)]


@pytest.fixture
def store() -> Iterator[type[FaultyStore]]:
    with faulty_store() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"text": text} for text in TEXTS]
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=100)
    return tmp_path


def test_text_in_a_store_reads_as_on_disk(
    folder: Path, store: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "CHUNK", 3000)
    monkeypatch.setattr(stores, "_SMALL", 2000)
    here = resolve_files([f"{folder}/*.*"], "data.files")
    there = resolve_files([f"faulty:/{folder}/*.*"], "data.files")
    assert [file.name for file in there] == ["a.txt", "b.jsonl.gz", "c.parquet"]
    corpus, local = FileCorpus(there, "text", None), FileCorpus(here, "text", None)
    store.faults = [faulty.server_error]
    assert list(corpus) == list(local)
    sizes = {file.name: file.stat().st_size for file in here if isinstance(file, Path)}
    for name in ("a.txt", "b.jsonl.gz"):  # a reader of lines asks for less at a time
        asked = store.requests.count(name) - (name == "a.txt")  # once more for the fault
        assert asked == -(-sizes[name] // 3000)
    assert corpus.size == local.size
    contents = corpus.contents()
    assert [part["format"] for part in contents] == [".txt", ".jsonl", ".parquet"]
    (folder / "a.txt").write_text((folder / "a.txt").read_text() + "!")
    again = FileCorpus(resolve_files([f"faulty:/{folder}/*.*"], "data.files"), "text", None).contents()
    assert [x["sha256"] == y["sha256"] for x, y in zip(contents, again, strict=True)] == [False, True, True]
    with pytest.raises(DataError, match=r"a\.txt: the file was replaced in the store while it was read; start again"):
        list(corpus)


def test_small_files_of_a_store_are_fetched_ahead_in_their_order(
    tmp_path: Path, store: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests run at a time, at most the number of files that may wait for their reader."""
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"text of {number}\n")
    running, most, lock = 0, 0, threading.Lock()
    read = FaultyStore.cat_file

    def slow(self: FaultyStore, path: str, **options: Any) -> bytes:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.01)
        content = read(self, path, **options)
        with lock:
            running -= 1
        return content

    monkeypatch.setattr(store, "cat_file", slow)
    monkeypatch.setattr(stores, "_SMALL_AHEAD", 5)
    files = resolve_files([f"faulty:/{tmp_path}/*.txt"], "data.files")
    passages = iter(FileCorpus(files, "text", None))
    assert next(passages).text == "text of 0"
    time.sleep(0.2)
    assert len(store.requests) <= 7, "more is fetched than may wait"
    assert [passage.text for passage in passages] == [f"text of {number}" for number in range(1, 40)]
    assert 1 < most <= 5
    assert sorted(store.requests) == sorted(file.name for file in files), "a file was fetched twice"


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (faulty.truncated, r"it gave [\d,]+ bytes, and not the [\d,]+ asked for"),
        (faulty.expired, "the store refuses access"),
        (faulty.replaced, "the file was replaced in the store while it was read"),
    ],
)
def test_a_store_that_lies_about_a_file_of_text_is_named(
    folder: Path, store: type[FaultyStore], monkeypatch: pytest.MonkeyPatch, small: int, fault: faulty.Fault, told: str
) -> None:
    """Files that are fetched ahead as a whole, and those that are read as they come."""
    monkeypatch.setattr(stores, "_SMALL", small)
    corpus = FileCorpus(resolve_files([f"faulty:/{folder}/a.txt"], "data.files"), "text", None)
    store.faults = [fault] * 9
    with pytest.raises(DataError, match=rf"a\.txt.*{told}"):
        list(corpus)


def test_what_is_not_there(folder: Path, store: type[FaultyStore]) -> None:
    url = f"faulty:/{folder}"
    with pytest.raises(DataError, match=f"{url}/x.txt does not exist in the store"):
        resolve_files([f"{url}/x.txt"], "data.files")
    with pytest.raises(DataError, match=r"\*\.raw: no file of the store matches"):
        resolve_files([f"{url}/*.raw"], "data.files")
    with pytest.raises(DataError, match=r"is a folder of the store; name its files"):
        resolve_files([url], "data.files")
    with pytest.raises(DataError, match=r"data.files: .*a.txt is named twice"):
        resolve_files([f"{url}/a.txt", f"{url}/*.txt"], "data.files")
    train = listed(f"{url}/a.txt")
    with pytest.raises(DataError, match=r"a.txt is training text too"):
        held_out_files([f"{url}/*.txt"], list(train))
    (folder / "bad.txt").write_bytes(b"good\nbad \xff\n")
    with pytest.raises(DataError, match=r"bad\.txt, line 2: not UTF-8 text \(byte 0xff\) at byte 9"):
        list(FileCorpus(resolve_files([f"{url}/bad.txt"], "data.files"), "text", None))


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAABCDEFGH:hunter2@bucket/x.txt",
        "https://user:hunter2@host/x.txt",
        "https://host/x.txt?X-Amz-Signature=hunter2",
        "https://host/x.txt?sv=1&sig=hunter2",
        "gs://bucket/x.txt?token=hunter2",
    ],
)
@pytest.mark.parametrize("key", ["data.files", "data.shards", "run.dir", "data.cache"])
def test_an_address_with_a_secret_is_refused_and_not_shown(url: str, key: str) -> None:
    value = f"[{url}]" if key == "data.files" else url
    with pytest.raises(ConfigError) as error:
        load_job("capt_tiny", [f"{key}={value}"])
    assert key in str(error.value)
    assert "hunter2" not in str(error.value)
    assert "hunter2" not in without_secrets(f"a message about {url} and more")


def test_addresses_of_a_job() -> None:
    job = load_job("capt_tiny", ["data.files=[s3://b/*.txt,here.txt]", "data.cache_bytes=1.5 GB"])
    assert job.data.files == ["s3://b/*.txt", "here.txt"]
    assert job.data.cache_bytes == 1_500_000_000
    assert load_job("capt_tiny", ["data.shards=hf://datasets/u/n"]).data.shards == "hf://datasets/u/n"
    assert load_job("capt_tiny", ["data.shards=folder"]).data.shards == Path("folder")
    for url, told in (("ftp://b/x.txt", "unknown store; known: s3://"), ("s3:///", "names no file")):
        with pytest.raises(ConfigError, match=told):
            load_job("capt_tiny", [f"data.files=[{url}]"])


def test_the_container_of_an_azure_address_is_no_user() -> None:
    url = "abfs://box@account.dfs.core.windows.net/a?.txt"
    assert load_job("capt_tiny", [f"data.files={url}"]).data.files == [url]
    assert without_secrets(f"{url} s3://u@b/*?.txt https://h/x?y=1") == f"{url} s3://b/*?.txt https://h/x"
    for bad in ("abfs://box:hunter2@account.dfs.core.windows.net/x", f"{url}?sig=hunter2", "s3" + url[4:]):
        with pytest.raises(ConfigError, match="holds a user, a password or a signature"):
            load_job("capt_tiny", [f"data.files={bad}"])
        assert "hunter2" not in without_secrets(bad)
    assert stores._address(url, "box/a/b.txt") == "abfs://box@account.dfs.core.windows.net/a/b.txt"


@pytest.mark.parametrize("scheme", ["https", "hf"])
def test_checkpoints_are_not_copied_to_what_is_only_read(scheme: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.upload: .*cannot be written to; known: s3://"):
        load_job("capt_tiny", [f"checkpoint.upload={scheme}://a/b/c"])


def test_a_folder_whose_first_file_comes_while_it_is_listed_is_empty(
    store: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3fs answers so: there was no file, and then it looks whether the folder is one."""
    monkeypatch.setattr(
        store, "find", lambda self, path, detail: {path: {"name": path, "size": 0, "type": "directory"}}
    )
    assert stores.tree("faulty://bucket/folder") == []


@pytest.mark.parametrize("scheme", sorted(stores.STORES))
def test_a_package_that_is_missing_is_named(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra = stores.STORES[scheme]
    for module in (package, "fsspec.implementations.http"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(_registry, scheme, raising=False)
    told = rf"{scheme}://c/x: the package {package} is not installed: pip install '\.\[{extra}\]'"
    with pytest.raises(DataError, match=told):
        listed(f"{scheme}://c/x")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(line.startswith(f"{package}>=") for line in extras[extra])


@pytest.mark.parametrize("job", ["capt_pairs", "ace/skipgram"])
def test_tasks_that_read_no_store_refuse_its_addresses(job: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.files\.0: 's3://b/x.txt': is a URL"):
        load_job(job, ["data.files=[s3://b/x.txt]"])


def test_a_tree_that_is_one_file(store: type[FaultyStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """adlfs answers with a list of the name alone."""
    (tmp_path / "manifest.json").write_text("{}")
    url = f"faulty:/{tmp_path}/manifest.json"
    monkeypatch.setattr(store, "find", lambda self, path, detail: [path] if Path(path).exists() else [])
    assert [(file.url, file.size) for file in stores.tree(url)] == [(url, 2)]
    stores.remove_tree(url)
    assert stores.tree(url) == []


class _AnswerError(Exception):
    """An answer of Azure, which says its status under a name of its own."""

    def __init__(self, status: int) -> None:
        super().__init__(f"The words.\nRequestId:1b\nTime:now Content: <xml {status}>")
        self.status_code = status


class CredentialUnavailableError(Exception):
    """Named as that of azure-identity."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (_AnswerError(403), r"the store refuses access \(_AnswerError: The words\.\); the credentials of this host"),
        (_AnswerError(416), r"could not be read: _AnswerError: The words\.$"),
        (CredentialUnavailableError("none"), "the store refuses access"),
        (OSError("Forbidden: https://storage/b/o\nno permission"), "the store refuses access"),
        (ValueError("unable to connect: provide an account_name with credentials!!"), "the store refuses access"),
        (ValueError("Bad Request: the bucket is requester pays"), "could not be read: ValueError: Bad Request"),
    ],
)
def test_what_no_repetition_can_mend_is_told_at_once(
    error: Exception, told: str, store: type[FaultyStore], folder: Path
) -> None:
    def fail(path: str, content: bytes) -> bytes:
        raise error

    store.faults = [fail]
    with pytest.raises(DataError, match=told):
        stores.read_range(stores.look_up(f"faulty:/{folder}/a.txt"), 0, 3)
    assert store.requests == ["a.txt"]


def test_what_may_pass_is_tried_again_and_nothing_else(
    store: type[FaultyStore], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores.time, "sleep", lambda _: None)
    file = stores.look_up(f"faulty:/{folder}/a.txt")
    of_host = [(errno.errorcode[number], OSError(number, "words")) for number in errno.errorcode]
    answers = [(str(status), _AnswerError(status)) for status in range(400, 512)]
    passing = {"408", "409", "423", "425", "429", "500", "502", "503", "504", "EIO", "EAGAIN", "ECONNRESET", "EBUSY"}
    lasting = {"400", "401", "403", "404", "405", "410", "413", "416", "422", "ENOENT", "EACCES", "ENOTDIR", "EISDIR"}
    for name, error in [*of_host, *answers, ("NotImplemented", NotImplementedError("no ranges"))]:

        def fail(path: str, content: bytes, error: Exception = error) -> bytes:
            raise error

        store.faults, store.requests[:] = [fail] * stores.ATTEMPTS, []
        with pytest.raises(DataError) as given_up:
            stores.read_range(file, 0, 3)
        assert len(store.requests) == (stores.ATTEMPTS if given_up.value.passing else 1), name
        assert given_up.value.passing or name not in passing, name
        assert not given_up.value.passing or name not in lasting, name


@pytest.mark.parametrize("name", ["none.txt", "a.txt/below", "x" * 300, "", "a.txt\0"])
def test_a_file_of_this_host_that_cannot_be_read_is_tried_once(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores.time, "sleep", lambda _: pytest.fail("tried again"))
    with pytest.raises(DataError) as error:
        stores.read_range(stores.StoreFile(f"file://{folder}/{name}", 10, ""), 0, 10)
    assert not error.value.passing
    with pytest.raises(DataError):
        stores.put_bytes(b"x", f"file://{folder}/a.txt/{name or 'below'}")


@pytest.mark.parametrize("error", [FileNotFoundError("bucket"), _AnswerError(404)])
def test_a_bucket_that_is_missing_is_named(
    error: Exception, store: type[FaultyStore], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise error

    for name in ("put_file", "pipe_file"):
        monkeypatch.setattr(store, name, fail)
    told = "faulty://b/x could not be written: the store has no bucket or container of that name"
    with pytest.raises(DataError, match=told):
        stores.put_bytes(b"1", "faulty://b/x")
    with pytest.raises(DataError, match=told):
        stores.put_file(folder / "a.txt", "faulty://b/x")


def test_headers_of_requests_are_not_logged(
    store: type[FaultyStore], folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("azure", "gcsfs"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    caplog.set_level(logging.INFO)
    stores.look_up(f"faulty:/{folder}/a.txt")
    logging.getLogger("azure.core.pipeline.policies.http_logging_policy").info("Request headers: hunter2")
    logging.getLogger("gcsfs").error("non-retriable exception")
    assert caplog.records == []


def test_a_checkpoint_that_goes_while_it_is_copied_goes_from_the_store_too(
    store: type[FaultyStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file, order = uploads.put_file, []

    def put(path: Path, url: str) -> None:
        put_file(path, url)
        order.append(path.name)
        if url.endswith("step-00000003/manifest.json"):
            shutil.rmtree(path.parent)

    monkeypatch.setattr(uploads, "put_file", put)
    copier = uploads.Uploads()
    copier._url = f"faulty:/{tmp_path}/there"
    for step in (3, 6):
        folder = tmp_path / "run" / uploads._name(step)
        folder.mkdir(parents=True)
        for name in ("manifest.json", "weights.bin"):
            (folder / name).write_text("{}")
        copier._begin(tmp_path / "run", uploads._name(step))
        assert copier._thread is not None
        copier._thread.join()
    assert list(uploads._complete(copier._url)) == [6]
    assert order == 2 * ["weights.bin", "manifest.json"], "what has a manifest is whole"
