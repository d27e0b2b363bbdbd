"""Files at the border: what is no regular file is refused, links are not followed, nothing half-written stays."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from capt.launcher.commands.options import echo_json
from capt.pretrain.base import files as safe_files
from capt.pretrain.base.atomic import new_file
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, UserError, user_text
from capt.pretrain.base.files import read_lines
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.embeddings.vectors import read_vectors
from capt.pretrain.models.hf_folder import read_json as read_model_json
from capt.pretrain.models.hf_folder import read_tensor_file
from capt.pretrain.vision_language.data.read import read_examples
from capt.tokenizer.encode import load_tokenizer
from capt.tokenizer.pieces import read_model


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for read in (safe_files.read_bytes, safe_files.read_text, safe_files.read_json):
        with pytest.raises(DataError, match="not a regular file"):
            read(tmp_path / "fifo")
    for opened in (safe_files.open_for_append, safe_files.open_lock):
        with pytest.raises(DataError, match=r"FIFO|regular"):
            opened(tmp_path / "fifo")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        safe_files.read_bytes(tmp_path, error=CheckpointError)


def test_a_large_file_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="over 1,000 bytes"):
        safe_files.read_bytes(tmp_path / "sparse", limit=1000)


@pytest.mark.parametrize("text", ["{", "NaN", '{"a": Infinity}', "[" * 100_000, "1" * 5000, ""])
def test_what_is_no_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=r"x\.json: not valid JSON"):
        safe_files.read_json(tmp_path / "x.json")


def test_a_planted_link_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "status.json").symlink_to(tmp_path / "victim")
    safe_files.write_json(tmp_path / "status.json", {"a": 1})
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "status.json").is_symlink()
    assert json.loads((tmp_path / "status.json").read_text()) == {"a": 1}
    (tmp_path / "log").symlink_to(tmp_path / "victim")
    for opened in (safe_files.open_for_append, safe_files.open_lock):
        with pytest.raises(DataError, match="a link"):
            opened(tmp_path / "log")
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    """``capt evaluate --out /dev/null``, typed by a superuser, made a file of it. A link replaces it here."""
    out = tmp_path / "null"
    out.symlink_to(os.devnull)
    for write in (safe_files.require_writable, lambda path: safe_files.write_text(path, "x")):
        with pytest.raises(ConfigError, match="null is a device or a pipe, and not a file"):
            write(out)
    assert out.readlink() == Path(os.devnull)


def test_a_file_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    safe_files.require_writable(tmp_path / "file")
    safe_files.require_writable(tmp_path / "new" / "folder" / "file")
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "file" / "x", "file is not a folder in which you")):
        with pytest.raises(ConfigError, match=message):
            safe_files.require_writable(path)


def test_permissions_follow_the_umask_unless_private(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        safe_files.write_text(tmp_path / "public", "x")
        safe_files.write_text(tmp_path / "private", "x", private=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "public").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safe_files.write_text(tmp_path / "x", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as error:
        safe_files.write_text(tmp_path / "x", "new")
    assert user_text(error.value) == f"{tmp_path / 'x'}: No space left on device; free some space, or use another disk"
    assert (tmp_path / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_file_that_cannot_be_written_is_named_and_not_its_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as in_place:
        safe_files.write_text(tmp_path / "folder", "new")
    assert user_text(in_place.value) == f"{tmp_path / 'folder'}: Is a directory"

    def read_only(path: str, *_: object) -> int:
        raise OSError(30, "Read-only file system", path)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match="Read-only") as nowhere:
        safe_files.write_text(tmp_path / "x", "new")
    assert user_text(nowhere.value) == f"{tmp_path / 'x'}: Read-only file system"


def test_a_number_that_json_cannot_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        safe_files.write_json(tmp_path / "x", {"a": float("nan")})


def test_printed_json_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    """``capt ... --json`` of a model whose figures are not finite, at any depth."""
    echo_json({"a": float("nan"), "b": [float("inf"), 1.5, {"c": -float("inf")}], "d": "NaN", "e": Path("x")})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"a": None, "b": [None, 1.5, {"c": None}], "d": "NaN", "e": "x"}
    assert "Infinity" not in printed


def test_errors_of_the_system_have_one_text() -> None:
    assert user_text(PermissionError(13, "Permission denied", "/a/b")) == "/a/b: Permission denied"
    assert user_text(OSError(28, "x", "/a")) == "/a: x; free some space, or use another disk"
    assert user_text(OSError(28, "x")) == (
        "a file, the output, or shared memory (/dev/shm): x; free some space, or use another disk"
    )
    assert user_text(OSError(24, "x")) == "this process: x; raise the limit: ulimit -n 65536"
    assert user_text(DataError("two\nlines")) == "two lines"
    assert user_text(ValueError("ours")) is None
    assert user_text(OSError(9, "bad descriptor")) is None


def test_a_file_of_text_follows_no_link_that_was_put_where_it_is_written_first(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / f".x.txt.{os.getpid()}.partial").symlink_to(precious)
    with new_file(tmp_path / "x.txt") as file:
        file.write("ä\n")
    assert (tmp_path / "x.txt").read_text(encoding="utf-8") == "ä\n"
    with pytest.raises(KeyError), new_file(tmp_path / "y.txt") as file:
        raise KeyError
    assert precious.read_text() == "precious"
    assert not (tmp_path / "y.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".tmp") == []


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 498818054\n"

READERS: dict[str, Callable[[Path], object]] = {
    "c.txt": lambda path: list(FileCorpus([path], "text", None).pieces()),
    "c.jsonl": lambda path: list(FileCorpus([path], "text", None).pieces()),
    "c.txt.gz": lambda path: list(FileCorpus([path], "text", None).pieces()),
    "c.parquet": lambda path: list(FileCorpus([path], "text", None).pieces()),
    "lines.txt": lambda path: list(read_lines([path])),
    "vectors.txt": read_vectors,
    "questions.json": lambda path: read_examples([path]),
    "model.safetensors": read_tensor_file,
    "config.json": read_model_json,
    "tokenizer.json": lambda path: load_tokenizer(path.parent),
    "vocab.txt": lambda path: load_tokenizer(path.parent),
    "spm.model": read_model,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.family) if name in ("vectors.txt", "questions.json") else name
        for name in READERS
    ],
)
def test_a_pointer_of_git_lfs_is_no_file_of_any_kind(tmp_path: Path, name: str) -> None:
    """A clone without Git LFS has three lines of text in the place of each large file, whatever its name says."""
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(UserError, match=r"a pointer of Git LFS, .* `git lfs pull`"):
        READERS[name](tmp_path / name)
    (tmp_path / "prose.txt").write_text(POINTER + "is how such a pointer begins.\n" * 100)
    assert len(list(read_lines([tmp_path / "prose.txt"]))) == 103
