"""``hf://`` in ``data.files``, against the hub's API on the loopback: what is asked for, and what is noticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capt.pretrain.base import stores
from capt.pretrain.base.errors import DataError
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.paths import resolve_files
from tests.unit.data.hub_server import Hub, hub_server

SET = "hf://datasets/user/set"
LONG = b"Some words of a line that is long enough.\n\n" * 2000


@pytest.fixture
def hub() -> Iterator[Hub]:
    revisions = {
        "main": {"train/a.txt": b"Main a.\n", "train/b c.txt": b"Main b c.\n", "long.txt": LONG},
        "v1.0": {"train/a.txt": b"Tag a.\n"},
        "refs/pr/1": {"train/a.txt": b"Pull a.\n"},
        "feature/x": {"train/a.txt": b"Branch a.\n"},
    }
    with hub_server(revisions) as made:
        yield made


def texts(pattern: str) -> list[str]:
    return [passage.text for passage in FileCorpus(resolve_files([pattern], "data.files"), "text", None)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/train/a.txt", ["Main a."]),
        ("/train/*.txt", ["Main a.", "Main b c."]),
        ("/**/b c.txt", ["Main b c."]),
        ("@main/train/a.txt", ["Main a."]),
        ("@v1.0/train/a.txt", ["Tag a."]),
        ("@v1.0/*/*.txt", ["Tag a."]),
        ("@refs/pr/1/train/a.txt", ["Pull a."]),
        ("@refs%2Fpr%2F1/train/*.txt", ["Pull a."]),
        ("@feature%2Fx/train/a.txt", ["Branch a."]),
    ],
)
def test_a_revision_is_the_one_that_is_named(hub: Hub, name: str, expected: list[str]) -> None:
    assert texts(f"{SET}{name}") == expected


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (f"{SET}@gone/train/a.txt", "does not exist in the store"),
        (f"{SET}@gone/*.txt", "does not exist in the store"),
        (f"{SET}/none.txt", "does not exist in the store"),
        (f"{SET}/none/*.txt", "no file of the store matches"),
        (f"{SET}/train", r"is a folder of the store; name its files, for example \S+/train/\*\.txt"),
        ("hf://datasets/user/other/a.txt", "does not exist in the store"),
        ("hf://datasets/user", "could not be looked up: HfUriError"),
    ],
)
def test_what_is_not_there_is_told_in_one_attempt(
    hub: Hub, url: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match=told):
        texts(url)
    assert "trying again" not in caplog.text


@pytest.mark.parametrize("parts", [1, 4])
def test_no_byte_is_fetched_twice(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, parts: int
) -> None:
    """The hub's own file system reads 5 MB ahead in each request, which the next one does not use."""
    monkeypatch.setattr(stores, "CHUNK", len(LONG) // parts)
    monkeypatch.setattr(stores, "_SMALL", len(LONG) if parts == 1 else 0)
    caplog.set_level("INFO")
    assert "".join(texts(f"{SET}/long.txt")).count("words") == 2000
    given = [size for method, path, size in hub.requests if "/resolve/" in path]
    assert given == [len(LONG) // parts] * parts
    assert len(hub.requests) - len(given) <= 4
    assert caplog.text == "", "a request is answered by a signed address, which is not logged"


def test_a_file_that_is_replaced_is_noticed(hub: Hub) -> None:
    """The hub's file system may remember it: the same size, in another thread, in a folder that was listed."""
    (file, _) = stores.listed(f"{SET}/train/*.txt")
    for number in range(6):
        hub.revisions["main"]["train/a.txt"] = b"Main %d.\n" % number
        with pytest.raises(DataError, match=r"a\.txt: the file was replaced in the store while it was read"):
            stores.require_unchanged(file)
        (file, _) = stores.listed(f"{SET}/train/*.txt")
        stores.require_unchanged(file)


def test_a_set_that_is_gated_is_refused_access(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.refused = True
    with pytest.raises(DataError, match=r"a\.txt: the store refuses access .*the credentials of this host"):
        texts(f"{SET}/train/a.txt")
    assert "trying again" not in caplog.text
