from __future__ import annotations

import gzip
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.atomic import new_file, new_folder, partial_folder
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import read_lines, text_lines
from capt.pretrain.convert.output import export_folder


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with new_folder(out) as folder:
        (folder / "x").write_text("1")
        assert not out.exists()
    assert (out / "x").read_text() == "1"
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_a_failed_folder_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "x").write_text("1")
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_content_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("1")
    with pytest.raises(DataError, match="out already exists and is not empty"), new_folder(tmp_path / "out"):
        pytest.fail("the block must not run")
    assert (tmp_path / "out" / "mine").read_text() == "1"


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as folder:
        (folder / "x").write_text("1")
    assert (tmp_path / "out" / "x").exists()


def test_a_failed_file_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")

    def write() -> None:
        with new_file(path) as file:
            file.write("new")
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_lines_of_plain_and_packed_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("één\r\n\n  zwei\u2028drei".encode())
    with gzip.open(tmp_path / "b.gz", "wb") as file:
        file.write("\ufeff".encode() + b"four\n" * 3000)
    lines = list(read_lines([tmp_path / "a.txt", tmp_path / "b.gz"]))
    assert lines == ["één", "", "  zwei\u2028drei", *["four"] * 3000]


def test_long_lines_come_in_pieces_that_cut_no_character_and_no_line_end(tmp_path: Path) -> None:
    rng, path = random.Random(5), tmp_path / "a.txt"
    for _ in range(300):
        content = "x" + "".join(
            rng.choice(["a", "é", "日", "😀", "\r\n", "\n", " ", "\u2028", "\x85"]) for _ in range(60)
        )
        content = content.replace("\n", "\n\ufeff", 2) + rng.choice(["", "\r\n"])
        path.write_bytes(content.encode())
        expected = [*enumerate(re.split(r"(?<=\n)", content.replace("\r\n", "\n").replace("\ufeff", "")), start=1)]
        for limit in (None, rng.randint(5, 40)):
            found: dict[int, str] = {}
            with path.open("rb") as raw:
                for number, piece in text_lines(path, raw, limit):
                    assert limit is None or len(piece.encode()) < limit + 4
                    found[number] = found.get(number, "") + piece
            assert [*found.items()] == [each for each in expected if each[1]], (content, limit)


def test_a_carriage_return_alone_ends_no_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\rthree\r\n")
    assert list(read_lines([tmp_path / "a.txt"])) == ["one", "two\rthree"]
    (tmp_path / "a.txt").write_bytes(b"one\rtwo\r")
    for limit in (None, 100):
        with (tmp_path / "a.txt").open("rb") as raw, pytest.raises(DataError, match="carriage returns alone; tr "):
            list(text_lines(tmp_path / "a.txt", raw, limit))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "none.txt: no such file"),
        ("empty.txt", b"", "empty.txt: the file is empty"),
        ("latin.txt", b"fine\nna\xefve\n", "latin.txt, line 2: not UTF-8 text .byte 0xef."),
        ("not.gz", b"plain text", "not.gz, after line 0: damaged gzip file .* name it without .gz"),
        (
            "packed.txt",
            gzip.compress(b"text", mtime=0),
            "packed.txt is not UTF-8 text: it is packed with gzip; .* name it .gz",
        ),
        ("table.csv", b"PAR1\x15\x04\x15", "table.csv is not UTF-8 text: it is a parquet file; name it .parquet"),
        ("sheet.csv", b"PK\x03\x04\x14", "sheet.csv is not UTF-8 text: .* a spreadsheet; unpack or export it"),
        (
            "cut.gz",
            gzip.compress(b"".join(b"%d\n" % i for i in range(9999)), mtime=0)[:-2000],
            "cut.gz, after line [1-9]",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_lines([tmp_path / name]))


def test_lines_packed_by_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="needs the package zstandard, of the extra prepare")
    (tmp_path / "a.zst").write_bytes(zstandard.compress(b"five\n") + zstandard.compress(b"six"))
    assert list(read_lines([tmp_path / "a.zst"])) == ["five", "six"]
    (tmp_path / "a.zst").write_bytes(b"plain text")
    with pytest.raises(DataError, match=r"a\.zst, after line 0: damaged zstd file .* name it without \.zst"):
        list(read_lines([tmp_path / "a.zst"]))


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a file"):
        list(read_lines([tmp_path]))


def test_a_folder_that_another_process_has_written_meanwhile_is_kept(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "new"):
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "theirs").write_text("kept")

    with pytest.raises(DataError, match="new: another process has written it meanwhile"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new" / "theirs").read_text() == "kept"


def test_what_cannot_be_replaced_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty")
    for out, message in ((Path(), "the working folder"), (tmp_path / "link", "is a link")):
        with pytest.raises(DataError, match=message), new_folder(out):
            pytest.fail("the block was entered")


@pytest.mark.parametrize("kind", [new_folder, export_folder])
def test_what_a_killed_process_left_goes_at_the_next_start_and_no_other(tmp_path: Path, kind: Any) -> None:
    out = tmp_path / "o[ut"
    program = f"""
import os, signal, sys
from pathlib import Path
from {kind.__module__} import {kind.__name__}
with {kind.__name__}(Path(sys.argv[1])) as folder:
    (folder / "x").write_text("1")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program, str(out)], check=False)
    (left,) = tmp_path.iterdir()
    with kind(tmp_path / "other"):
        assert left.exists(), "of another output"
    shutil.rmtree(tmp_path / "other")
    with kind(out) as first:
        assert not left.exists()
        with partial_folder(out):
            assert first.exists(), "in use"
    assert [path.name for path in tmp_path.iterdir()] == ["o[ut"]
