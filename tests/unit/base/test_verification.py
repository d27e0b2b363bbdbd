"""Files are hashed once while they stay as they are, and a damaged or planted memory only means hashing again."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base import verification
from capt.pretrain.base.errors import CheckpointError, DataError
from capt.pretrain.base.verification import ExpectedFile, FileState, Inspection, Verifier


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were opened to be hashed, in order."""
    opened: list[str] = []
    original = verification.hash_file

    def counted(path: Path, *rest: Any) -> str:
        opened.append(path.name)
        return original(path, *rest)

    monkeypatch.setattr(verification, "hash_file", counted)
    monkeypatch.setattr(verification, "_LEAST_AGE", -1e9)
    return opened


@pytest.fixture
def files(tmp_path: Path) -> dict[str, ExpectedFile]:
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / name).write_bytes(name.encode() * 100)
    return {
        path.name: ExpectedFile(100, hashlib.sha256(path.read_bytes()).hexdigest()) for path in sorted(folder.iterdir())
    }


def verify(tmp_path: Path, files: dict[str, ExpectedFile], **options: Any) -> None:
    Verifier(tmp_path / "cache", **options).verify(tmp_path / "set", files, error=CheckpointError, hint="; so there")


def test_known_files_are_not_read(tmp_path: Path, files: dict[str, ExpectedFile], read: list[str]) -> None:
    verify(tmp_path, files)
    assert sorted(read) == ["a", "b", "c"]
    verify(tmp_path, files)
    assert len(read) == 3
    (memory,) = (tmp_path / "cache").iterdir()
    assert memory.stat().st_mode & 0o777 == 0o600
    verify(tmp_path, files, again=True)
    assert len(read) == 6


def test_any_change_of_a_file_is_seen(tmp_path: Path, files: dict[str, ExpectedFile], read: list[str]) -> None:
    verify(tmp_path, files)
    path = tmp_path / "set" / "b"
    before = path.stat()
    path.write_bytes(b"x" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the time of change stays the kernel's
    with pytest.raises(CheckpointError, match=r"set/b is damaged: expected SHA-256 .*, found .*; so there"):
        verify(tmp_path, files)
    path.write_bytes(b"b" * 100)
    del read[:]
    verify(tmp_path, files)
    assert read == ["b"]


def test_another_file_of_the_same_size_and_time_in_its_place_is_read(
    tmp_path: Path, files: dict[str, ExpectedFile], read: list[str]
) -> None:
    verify(tmp_path, files)
    del read[:]
    old, new = tmp_path / "set" / "a", tmp_path / "new"
    new.write_bytes(old.read_bytes())
    os.utime(new, ns=(old.stat().st_atime_ns, old.stat().st_mtime_ns))
    new.replace(old)
    verify(tmp_path, files)
    assert read == ["a"]


def test_a_file_changed_just_now_is_not_remembered(tmp_path: Path, files: dict[str, ExpectedFile]) -> None:
    verify(tmp_path, files)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "a").unlink(), "a is missing: 100 bytes are expected; so there"),
        (lambda folder: (folder / "b").write_bytes(b"b"), "b is damaged: expected 100 bytes, found 1; so there"),
        (lambda folder: ((folder / "c").unlink(), os.mkfifo(folder / "c")), "c is not a regular file; so there"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, files: dict[str, ExpectedFile], damage: Callable[[Path], object], words: str
) -> None:
    damage(tmp_path / "set")
    with pytest.raises(CheckpointError, match=words):
        verify(tmp_path, files)


def _memory(content: bytes, mode: int = 0o600) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)
        path.chmod(mode)

    return write


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = [b"", b"{}", b"[[1]]", b"\xff", b'[["a",[1,2,3,4,5],"x"]]', b"[" * 100_000, b'[["a",[' + b"9" * 9999]


@pytest.mark.parametrize("damage", [*map(_memory, DAMAGES), _fifo])
def test_a_damaged_memory_means_hashing_again(
    tmp_path: Path, files: dict[str, ExpectedFile], read: list[str], damage: Callable[[Path], None]
) -> None:
    verify(tmp_path, files)
    (memory,) = (tmp_path / "cache").iterdir()
    damage(memory)
    verify(tmp_path, files)
    assert len(read) == 6
    verify(tmp_path, files)
    assert len(read) == 6


def test_a_memory_that_others_may_write_is_not_believed(
    tmp_path: Path, files: dict[str, ExpectedFile], read: list[str]
) -> None:
    verify(tmp_path, files)
    (memory,) = (tmp_path / "cache").iterdir()
    _memory(memory.read_bytes(), 0o620)(memory)
    verify(tmp_path, files)
    assert len(read) == 6
    assert memory.stat().st_mode & 0o777 == 0o600


def test_the_memory_keeps_the_newest(
    tmp_path: Path, files: dict[str, ExpectedFile], read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "REMEMBERED", 2)
    for name in files:
        verify(tmp_path, {name: files[name]})
    (memory,) = (tmp_path / "cache").iterdir()
    assert [Path(entry[0]).name for entry in json.loads(memory.read_text())] == ["b", "c"]


def test_a_file_counts_as_inspected_only_under_the_same_name(
    tmp_path: Path, files: dict[str, ExpectedFile], read: list[str]
) -> None:
    looked: list[bytes] = []

    def inspection(name: str) -> dict[str, Inspection]:
        return {"a": Inspection(name, lambda: lambda chunk: looked.append(bytes(chunk)))}

    def inspect(name: str) -> None:
        Verifier(tmp_path / "cache").verify(
            tmp_path / "set", {"a": files["a"]}, inspections=inspection(name) if name else None
        )

    inspect("ids below 10")
    assert looked == [b"a" * 100, b""]
    inspect("ids below 10")
    inspect("")
    assert len(read) == 1
    inspect("ids below 5")
    assert len(read) == 2


def test_digests_are_those_of_the_files(tmp_path: Path, files: dict[str, ExpectedFile], read: list[str]) -> None:
    paths = [tmp_path / "set" / name for name in files]
    verifier = Verifier(tmp_path / "cache", again=True)
    for _ in range(2):  # the second time this object knows them
        assert verifier.digests(paths) == [record.sha256 for record in files.values()]
    assert len(read) == 3


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, files: dict[str, ExpectedFile]) -> None:
    path = tmp_path / "set" / "a"

    def grow(chunk: memoryview) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    with pytest.raises(DataError, match="changed while it was read"):
        Verifier(tmp_path / "cache").verify(
            path.parent, {"a": files["a"]}, inspections={"a": Inspection("x", lambda: grow)}
        )


class Team:
    """Ranks in threads, so that what each reads can be told apart; hosts by name."""

    def __init__(self, hosts: list[str]) -> None:
        import threading

        self.hosts, self.barrier = hosts, threading.Barrier(len(hosts))
        self.values: list[Any] = [None] * len(hosts)

    def ranks(self, rank: int) -> verification.Ranks:
        def gather(value: Any) -> list[Any]:
            self.barrier.wait(10)
            self.values[rank] = value
            self.barrier.wait(10)
            return list(self.values)

        @contextmanager
        def agreed() -> Iterator[None]:
            text = None
            try:
                yield
            except DataError as error:
                text = str(error)
            for other in gather(text):
                if other is not None:
                    raise DataError(other)

        return verification.Ranks(rank, gather, agreed)

    def run(self, verify: Callable[[int, verification.Ranks], Any]) -> list[Any]:
        from concurrent.futures import ThreadPoolExecutor

        def one(rank: int) -> Any:
            try:
                return verify(rank, self.ranks(rank))
            except DataError as error:
                return str(error)

        with ThreadPoolExecutor(len(self.hosts)) as pool:
            return list(pool.map(one, range(len(self.hosts))))


def test_ranks_that_see_the_same_files_read_each_once(
    tmp_path: Path, files: dict[str, ExpectedFile], read: list[str]
) -> None:
    def verify(rank: int, ranks: verification.Ranks) -> list[str]:
        return Verifier(tmp_path / f"cache{rank}", ranks).digests([tmp_path / "set" / name for name in files])

    team = Team(["h"] * 3)
    assert team.run(verify) == [[record.sha256 for record in files.values()]] * 3
    assert sorted(read) == ["a", "b", "c"]
    # the first rank of the host wrote its memory, and what one rank knows all know
    assert team.run(verify) == [[record.sha256 for record in files.values()]] * 3
    assert len(read) == 3


def test_ranks_that_see_copies_read_theirs_and_all_hear_of_a_damaged_one(
    tmp_path: Path, files: dict[str, ExpectedFile], read: list[str]
) -> None:
    for rank in range(4):
        copy = tmp_path / f"host{rank // 2}"
        copy.mkdir(exist_ok=True)
        for name in files:
            (copy / name).write_bytes((tmp_path / "set" / name).read_bytes())

    def verify(rank: int, ranks: verification.Ranks) -> None:
        Verifier(tmp_path / f"cache{rank}", ranks, again=True).verify(tmp_path / f"host{rank // 2}", files)

    team = Team(["h"] * 4)
    assert team.run(verify) == [None] * 4
    assert sorted(read) == ["a", "a", "b", "b", "c", "c"]
    (tmp_path / "host1" / "b").write_bytes(b"x" * 100)
    errors = team.run(verify)
    assert len(set(errors)) == 1
    assert "host1/b is damaged" in errors[0]


def test_work_goes_round_the_hosts_and_by_size() -> None:
    hosts = ["h", "h", "i", "i"]
    order = verification._spread([0, 1, 2, 3], hosts)
    assert order == [0, 2, 1, 3]
    shares = verification._divide([5, 1, 1, 1, 4], order, dict.fromkeys(range(4), bytes(5)))
    assert shares == {0: [0], 2: [4], 1: [1, 3], 3: [2]}
    have = {0: bytes(2), 1: b"\1\0", 2: bytes(2), 3: bytes(2)}
    assert verification._divide([5, 1], order, have) == {0: [1], 1: [0], 2: [], 3: []}
    have = {0: b"\1\0", 1: b"\1\1", 2: b"\1\0", 3: b"\1\1"}
    assert verification._divide([5, 1], order, have) == {0: [], 1: [1], 2: [], 3: []}, "what all know nobody tells"
    empty = verification._divide([0] * 8, order, dict.fromkeys(range(4), bytes(8)))
    assert [len(share) for share in empty.values()] == [2] * 4


def test_what_ranks_tell_each_other_does_not_grow_with_what_they_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gather takes the largest value of any rank from every rank: at 1,000 ranks a thousand times that of one."""
    monkeypatch.setattr(verification, "_LEAST_AGE", -1e9)
    (tmp_path / "set").mkdir()
    paths = [tmp_path / "set" / f"{i:04}" for i in range(1000)]
    for path in paths:
        path.write_bytes(path.name.encode())
    digests = [hashlib.sha256(path.name.encode()).hexdigest() for path in paths]
    records = {path.name: ExpectedFile(4, digest) for path, digest in zip(paths, digests, strict=True)}
    hosts = ["h"] * 4 + ["i"] * 4
    team = Team(hosts)
    monkeypatch.setattr("socket.gethostname", lambda: "h")

    def largest(action: Callable[[Verifier], Any], caches: list[str]) -> tuple[int, list[Any]]:
        sent: list[int] = []

        def one(rank: int, ranks: verification.Ranks) -> Any:
            def gather(value: Any) -> list[Any]:
                sent.append(len(pickle.dumps(value)))
                return ranks.gather(value)

            return action(Verifier(tmp_path / caches[rank], verification.Ranks(rank, gather, ranks.synchronize_errors)))

        results = team.run(one)
        return max(sent), results

    cold, found = largest(lambda verifier: verifier.digests(paths), hosts)
    assert found == [digests] * 8
    assert cold < 1000 / 8 * 60
    warm, found = largest(lambda verifier: verifier.digests(paths), ["h"] * 8)
    assert found == [digests] * 8
    assert warm < 300
    replaced, found = largest(lambda verifier: verifier.digests(paths), ["h"] * 7 + ["new"])
    assert found == [digests] * 8
    assert replaced < 1000 / 7 * 60
    for caches in (["h"] * 8, ["h"] * 7 + ["newer"], ["newest"] * 8):
        size, found = largest(lambda verifier: verifier.verify(tmp_path / "set", records), caches)
        assert found == [None] * 8
        assert size < 300


def test_a_path_that_is_no_utf8_is_hashed_again(tmp_path: Path) -> None:
    """JSON cannot hold it: a run below such a folder could not be resumed."""
    names = str(tmp_path / "plain"), str(tmp_path / os.fsdecode(b"na\xefve"))
    seen = [verification.VerifiedFile(name, FileState(1, 2, 3, 4, 5), "0" * 64, "") for name in names]
    verification.write_verified(tmp_path / "memory.json", seen)
    assert [each.path for each in verification.read_verified(tmp_path / "memory.json")] == [names[0]]


def test_what_was_read_long_ago_is_read_again(
    tmp_path: Path, files: dict[str, ExpectedFile], read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify(tmp_path, files)
    verify(tmp_path, files)
    assert len(read) == 3
    now = time.time()
    monkeypatch.setattr(verification.time, "time", lambda: now + verification.LIFE + 1)
    verify(tmp_path, files)
    assert len(read) == 6
