"""Pictures in folders, files and archives: all of them, by name, and nothing that leads elsewhere."""

from __future__ import annotations

import io
import logging
import os
import tarfile
from pathlib import Path

import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.regions.extract.find import find_pictures, read_picture
from capt.pretrain.regions.picture import Damage


def _folder(path: Path) -> Path:
    for name in ("b.png", "deep/er/a.JPG", "deep/c.png", ".hidden/d.png", "._b.png", "labels.json"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(name.encode())
    return path


def test_a_folder_with_those_below_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = find_pictures([_folder(tmp_path)], "stem", Damage(False))
    assert [one.name for one in found] == ["a", "b", "c"]
    assert [read_picture(one) for one in found] == [b"deep/er/a.JPG", b"b.png", b"deep/c.png"]
    assert "2 files without a picture's ending left out" in caplog.text
    assert "labels.json" in caplog.text
    assert [one.name for one in find_pictures([tmp_path], "path", Damage(False))] == ["b", "deep/c", "deep/er/a"]


def test_files_whatever_their_ending(tmp_path: Path) -> None:
    (tmp_path / "x.data").write_bytes(b"1")
    assert [one.name for one in find_pictures([tmp_path / "x.data"], "stem", Damage(False))] == ["x.data"]
    with pytest.raises(FileNotFoundError):
        find_pictures([tmp_path / "missing.png"], "stem", Damage(False))


def test_two_pictures_of_one_name_are_refused(tmp_path: Path) -> None:
    (_folder(tmp_path) / "deep" / "b.jpg").write_bytes(b"2")
    with pytest.raises(DataError, match=r"are both called 'b'; --names path tells them apart"):
        find_pictures([tmp_path], "stem", Damage(False))
    assert len(find_pictures([tmp_path], "path", Damage(False))) == 4


@pytest.mark.parametrize("skip", [False, True])
def test_links_and_fifos_are_named_and_not_opened(tmp_path: Path, skip: bool) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"s")
    folder = _folder(tmp_path / "folder")
    (folder / "link.png").symlink_to(secret)
    (folder / "deep" / "linked").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo.png")
    damage = Damage(skip)
    if not skip:
        with pytest.raises(DataError, match=r"a link, which is not followed|not a regular file"):
            find_pictures([folder], "stem", damage)
        return
    assert [one.name for one in find_pictures([folder], "stem", damage)] == ["a", "b", "c"]
    assert sorted(Path(where).name for where in damage.skipped) == ["fifo.png", "link.png", "linked"]
    assert damage.summary().startswith("3 pictures LEFT OUT as damaged: ")


def test_nothing_found_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no pictures"):
        find_pictures([tmp_path], "stem", Damage(False))


def _archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return path


def test_an_archive_is_read_in_place(tmp_path: Path) -> None:
    path = _archive(tmp_path / "p.tar", {"./z/b.png": b"bb", "../a.png": b"a", "notes.txt": b"n"})
    damage = Damage(True)
    found = find_pictures([path], "stem", damage)
    assert [(one.name, read_picture(one)) for one in found] == [("a", b"a"), ("b", b"bb")]
    assert damage.skipped == [f"{path}: link.png"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    path = _archive(tmp_path / "p.tar", {"a.png": bytes(5000)})
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"p.tar: not a whole tar archive"):
        find_pictures([path], "stem", Damage(True))
    (tmp_path / "q.tar").write_bytes(b"no archive at all" * 100)
    with pytest.raises(DataError, match=r"q.tar: not a whole tar archive"):
        find_pictures([tmp_path / "q.tar"], "stem", Damage(True))
    with pytest.raises(DataError, match="unpack it"):
        find_pictures([tmp_path / "q.tar.gz"], "stem", Damage(True))


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    (one,) = find_pictures([tmp_path], "stem", Damage(False))
    with pytest.raises(DataError, match="an empty file"):
        read_picture(one)


def test_a_name_that_no_store_can_hold_is_found_at_once(tmp_path: Path) -> None:
    """The search does not wait hours until its picture is reached."""
    (tmp_path / "two\nlines.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"two.*lines\.png: 'two\\nlines' is not a name for a picture.*; rename"):
        find_pictures([tmp_path], "stem", Damage(skip=True))
