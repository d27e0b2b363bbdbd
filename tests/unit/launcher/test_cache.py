"""``capt cache``: what is listed, what is removed, and what stays because a job is making or using it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capt.launcher.commands.cache import cache_entries, remove_entry
from capt.pretrain.base.cache import require_cache
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.locks import file_lock, make_once
from capt.pretrain.data.docstrings import docstring_file
from tests.support import Capt

KEY = "0123456789abcdef" * 2
DAY = 24 * 3600


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Entries of every kind, each a day older than the one before, and what is none of the cache's."""
    names = [
        f"shards/{KEY}/shard.bin",
        f"pairs/{KEY}/a/b.npy",
        f"answers/{KEY}.json",
        f"finetune/{KEY}.npz",
        f"docstrings/docstrings-{KEY[:16]}.txt",
        f"tokenizers/.{KEY}.123.partial/x",
        f"embeddings/{KEY}/words.i32",
    ]
    for name in (*names, "shards/train/manifest.json", "notes.txt", f"other/{KEY}/x", f"shards/.{KEY}.lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 1000)
    for days, name in enumerate(names):
        entry = tmp_path.joinpath(*Path(name).parts[:2])
        os.utime(entry, (time.time() - days * DAY,) * 2)
    return tmp_path


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_oldest_comes_first_and_what_is_not_ours_is_not_there(cache: Path, capt: Capt) -> None:
    entries = cache_entries(cache)
    kinds = ["embeddings", "tokenizers", "docstrings", "finetune", "answers", "pairs", "shards"]
    assert [entry.kind for entry in entries] == kinds
    assert all(1000 <= entry.bytes < 20_000 for entry in entries)
    assert [round(entry.age / DAY) for entry in entries] == [6, 5, 4, 3, 2, 1, 0]
    code, out, _ = capt("cache", "list", "--cache", cache)
    assert code == 0
    assert "7 entries" in out
    assert cache_entries(cache / "nowhere") == []


def test_pruning_by_age(cache: Path, capt: Capt) -> None:
    before = _files(cache)
    assert capt("cache", "prune", "--older-than", "2.5", "--dry-run", "--cache", cache)[0] == 0
    assert _files(cache) == before
    code, out, _ = capt("cache", "prune", "--older-than", "2.5", "--cache", cache)
    assert code == 0
    assert [entry.kind for entry in cache_entries(cache)] == ["answers", "pairs", "shards"]
    assert out.count(": removed (") == 4
    assert capt("cache", "prune", "--all", "--cache", cache)[0] == 0
    assert _files(cache) == {"shards/train/manifest.json", "notes.txt", f"other/{KEY}/x"}


@pytest.mark.parametrize("words", [(), ("--all", "--older-than", "3")])
def test_pruning_says_what(capt: Capt, cache: Path, words: tuple[str, ...]) -> None:
    before = _files(cache)
    assert capt("cache", "prune", *words, "--cache", cache)[0] == 2
    assert _files(cache) == before


@pytest.mark.parametrize("lock", [f"shards/.{KEY}.lock", f"pairs/{KEY}.lock"])
def test_what_a_job_makes_stays(cache: Path, lock: str, capt: Capt) -> None:
    kind = lock.split("/")[0]
    with file_lock(cache / lock, remove=True):
        code, out, _ = capt("cache", "prune", "--all", "--cache", cache)
    assert code == 0
    assert f"{cache / kind / KEY}: in use by a job, not removed" in out
    assert [entry.kind for entry in cache_entries(cache)] == [kind]


def test_what_a_job_has_mapped_or_open_stays(cache: Path) -> None:
    """Also after a file that it mapped was closed, as numpy does it; another process is what holds it here."""
    hold = (
        "import mmap, sys\nwith open(sys.argv[1], 'r+b') as f: m = mmap.mmap(f.fileno(), 0)\nprint(flush=True); input()"
    )
    words = [sys.executable, "-c", hold, str(cache / "shards" / KEY / "shard.bin")]
    (entry,) = [entry for entry in cache_entries(cache) if entry.kind == "shards"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        assert not remove_entry(entry)
        job.communicate(b"\n")
    with (entry.path / "shard.bin").open("rb"):
        assert not remove_entry(entry)
    assert remove_entry(entry)
    assert not entry.path.exists()


def test_a_link_is_removed_and_not_followed(capt: Capt, cache: Path) -> None:
    target = cache / "kept"
    target.mkdir()
    (target / "x").write_text("x")
    (cache / "pairs" / KEY[::-1]).symlink_to(target)
    assert capt("cache", "prune", "--all", "--cache", cache)[0] == 0
    assert (target / "x").is_file()
    assert not (cache / "pairs" / KEY[::-1]).is_symlink()


@pytest.mark.parametrize("folder", ["/dev/null/capt", "/proc/nowhere/capt"])
def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(folder: str, tmp_path: Path) -> None:
    message = rf"{folder}.*: the cache cannot be written \(.*set data\.cache .*XDG_CACHE_HOME"
    (tmp_path / "a.py").write_text('"""Words."""')
    for use in (
        lambda: require_cache(Path(folder)),
        lambda: make_once(Path(folder, "tokenizers", "x.lock"), lambda: False, lambda: None),
        lambda: docstring_file(Path(folder, "docstrings"), 1, [tmp_path]),
    ):
        with pytest.raises(DataError, match=message):
            use()
