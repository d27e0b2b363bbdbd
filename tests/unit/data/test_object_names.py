"""Names and objects as buckets have them (moto's S3 on the loopback): each is what it is, or is refused by name."""

from __future__ import annotations

import gzip
import os
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest

from capt.pretrain.base import stores
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.load import load_job
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.paths import resolve_files
from tests.unit.data.s3 import s3_bucket

NAMES = (
    *("a b.txt", "c#1.txt", "what?.txt", "whatx.txt", "50%.txt", "d%20e.txt", "d e.txt", "plus+&=,.txt", "at@x.txt"),
    *("[x].txt", "x.txt", "brace{1}.txt", "quote'.txt", ".hidden.txt", "-dash.txt", "\u00fc.txt", "u\u0308.txt"),
    *("\u65e5\u672c\U0001f600.txt", "star*.txt"),
)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


def texts(*patterns: str) -> list[str]:
    """The documents of files in a store."""
    return [passage.text for passage in FileCorpus(resolve_files(patterns, "data.files"), "text", None)]


def check_names(url: str) -> None:
    """Write, read, list and remove objects of odd names under an address."""
    for name in NAMES:
        stores.put_bytes(f"This is {name}.\n".encode(), f"{url}/{name}")
    for name in NAMES:
        assert texts(f"{url}/{name}") == [f"This is {name}."]
    assert sorted(texts(f"{url}/*.txt")) == sorted(f"This is {name}." for name in NAMES)
    for name in ("what?.txt", "[x].txt"):
        stores.remove_tree(f"{url}/{name}")
    left = {file.url.removeprefix(f"{url}/") for file in stores.tree(url)}
    assert left == {*NAMES} - {"what?.txt", "[x].txt"}


def test_each_name_is_itself_and_no_pattern(bucket: str) -> None:
    """``[x].txt`` was read as ``x.txt``, and a run whose address has a ``?`` would remove the files of others."""
    check_names(f"{bucket}/odd")
    assert texts(f"{bucket}/odd/[ab] b.txt") == ["This is a b.txt."]
    stores.put_bytes(b"This is semi;.txt.\n", f"{bucket}/odd/semi;.txt")  # which Google's emulator does not find
    job = load_job("capt_tiny", [f"data.files=['{bucket}/odd/c#1.txt','{bucket}/odd/semi;.txt']"])
    assert texts(*job.data.files) == ["This is c#1.txt.", "This is semi;.txt."]


def put_marker(name: str) -> None:
    """Make the empty object that the consoles of stores make for a folder."""
    url = f"{os.environ['AWS_ENDPOINT_URL']}/bucket/{urllib.parse.quote(name)}"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", data=b""), timeout=30):
        pass


def test_a_folder_that_is_an_object_is_no_file(bucket: str) -> None:
    url = f"{bucket}/marked"
    for name in ("marked/", "marked/sub/"):
        put_marker(name)
    for name in ("a.txt", "sub/b.txt"):
        stores.put_bytes(f"This is {name}.\n".encode(), f"{url}/{name}")
    expected = ["This is a.txt.", "This is sub/b.txt."]
    assert texts(f"{url}/**") == texts(f"{url}/**/*.txt") == expected
    assert [file.url for file in stores.tree(url)] == [f"{url}/a.txt", f"{url}/sub/b.txt"]
    for name in (url, f"{url}/"):
        with pytest.raises(
            DataError, match=r"is a folder of the store; name its files, for example \S+/marked/\*\.txt"
        ):
            texts(name)


@pytest.mark.parametrize("pattern", ["*.txt", "p*.txt", "**/*.txt", "p.tx[t]"])
def test_a_file_that_is_a_folder_as_well_is_read(bucket: str, pattern: str) -> None:
    """It was left out, and the others of the pattern were read."""
    url = f"{bucket}/both"
    for name in ("p.txt", "p.txt/a.txt"):
        stores.put_bytes(f"This is {name}.\n".encode(), f"{url}/{name}")
    inner = ["This is p.txt/a.txt."] if "**" in pattern else []
    assert texts(f"{url}/{pattern}") == ["This is p.txt.", *inner]
    assert texts(f"{url}/p.txt") == ["This is p.txt."]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty.txt", b"", r"empty\.txt is empty: remove it, or name the others"),
        (
            "b.txt",
            gzip.compress(b"Text.\n", mtime=0),
            r"b\.txt is not UTF-8 text: it is packed with gzip; unpack it, or name",
        ),
        (
            "c.txt.gz",
            b"Text.\n",
            r"c\.txt\.gz, after line 0: damaged gzip file .*name it without \.gz",
        ),
        ("d", b"Text.\n", r"d: no reader for files ending in nothing; .*rename a file of plain text"),
    ],
    ids=["empty", "packed", "not packed", "no ending"],
)
def test_what_is_no_text_has_a_remedy(bucket: str, name: str, content: bytes, told: str) -> None:
    stores.put_bytes(content, f"{bucket}/wrong-{name}/{name}")
    with pytest.raises(DataError, match=told):
        texts(f"{bucket}/wrong-{name}/*")


def test_addresses_that_cannot_be_are_refused_in_one_attempt(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="names a version of an object: only the newest one is read"):
        load_job("capt_tiny", [f"data.files={bucket}/a.txt?versionId=3"])
    assert load_job("capt_tiny", ["data.files=S3://bucket/A.txt"]).data.files == ["s3://bucket/A.txt"]
    for url in ("s3://No Bucket_/x.txt", "s3://No Bucket_/*.txt"):
        with pytest.raises(DataError, match="Invalid bucket name"):
            resolve_files([url], "data.files")
    assert "trying again" not in caplog.text
