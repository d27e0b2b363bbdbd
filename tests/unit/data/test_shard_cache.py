"""Shard sets in a store: what is read, fetched, kept and removed, and what a store that lies leads to."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.data import shard_cache
from capt.pretrain.data.sampler import GroupedSampler
from capt.pretrain.data.shard_cache import ShardCache
from capt.pretrain.data.shards import PackedDataset, ShardSet
from tests.unit.data import faulty
from tests.unit.data.faulty import FaultyStore, faulty_store
from tests.unit.data.test_shards import build

SHARD = 10_000 * 2


@pytest.fixture
def store() -> Iterator[type[FaultyStore]]:
    with faulty_store() as made:
        yield made


def opened(
    tmp_path: Path, at_once: int | None, limit: int = 1 << 30, name: str = "cache", *, check: bool = True
) -> ShardSet:
    if not (tmp_path / "set").exists():
        build(tmp_path / "set")
    return ShardSet.open_url(f"faulty:/{tmp_path}/set", tmp_path / name, limit, at_once=at_once, check=check)


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "stored").glob("*.bin"))


def read_in_order(shards: ShardSet, at_once: int, epochs: int = 2) -> list[np.ndarray]:
    windows = PackedDataset(shards, 64, by_shard=True)
    order = GroupedSampler(len(windows), windows.block, at_once, 3)
    seen = []
    for sample in range(0, epochs * len(windows), 31):
        if shards.cache is not None:
            shards.cache.follow(order, sample)
        seen.append(windows.window(int(order.locate(np.array([sample]))[1][0])))
    return seen


@pytest.mark.parametrize("at_once", [None, 2])
def test_a_set_in_a_store_reads_as_on_disk(tmp_path: Path, store: type[FaultyStore], at_once: int | None) -> None:
    shards = opened(tmp_path, at_once)
    local = ShardSet.open(tmp_path / "set")
    np.testing.assert_array_equal(shards.read(5, 31_000), local.read(5, 31_000))
    np.testing.assert_array_equal(shards.starts, local.starts)
    if at_once is None:
        assert len(kept(tmp_path)) == len(local.manifest.files)
        shutil.rmtree(tmp_path / "set")  # nothing more is asked of the store
        np.testing.assert_array_equal(shards.read(0, 10), local.read(0, 10))


def test_a_set_larger_than_the_cache(tmp_path: Path, store: type[FaultyStore]) -> None:
    """The same windows in the same order as from disk; the cache stays within its bytes; no shard comes twice in an
    epoch."""
    limit = 5 * SHARD
    shards = opened(tmp_path, 2, limit)
    count = len(shards.manifest.shards)
    assert count > 20
    seen = read_in_order(shards, 2)
    for ours, theirs in zip(seen, read_in_order(ShardSet.open(tmp_path / "set"), 2), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert sum(path.stat().st_size for path in kept(tmp_path)) <= limit
    assert shards.cache is not None
    fetched = [name for name in store.requests if name.startswith("shard")]
    assert len(fetched) <= 2 * count + 4


def in_turn(shards: ShardSet) -> tuple[ShardCache, GroupedSampler, list[str]]:
    """The cache of a set, an order of groups of one shard, and the shards in this order."""
    assert shards.cache is not None
    windows = PackedDataset(shards, 64, by_shard=True)
    order = GroupedSampler(len(windows), windows.block, 1, 3)
    turns = [
        shards.manifest.shards[int(blocks[0])] for _, (_, blocks) in zip(range(8), order.groups_from(0), strict=False)
    ]
    return shards.cache, order, turns


def has(cache: ShardCache, name: str) -> bool:
    return (cache.folder / f"{cache.files[name].sha256}.bin").exists()


def test_what_is_needed_last_goes_first(tmp_path: Path, store: type[FaultyStore]) -> None:
    cache, order, turns = in_turn(opened(tmp_path, 1, 6 * SHARD))
    for name in turns[:6]:
        cache.path(name)
    cache.follow(order, 0)
    cache.path("documents.bin")
    assert all(has(cache, name) for name in turns[:5])
    assert not has(cache, turns[5])


def test_the_group_in_use_and_the_next_one_stay(
    tmp_path: Path, store: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "_PATIENCE", 0.0)
    cache, order, turns = in_turn(opened(tmp_path, 1, 3 * SHARD))
    cache.follow(order, 0)
    assert [cache.is_coming(name) for name in turns[:3]] == [True, True, False]
    for name in (*turns[:3], turns[4]):
        cache.path(name)
    assert [has(cache, name) for name in turns[:5]] == [True, True, False, False, True]
    cache.limit = 2 * SHARD
    with pytest.raises(DataError, match="has no room"):
        cache.path(turns[3])
    assert [has(cache, name) for name in turns[:2]] == [True, True]


def test_the_next_group_is_fetched_meanwhile_and_no_group_twice(
    tmp_path: Path, store: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, order, turns = in_turn(opened(tmp_path, 1))
    cache.follow(order, 0)
    until = time.monotonic() + 20
    while not all(has(cache, name) for name in turns[:2]):
        assert time.monotonic() < until, "the next group is not fetched ahead"
        time.sleep(0.01)
    wanted: list[str] = []
    monkeypatch.setattr(cache, "_prefetch", wanted.extend)
    cache.follow(order, 1)
    assert not wanted


def test_files_of_other_sets_go_before_those_of_this_one(tmp_path: Path, store: type[FaultyStore]) -> None:
    shards = opened(tmp_path, 1)
    cache, order, turns = in_turn(shards)
    documents = cache.path("documents.bin")
    other = cache.folder / f"{'b' * 64}.bin"
    other.write_bytes(bytes(SHARD))
    os.utime(documents, (1, 1))  # the other file was used later
    cache.limit = SHARD * 2 + documents.stat().st_size
    cache.follow(order, 0)
    for name in turns[:2]:
        cache.path(name)
    assert (other.exists(), documents.exists()) == (False, True)


def test_files_of_a_set_that_is_fetched_whole_do_not_give_way_to_one_another(
    tmp_path: Path, store: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "_PATIENCE", 0.0)
    build(tmp_path / "set")
    stored = tmp_path / "cache" / "stored"
    stored.mkdir(parents=True)
    other = stored / f"{'b' * 64}.bin"
    other.write_bytes(bytes(SHARD))
    total = sum(path.stat().st_size for path in (tmp_path / "set").glob("*.bin"))
    with other.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # in use by another job
        with pytest.raises(DataError, match="has no room"):
            opened(tmp_path, None, total)
    opened(tmp_path, None, total)


def test_room_is_taken_before_the_first_byte(tmp_path: Path, store: type[FaultyStore]) -> None:
    cache, _, turns = in_turn(opened(tmp_path, 1))
    path = cache.path(turns[0])
    partial = cache._room(path, 12_345)
    assert partial.stat().st_size == 12_345


def test_a_file_of_another_length_is_not_fetched(tmp_path: Path, store: type[FaultyStore]) -> None:
    shards = opened(tmp_path, 2)
    first = tmp_path / "set" / "shard-00000.bin"
    first.write_bytes(first.read_bytes() + b"\0")
    with pytest.raises(DataError, match="has 20,001 bytes, the manifest says 20,000"):
        shards.read(0, 1)
    assert "shard-00000.bin" not in store.requests


def test_what_an_earlier_job_has_left_is_hashed_once(
    tmp_path: Path, store: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _, turns = in_turn(opened(tmp_path, 1))
    path = cache.path(turns[0])
    os.utime(path, (1, 1))
    hashed: list[Path] = []
    whole = shard_cache.hash_file
    monkeypatch.setattr(shard_cache, "hash_file", lambda path, *rest: (hashed.append(path), whole(path, *rest))[1])
    for _ in range(2):
        cache.path(turns[0])
    assert hashed == [path]


def test_a_file_that_was_cut_short_is_fetched_again_without_hashes_too(
    tmp_path: Path, store: type[FaultyStore]
) -> None:
    cache, _, turns = in_turn(opened(tmp_path, 1, check=False))
    path = cache.path(turns[0])
    content = path.read_bytes()
    os.truncate(path, 10)
    assert cache.path(turns[0]).read_bytes() == content


@pytest.mark.parametrize("fault", [faulty.server_error, faulty.truncated, faulty.damaged, faulty.slow])
def test_a_store_that_fails_once_is_asked_again(
    tmp_path: Path, store: type[FaultyStore], fault: faulty.Fault, caplog: pytest.LogCaptureFixture
) -> None:
    shards = opened(tmp_path, 2)
    store.faults = [fault]
    with caplog.at_level(logging.WARNING):
        read = shards.read(0, 100)
    np.testing.assert_array_equal(read, ShardSet.open(tmp_path / "set").read(0, 100))
    assert "again" in caplog.text
    assert "hunter2" not in caplog.text
    assert "abcdef" not in caplog.text


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (faulty.server_error, "could not be read in 3 attempts: OSError: 503 Slow Down at https://store/x"),
        (faulty.truncated, "it gave 10,000 bytes, and not the 20,000 asked for"),
        (faulty.damaged, "it was changed or damaged"),
        (faulty.slow, "no answer in 0.3 s"),
        (faulty.expired, "the store refuses access .*have expired"),
        (faulty.replaced, "the file was replaced in the store while it was read"),
    ],
)
def test_a_store_that_lies_is_named(tmp_path: Path, store: type[FaultyStore], fault: faulty.Fault, told: str) -> None:
    shards = opened(tmp_path, 2)
    store.faults = [fault] * 9
    with pytest.raises(DataError, match=rf"faulty:/{tmp_path}/set/shard-00000.bin.*{told}"):
        shards.read(0, 100)
    assert list((tmp_path / "cache" / "stored").glob("*.bin")) == []
    assert list((tmp_path / "cache" / "stored").glob(".*.partial")) == []


def test_damage_on_the_disk_of_the_cache_is_noticed_by_the_next_job(
    tmp_path: Path, store: type[FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path, None)
    path = kept(tmp_path)[0]
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    os.utime(path, (1, 1))
    opened(tmp_path, None, check=False)
    assert path.read_bytes() != content
    opened(tmp_path, None)
    assert path.read_bytes() == content
    assert "is fetched again" in caplog.text


def test_a_cache_that_is_too_small(tmp_path: Path, store: type[FaultyStore], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cache_bytes 40,000: the shards of .* set data.shards_at_once for fewer"):
        opened(tmp_path, None, 2 * SHARD)
    with pytest.raises(ConfigError, match=r"at a time have 80,000 bytes; raise it, or lower data.shards_at_once"):
        opened(tmp_path, 2, 3 * SHARD)
    cache = opened(tmp_path, 1, 3 * SHARD).cache
    assert cache is not None
    with pytest.raises(ConfigError, match="have 40,000 bytes and those of training 40,000"):
        cache.require_room(1, beside=cache.require_room(1))
    monkeypatch.setattr(shard_cache, "_PATIENCE", 0.0)
    shards = opened(tmp_path, 1, 2 * SHARD)
    for number in (0, 1):  # mapped, so that nobody may remove them
        shards.read(number * 10_000, number * 10_000 + 1)
    with pytest.raises(DataError, match=r"has no room for 20,000 bytes, jobs use what is in it"):
        shards.read(20_000, 20_001)


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path, store: type[FaultyStore]) -> None:
    shards = opened(tmp_path, 2, 4 * SHARD)
    folder = tmp_path / "cache" / "stored"
    folder.mkdir(parents=True)
    (folder / f".{'a' * 64}.bin.7.partial").write_bytes(bytes(4 * SHARD))
    (folder / f".{'a' * 64}.lock").touch()
    shards.read(0, 10)
    assert not list(folder.glob(".*.partial"))
