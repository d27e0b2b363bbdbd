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

import pytest

from capt.pretrain.base import stores
from capt.pretrain.base.errors import DataError
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.paths import resolve_files
from tests.support import free_port

pytestmark = pytest.mark.filterwarnings("default")  # those of the stores' packages are not ours

_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's, public
_PACKAGES = {"az": ("adlfs", "azurite-blob"), "gs": ("gcsfs", "gcp-storage-emulator")}


def _azure(port: int, key: str = _KEY) -> str:
    where = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    return f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={key};BlobEndpoint={where};"


@pytest.fixture(scope="module", params=sorted(_PACKAGES))
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a new bucket or container; its server and credentials are in the environment."""
    scheme: str = request.param
    package, program = _PACKAGES[scheme]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if (found := shutil.which(program)) is None:
        pytest.skip(f"{program} is not on PATH")
    port, data = free_port(), str(tmp_path_factory.mktemp("emulator"))
    if scheme == "az":
        command = ["--silent", "--skipApiVersionCheck", "--location", data, "--blobPort", str(port)]
        variables = {"AZURE_STORAGE_CONNECTION_STRING": _azure(port)}
    else:
        command = ["-d", data, "start", "--host", "127.0.0.1", "--port", str(port), "--default-bucket", "box"]
        variables = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
    server = subprocess.Popen([found, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stores, "_FIRST_PAUSE", 0.01)
            for name, value in variables.items():
                patch.setenv(name, value)
            import fsspec

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
            yield f"{scheme}://box"
            fsspec.get_filesystem_class(scheme).clear_instance_cache()
    finally:
        server.kill()
        server.wait()


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
