"""Azure's and Google's stores, by their emulators on the loopback: files, faults of the store, and checkpoints.

Azurite (``npm install -g azurite``) for ``az://``, gcp-storage-emulator (``pip install gcp-storage-emulator``, in an
environment of its own) for ``gs://``; both are looked for on ``PATH``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from capt.pretrain.base import stores
from capt.pretrain.base.errors import DataError
from capt.pretrain.data.config import DataConfig
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.paths import resolve_files
from capt.pretrain.data.prepare import prepare_folder
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.regions.writer import write_store
from tests.families.pictures.regions.pictures import random_pictures
from tests.support import free_port
from tests.unit.data.doubles import ByteTokenizer
from tests.unit.data.proxy import Proxy, proxy_of
from tests.unit.data.test_object_names import check_names

pytestmark = pytest.mark.filterwarnings("default")  # those of the stores' packages are not ours

_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's, public
_PACKAGES = {"az": ("adlfs", "azurite-blob"), "gs": ("gcsfs", "gcp-storage-emulator")}


def _azure(port: int, key: str = _KEY) -> str:
    where = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    return f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={key};BlobEndpoint={where};"


class Bucket(NamedTuple):
    """The address of a new bucket or container, and the proxy through which its server is reached."""

    url: str
    proxy: Proxy


@pytest.fixture(scope="module", params=sorted(_PACKAGES))
def behind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """A bucket; its server and credentials are in the environment."""
    scheme: str = request.param
    package, program = _PACKAGES[scheme]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if (found := shutil.which(program)) is None:
        pytest.skip(f"{program} is not on PATH")
    port, data = free_port(), str(tmp_path_factory.mktemp("emulator"))
    if scheme == "az":
        command = ["--silent", "--skipApiVersionCheck", "--location", data, "--blobPort", str(port)]
    else:
        command = ["-d", data, "start", "--host", "127.0.0.1", "--port", str(port), "--default-bucket", "box"]
    server = subprocess.Popen([found, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with proxy_of(port) as proxy, pytest.MonkeyPatch.context() as patch:
            patch.setattr(stores, "_FIRST_PAUSE", 0.01)
            patch.setenv("AZURE_STORAGE_CONNECTION_STRING", _azure(proxy.port))
            patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{proxy.port}")
            import fsspec

            if scheme == "gs":
                patch.setattr("gcsfs.retry.min", lambda *_: 0.01, raising=False)  # the pauses of its own repetitions
            until = time.monotonic() + 60
            while True:
                try:
                    file_system = fsspec.filesystem(scheme, use_listings_cache=False)
                    if scheme == "az":
                        file_system.mkdir("box")
                    file_system.pipe_file("box/up", b"1")
                    break
                except Exception:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.2)
            yield Bucket(f"{scheme}://box", proxy)
            fsspec.get_filesystem_class(scheme).clear_instance_cache()
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def bucket(behind: Bucket) -> str:
    """The address of the bucket."""
    return behind.url


def test_files(bucket: str, tmp_path: Path) -> None:
    content = os.urandom(stores.CHUNK * 2 + 5)
    (tmp_path / "big").write_bytes(content)
    url = f"{bucket}/files/a b+%41é"
    stores.put_file(tmp_path / "big", f"{url}/big")
    stores.put_bytes(b"", f"{url}/empty")
    big, empty = stores.tree(url)
    assert (big.url, big.size, empty.size) == (f"{url}/big", len(content), 0)
    assert stores.look_up(big.url) == big
    assert stores.listed(f"{bucket}/files/*/b?g") == [big]
    assert b"".join(stores.chunks(big)) == content
    assert stores.read_range(big, stores.CHUNK - 2, stores.CHUNK + 3) == content[stores.CHUNK - 2 : stores.CHUNK + 3]
    assert stores.tree(big.url) == [big]
    stores.remove_tree(big.url)
    assert stores.tree(url) == [empty]
    stores.remove_tree(url)
    assert not stores.exists(empty.url)
    assert stores.tree(url) == []


def test_names(bucket: str) -> None:
    check_names(f"{bucket}/odd")


def test_text(bucket: str) -> None:
    for number in range(3):
        stores.put_bytes(f"Document {number}.\n\nAnother.\n".encode(), f"{bucket}/text/{number}.txt")
    corpus = FileCorpus(resolve_files([f"{bucket}/text/*.txt"], "data.files"), "text", None)
    assert {f"Document {number}." in str(list(corpus)) for number in range(3)} == {True}
    stores.put_bytes(b"Document 7.\n\nAnother.\n", f"{bucket}/text/1.txt")
    with pytest.raises(DataError, match=r"1\.txt: the file was replaced in the store while it was read"):
        list(corpus)


def test_what_is_missing(bucket: str, tmp_path: Path) -> None:
    other = f"{bucket}-of-nobody"
    (tmp_path / "x").write_bytes(b"1")
    for url in (f"{bucket}/none.txt", f"{other}/none.txt"):
        with pytest.raises(stores.MissingError, match=r"none\.txt does not exist in the store"):
            stores.look_up(url)
    for pattern in (f"{bucket}/none/*", f"{other}/*"):
        with pytest.raises(stores.MissingError):
            stores.listed(pattern)
    for write in (lambda: stores.put_bytes(b"1", f"{other}/x"), lambda: stores.put_file(tmp_path / "x", f"{other}/x")):
        with pytest.raises(DataError, match=r"x could not be written: the store has no bucket or container"):
            write()


def test_a_wrong_key_is_refused_at_once(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not bucket.startswith("az"):
        pytest.skip("the emulator of gs:// checks no credentials")
    port = int(os.environ["AZURE_STORAGE_CONNECTION_STRING"].rpartition("127.0.0.1:")[2].partition("/")[0])
    for key in (_KEY.replace("Eby8", "Aby8"), "hunter2"):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", _azure(port, key))
        import fsspec

        fsspec.get_filesystem_class("az").clear_instance_cache()
        for ask in (stores.look_up, stores.tree, stores.listed, lambda url: stores.put_bytes(b"1", url)):
            with pytest.raises(DataError, match="the store refuses access") as told:
                ask(f"{bucket}/*.x" if ask is stores.listed else f"{bucket}/x")
            assert key not in str(told.value)
    fsspec.get_filesystem_class("az").clear_instance_cache()


def test_answers_that_fail_are_asked_for_again(
    behind: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stores, "TIMEOUT", 3.0)
    content = os.urandom(1 << 20)
    url = f"{behind.url}/faults/one"
    faults: list[list[int | str | float]] = [[500], [503, 503], ["cut"], [4.0], [500, "cut", 429, 503]]
    for number, several in enumerate(faults):
        behind.proxy.faults[:] = several
        stores.put_bytes(content, f"{url}{number}")
        behind.proxy.faults[:] = several
        assert b"".join(stores.chunks(stores.look_up(f"{url}{number}"))) == content
        behind.proxy.faults[:] = several
        assert len(stores.tree(f"{behind.url}/faults")) == number + 1
        assert behind.proxy.faults == []
    if behind.url.startswith("az"):  # the package of gs:// repeats some answers by itself
        assert "Internal Server Error" in caplog.text


def test_an_error_that_stays_is_named(behind: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure's library does not repeat it for minutes, so that nothing but a lack of answers were seen."""
    if not behind.url.startswith("az"):
        pytest.skip("the package of gs:// repeats a request six times by itself, which takes minutes")
    monkeypatch.setattr(stores, "TIMEOUT", 10.0)
    monkeypatch.setattr(stores, "ATTEMPTS", 2)
    stores.put_bytes(b"0123456789", f"{behind.url}/one")
    file = stores.look_up(f"{behind.url}/one")
    for ask in (lambda: stores.read_range(file, 0, 10), lambda: stores.put_bytes(b"1", file.url)):
        behind.proxy.faults[:] = [500] * 100
        with pytest.raises(DataError, match=r"az://box/one could not be \w+ in 2 attempts: .*Internal Server Error"):
            ask()
        behind.proxy.faults.clear()


@pytest.mark.family
def test_prepared_shards_and_regions_over_answers_that_fail(behind: Bucket, tmp_path: Path) -> None:
    """Every third answer is a 503 or a body that is cut, and what is written and read has the same bytes."""
    spoiled: list[int | str | float] = [0.0, 503, 0.0, 0.0, "cut", 0.0] * 50
    (tmp_path / "a.txt").write_text("".join(f"Document {number} of some words.\n\n" for number in range(2000)))
    data = DataConfig(files=[str(tmp_path / "a.txt")], cache=tmp_path / "cache", workers=1, validation_fraction=0.1)
    prepare_folder(data, ByteTokenizer(), tmp_path / "folder")
    behind.proxy.faults[:] = spoiled
    prepare_folder(data, ByteTokenizer(), tmp_path / "work", store=f"{behind.url}/made")
    made = {file.url.removeprefix(f"{behind.url}/made/"): file for file in stores.tree(f"{behind.url}/made")}
    here = [path for path in (tmp_path / "folder").glob("*/*")]
    assert len(here) == 6
    for path in here:
        assert b"".join(stores.chunks(made[path.relative_to(tmp_path / "folder").as_posix()])) == path.read_bytes()
    write_store(tmp_path / "regions", list(random_pictures(12)), feature_dtype="fp32", features_of={"backend": "test"})
    for path in (tmp_path / "regions").iterdir():
        stores.put_file(path, f"{behind.url}/regions/{path.name}")
    assert 0 < len(behind.proxy.faults) < len(spoiled) - 30
    there = RegionStore.open(f"{behind.url}/regions", cache=tmp_path / "cache")
    assert {path.name: path.read_bytes() for path in (tmp_path / "regions").iterdir()}.items() <= {
        path.name: path.read_bytes() for path in there.folder.iterdir()
    }.items()
    behind.proxy.faults.clear()
