from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base import locks
from capt.pretrain.base.arrays import Column
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.verification import Verifier
from capt.pretrain.data.shard_writer import write_shards
from capt.pretrain.data.shards import ShardSet, token_dtype
from tests.unit.data.doubles import ByteTokenizer, ListCorpus, documents

TEXTS = [f"Document {i}. " + "More text of it. " * (i * 7 % 400) for i in range(300)]


def verifier(folder: Path) -> Verifier:
    return Verifier(folder.parent / ".cache", again=True)


def build(folder: Path, texts: list[str] = TEXTS, **options: object) -> ShardSet:
    settings = {"tokenizer": ByteTokenizer(), "key": "k", "options": {}, "workers": 1, "shard_tokens": 10_000}
    settings["verifier"] = verifier(folder)
    return write_shards(ListCorpus(texts), folder=folder, **(settings | options))


def text_of(shards: ShardSet) -> list[str]:
    tokens = shards.read(0, shards.tokens)
    return [
        ByteTokenizer().decode(tokens[start : stop - 1])
        for start, stop in zip(shards.starts, shards.starts[1:], strict=False)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_text_of_many_files_has_a_manifest_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{"name": f"part-{i}", "format": ".txt", "bytes": i, "sha256": f"{i:064x}"} for i in range(400_000)]
    monkeypatch.setattr(ListCorpus, "contents", lambda self: parts)
    manifest = build(tmp_path / "s").manifest
    assert manifest.source[0]["name"] == "400000 files, the first part-0"
    assert manifest.source[0]["bytes"] == sum(range(400_000))
    assert (tmp_path / "s" / "manifest.json").stat().st_size < 1 << 20
    parts = parts[:10_000]
    assert build(tmp_path / "t").manifest.source == parts


@pytest.mark.parametrize("where", ["flock", "samestat"])
def test_a_lock_that_another_host_has_removed_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    module: Any = {"flock": locks.fcntl, "samestat": locks.os.path}[where]
    real, calls = getattr(module, where), []

    def stale(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*args)

    monkeypatch.setattr(module, where, stale)
    made: list[int] = []
    locks.make_once(tmp_path / "lock", lambda: bool(made), lambda: made.append(len(calls)))
    assert made == [2]
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("vocab_size", [261, 1 << 16, (1 << 16) + 1])
def test_documents_come_back_and_every_one_ends_with_eos(tmp_path: Path, vocab_size: int) -> None:
    shards = build(tmp_path / "s", tokenizer=ByteTokenizer(vocab_size))
    assert text_of(shards) == [text.rstrip() for text in TEXTS] == list(documents(ListCorpus(TEXTS)))
    assert shards.documents == len(TEXTS)
    assert shards.tokens == sum(len(text.rstrip()) + 1 for text in TEXTS)
    assert (shards.read(0, shards.tokens)[np.asarray(shards.starts[1:]) - 1] == 2).all()
    sizes = [path.stat().st_size for path in sorted(shards.folder.glob("shard-*.bin"))]
    width = 2 if vocab_size <= 1 << 16 else 4
    assert token_dtype(vocab_size).itemsize == width
    assert sizes[:-1] == [10_000 * width] * (len(sizes) - 1)
    assert sum(sizes) == shards.tokens * width
    assert len(sizes) > 10


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (9_990, 10_010), (9_999, 30_001), (10_000, 20_000), (7, 7)])
def test_reading_over_shard_borders(tmp_path: Path, start: int, stop: int) -> None:
    shards = build(tmp_path / "s")
    one = build(tmp_path / "one", shard_tokens=1 << 20)
    np.testing.assert_array_equal(shards.read(start, stop), one.read(0, one.tokens)[start:stop])
    assert len(one.read(one.tokens - 3, one.tokens + 9)) == 3


def test_result_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    for workers in (1, 2, 3):
        build(tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")


def test_manifest_tells_what_is_there(tmp_path: Path) -> None:
    build(tmp_path / "s", options={"split": "train"})
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("capt-token-shards", 1)
    assert (manifest["key"], manifest["options"]) == ("k", {"split": "train"})
    ids = {"bos": 0, "pad": 1, "eos": 2, "mask": 4, "special_ids": [0, 1, 2, 3, 4]}
    assert manifest["tokenizer"] == {"fingerprint": "b" * 64, "vocab_size": 261} | ids
    assert manifest["source"][0]["name"] == "list"
    for record in manifest["files"]:
        data = (tmp_path / "s" / record["name"]).read_bytes()
        assert (record["bytes"], record["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    listed = {record["name"] for record in manifest["files"]}
    assert listed == {path.name for path in (tmp_path / "s").iterdir()} - {"manifest.json"}


def test_documents_without_tokens_leave_no_trace(tmp_path: Path) -> None:
    class Silent(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
            return super().encode_batch([text.replace("silence", "") for text in texts])

    assert text_of(build(tmp_path / "s", ["a", "silence", "b"], tokenizer=Silent())) == ["a", "b"]
    with pytest.raises(DataError, match="no text in list"):
        build(tmp_path / "t", ["silence"], tokenizer=Silent())
    assert list(tmp_path.iterdir()) == [tmp_path / "s"]


@pytest.mark.parametrize("name", ["shard-00000.bin", "shard-00003.bin", "documents.bin"])
def test_damage_is_found_and_named(tmp_path: Path, name: str) -> None:
    folder = build(tmp_path / "s").folder
    path = folder / name
    whole = path.read_bytes()

    path.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=rf"{name} is damaged: expected {len(whole)} bytes, found {len(whole) - 2}"):
        ShardSet.open(folder)

    flipped = bytearray(whole)
    flipped[random.Random(0).randrange(len(whole))] ^= 1
    path.write_bytes(flipped)
    expected, found = (hashlib.sha256(data).hexdigest() for data in (whole, flipped))
    with pytest.raises(DataError, match=f"{name} is damaged: expected SHA-256 {expected}, found {found}"):
        ShardSet.open(folder, verifier(folder))

    path.unlink()
    with pytest.raises(DataError, match=rf"{name} is missing: {len(whole)} bytes are expected"):
        ShardSet.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:50], "manifest.json: not valid JSON"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "another version: version: Input should be 1"),
        (lambda text: text.replace("capt-token-shards", "other"), "another version: format"),
        (lambda text: text.replace('"documents": 300', '"documents": "many"'), "another version: documents"),
    ],
)
def test_damaged_manifest(tmp_path: Path, change: object, message: str) -> None:
    path = build(tmp_path / "s").folder / "manifest.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(DataError, match=message):
        ShardSet.open(tmp_path / "s")


def test_folder_without_manifest_is_no_shard_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a shard set: it has no manifest\.json"):
        ShardSet.open(tmp_path)
    build(tmp_path / "set" / "train")
    with pytest.raises(DataError, match=r"is not a shard set: it has no manifest\.json \(name .*train\)"):
        ShardSet.open(tmp_path / "set")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="already exists and is not empty"):
        build(tmp_path)


def test_other_tokenizer_is_refused_naming_both(tmp_path: Path) -> None:
    shards = build(tmp_path / "s")
    shards.check_tokenizer(ByteTokenizer())
    with pytest.raises(DataError, match=f"with the tokenizer {'b' * 64}, this job uses {'c' * 64}"):
        shards.check_tokenizer(ByteTokenizer(fingerprint="c" * 64))


def test_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gave the id 122, but its vocabulary has 100"):
        build(tmp_path / "s", ["tuu"], tokenizer=ByteTokenizer(vocab_size=100))
    assert list(tmp_path.iterdir()) == []


def test_existing_shards_are_used_or_refused(tmp_path: Path) -> None:
    first = build(tmp_path / "s")
    assert build(tmp_path / "s", ["never read"]).tokens == first.tokens
    with pytest.raises(DataError, match="s holds other shards than this job makes"):
        build(tmp_path / "s", key="other")
    (tmp_path / "s" / "shard-00001.bin").write_bytes(bytes(20_000))
    with pytest.raises(DataError, match=r"shard-00001\.bin is damaged"):
        build(tmp_path / "s")
    build(tmp_path / "s", verify=False)


def test_failure_leaves_nothing_and_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, values: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Column, "append", full)
    with pytest.raises(DataError, match="no space left for the shard set"):
        build(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".s.99.partial").mkdir()
    (tmp_path / ".s.99.partial" / "shard-00000.bin").write_bytes(b"half")
    (tmp_path / ".s.lock").touch()
    build(tmp_path / "s")
    assert {path.name for path in tmp_path.iterdir()} - {".cache"} == {"s"}  # .cache: what is remembered as verified


def test_processes_that_prepare_the_same_folder_do_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_build_and_log, args=(tmp_path / "s", tmp_path / "log")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "x"
    assert text_of(ShardSet.open(tmp_path / "s")) == [text.rstrip() for text in TEXTS]


def _build_and_log(folder: Path, log: Path) -> None:
    class Logged(ListCorpus):
        def pieces(self) -> object:
            with log.open("a") as out:
                out.write("x")
            threading.Event().wait(0.2)
            return super().pieces()

    write_shards(Logged(TEXTS), ByteTokenizer(), folder, key="k", options={}, workers=1, verifier=verifier(folder))


def test_opened_shards_travel_by_name(tmp_path: Path) -> None:
    shards = build(tmp_path / "s")
    shards.read(0, 10)
    data = pickle.dumps(shards)
    assert len(data) < 1000
    np.testing.assert_array_equal(pickle.loads(data).read(0, 10), shards.read(0, 10))


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    build(tmp_path / "s", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (300, 300)
    assert seen == sorted(seen)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """A document of 64 MB on one line costs the writer a few MB, and on a busy machine the allocator some more."""
    small, large = (_peak_memory(tmp_path / str(size), size) for size in (1 << 20, 1 << 26))
    assert large - small < 32 << 20


def _peak_memory(folder: Path, size: int) -> int:
    folder.mkdir()
    (folder / "a.txt").write_text("word " * (size // 5))
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=_write_and_measure, args=(folder, child))
    process.start()
    peak = parent.recv()
    process.join()
    return peak


def _write_and_measure(folder: Path, pipe: object) -> None:
    from capt.pretrain.data.files import FileCorpus

    corpus = FileCorpus([folder / "a.txt"], "text", None)
    write_shards(corpus, ByteTokenizer(), folder / "s", key="k", options={}, workers=1, verifier=verifier(folder))
    status = Path("/proc/self/status").read_text()
    pipe.send(int(status.split("VmHWM:")[1].split()[0]) * 1024)


HOSTILE_CHANGES = [
    ({"files": [{"name": "../../x.bin"}]}, "files.0.name: String should match pattern"),
    ({"files": [{"name": "/etc/passwd"}]}, "files.0.name: String should match pattern"),
    ({"files": [{"name": "shard-00000.bin\n"}]}, "files.0.name: String should match pattern"),
    ({"files": [{"name": "documents.bin"}]}, "shard-00000.bin must have 20000 bytes by tokens and documents"),
    ({"files": [{"bytes": 10}]}, "shard-00000.bin must have 20000 bytes by tokens and documents"),
    ({"files": [{"sha256": "x"}]}, "files.0.sha256: String should match pattern"),
    ({"files": []}, "0 files are listed; "),
    ({"tokens": 10**15}, "shards and documents.bin are needed"),
    ({"tokens": -1}, "tokens: Input should be greater than or equal to 1"),
    ({"tokens": 10**30}, "tokens: "),
    ({"tokens": 1.5}, "tokens: "),
    ({"documents": 10**15}, "documents cannot have"),
    ({"documents": "300"}, "documents: Input should be a valid integer"),
    ({"documents": 299}, "documents.bin must have 2400 bytes by tokens and documents"),
    ({"shard_tokens": 0}, "shard_tokens: Input should be greater than or equal to 1"),
    ({"tokenizer": {"vocab_size": 1 << 17}}, "shard-00000.bin must have 40000 bytes"),
    ({"tokenizer": {"vocab_size": 4}}, "tokenizer: a special id is not below vocab_size 4"),
    ({"tokenizer": {"bos": -1}}, "tokenizer.bos: "),
    ({"extra\n\x1b[31m": 1}, r"extra.*: Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE_CHANGES)
def test_a_manifest_that_does_not_fit_itself_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = build(tmp_path / "s").folder / "manifest.json"
    path.write_text(json.dumps(_merged(json.loads(path.read_text()), change)))
    with pytest.raises(DataError, match=message) as raised:
        ShardSet.open(tmp_path / "s")
    assert str(raised.value).isprintable()


def _merged(value: object, change: object) -> object:
    if isinstance(value, dict) and isinstance(change, dict):
        return value | {key: _merged(value.get(key), part) for key, part in change.items()}
    if isinstance(value, list) and isinstance(change, list) and change:
        return [_merged(value[0], change[0]), *value[1:]]
    return change


def _rewrite(folder: Path, name: str, content: bytes) -> None:
    """Put ``content`` into a file of a shard set, with a manifest that says so."""
    path = folder / "manifest.json"
    (folder / name).write_bytes(content)
    manifest = json.loads(path.read_text())
    for file in manifest["files"]:
        if file["name"] == name:
            file["sha256"] = hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(manifest))


def test_ids_outside_the_vocabulary_are_found(tmp_path: Path) -> None:
    folder = build(tmp_path / "s").folder
    _rewrite(folder, "shard-00001.bin", np.array([0, 300] + [5] * 9_998, dtype="<u2").tobytes())
    with pytest.raises(
        DataError, match=r"shard-00001\.bin is damaged: it holds the id 300, but its vocabulary has 261"
    ):
        ShardSet.open(folder, verifier(folder))


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([1, 50, 100], "documents must begin at 0"),
        ([0, 150, 100], "documents must begin at 0 and follow each other"),
        ([0, 0, 100], "documents must begin at 0 and follow each other"),
        ([0, 50, 101], "it ends at token 101, manifest.json says 100"),
        ([0, 50, 99], "it ends at token 99, manifest.json says 100"),
    ],
)
def test_documents_lie_end_to_end(tmp_path: Path, starts: list[int], message: str) -> None:
    folder = build(tmp_path / "s", ["x" * 49, "y" * 49]).folder
    _rewrite(folder, "documents.bin", np.array(starts, dtype="<i8").tobytes())
    with pytest.raises(DataError, match=message):
        ShardSet.open(folder, verifier(folder))


def test_a_shard_that_shrinks_under_the_job_ends_the_read(tmp_path: Path) -> None:
    shards = build(tmp_path / "s")
    (tmp_path / "s" / "shard-00001.bin").write_bytes(b"\5\0")
    with pytest.raises(DataError, match=r"shard-00001\.bin ends before token 10001"):
        shards.read(0, shards.tokens)
