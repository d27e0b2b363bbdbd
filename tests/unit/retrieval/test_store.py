"""Nothing is lost or encoded twice, and no vector is read that anything else decided."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from capt.pretrain.base.distributed import rank
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.engine.task import Role
from capt.pretrain.retrieval.encode import batches, embed, logger, rows_of
from capt.pretrain.retrieval.options import EncodeOptions
from capt.pretrain.retrieval.store import VectorIdentity, VectorStore
from tests.support import run_ranks
from tests.unit.retrieval.toy import ToyEncoder

IDENTITY = VectorIdentity("m", "t", "p", 32, "mean", 3)
ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
NAMES = [text_hash("a"), text_hash("b")]


def filled(root: Path, identity: VectorIdentity = IDENTITY) -> VectorStore:
    store = VectorStore(root, identity)
    store.add(NAMES, ROWS)
    store.close()
    return store


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    filled(tmp_path)
    again = VectorStore(tmp_path, IDENTITY)
    assert (again.vectors(NAMES[::-1]) == ROWS[::-1]).all()
    assert len(again) == 2
    with pytest.raises(DataError, match="missing"):
        again.vectors([text_hash("c")])


@pytest.mark.parametrize("field", [field.name for field in fields(VectorIdentity)])
def test_a_change_of_any_part_of_the_key_reads_nothing(field: str, tmp_path: Path) -> None:
    filled(tmp_path)
    value = {"length": 33, "dimension": 4, "dtype": "fp16", "precision": "bf16"}.get(field, "other")
    other = replace(IDENTITY, **{field: value})
    assert other.key != IDENTITY.key
    assert len(VectorStore(tmp_path, other)) == 0


def test_the_prompt_and_each_fact_of_an_encoder_are_in_its_key() -> None:
    keys = {
        ToyEncoder().identity("query").key,
        ToyEncoder().identity("document").key,
        ToyEncoder(13).identity("text").key,
    }
    for fact in ("model", "tokenizer", "pooling", "precision"):
        keys.add(ToyEncoder(**{fact: "other"}).identity("document").key)
    keys.add(ToyEncoder(length=7).identity("document").key)
    keys.add(ToyEncoder().identity("document", "fp16").key)
    assert len(keys) == 9


def test_fp16_holds_what_it_can(tmp_path: Path) -> None:
    half = replace(IDENTITY, dtype="fp16")
    store = filled(tmp_path, half)
    store.reload()
    assert (store.vectors(NAMES) == ROWS).all()
    assert sum(path.stat().st_size for path in store.folder.glob("*.rows")) == 12
    with pytest.raises(DataError, match="--dtype fp32"):
        store.add(NAMES, ROWS * 1e5)
    with pytest.raises(DataError, match="cannot hold"):
        store.add(NAMES, ROWS * np.nan)


@pytest.mark.parametrize("ending", ["rows", "ids"])
def test_a_torn_end_is_encoded_again(ending: str, tmp_path: Path) -> None:
    (path,) = filled(tmp_path).folder.glob(f"*.{ending}")
    os.truncate(path, path.stat().st_size - 1)
    again = VectorStore(tmp_path, IDENTITY)
    assert NAMES[0] in again
    assert NAMES[1] not in again


def test_zeros_at_the_end_are_encoded_again(tmp_path: Path) -> None:
    """A loss of power may leave the size of a file without its content."""
    (path,) = filled(tmp_path).folder.glob("*.rows")
    with path.open("r+b") as file:
        file.seek(12)
        file.write(bytes(12))
    again = VectorStore(tmp_path, IDENTITY)
    assert NAMES[0] in again
    assert NAMES[1] not in again


def test_damage_is_found_when_it_is_read(tmp_path: Path) -> None:
    (path,) = filled(tmp_path).folder.glob("*.rows")
    with path.open("r+b") as file:
        file.write(b"\x01")
    with pytest.raises(DataError, match="damaged"):
        VectorStore(tmp_path, IDENTITY).vectors(NAMES[:1])


@pytest.mark.parametrize("world", [1, 2])
def test_a_damaged_vector_is_said_and_encoded_again(
    world: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bits that were flipped anywhere: only those texts are encoded, and every later reader finds the new vectors."""
    texts = [f"word{i} " * (1 + i % 5) for i in range(300)]
    expected = rows_of(embed(ToyEncoder(), texts, "document", EncodeOptions(str(tmp_path))), texts)
    (path,) = tmp_path.rglob("*.rows")
    with path.open("r+b") as file:
        for row in (3, 13, 151):
            file.seek(row * 48 + 5)
            file.write(b"\xff")
    if world > 1:
        encoded = [text for part in run_ranks(_repaired, world, str(tmp_path), texts) for text in part]
    else:
        encoded = _repaired(str(tmp_path), texts)
        assert "3 stored vectors were damaged, and are encoded again" in caplog.text
    assert len(encoded) == 3
    caplog.clear()
    again = ToyEncoder()
    assert (rows_of(embed(again, texts, "document", EncodeOptions(str(tmp_path))), texts) == expected).all()
    assert again.encoded == []
    assert "damaged" not in caplog.text, "said once"


def _repaired(folder: str, texts: list[str]) -> list[str]:
    encoder = ToyEncoder()
    with mock.patch.object(logger, "info") as said:
        rows_of(embed(encoder, texts, "document", EncodeOptions(str(folder), tokens=64)), texts)
    if rank() == 0:
        assert said.call_args.args[1] == "3 texts", "those of all ranks"
    return encoder.encoded


def test_batches_are_dense() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(1, 50) for _ in range(500)]
    order = sorted(range(500), key=lengths.__getitem__, reverse=True)
    cut = list(batches(order, lengths, 128))
    assert [i for batch in cut for i in batch] == order
    assert all(lengths[batch[0]] * len(batch) <= 128 for batch in cut)
    padded = sum(lengths[batch[0]] * len(batch) for batch in cut)
    assert padded < 1.1 * sum(lengths)


def test_a_second_call_encodes_nothing(tmp_path: Path) -> None:
    texts = [f"text {i % 40}" for i in range(100)]
    first, second, third = ToyEncoder(), ToyEncoder(), ToyEncoder()
    embed(first, texts, "document", EncodeOptions(str(tmp_path)))
    embed(second, reversed(texts), "document", EncodeOptions(str(tmp_path)))
    store = embed(third, [*texts, "one more"], "document", EncodeOptions(str(tmp_path)))
    assert sorted(first.encoded) == sorted(set(texts))
    assert second.encoded == []
    assert third.encoded == ["one more"]
    assert (rows_of(store, texts[:3]) == ToyEncoder().encode(texts[:3], "document")).all()


class Slow(ToyEncoder):
    """An encoder that can be killed in the middle of its work."""

    def encode(self, texts: Sequence[str], role: Role) -> np.ndarray:
        time.sleep(0.002)
        return super().encode(texts, role)


def _work(folder: str, started: Any) -> None:
    started.set()
    texts = [f"word{i} " * (1 + i % 9) for i in range(3000)]
    embed(Slow(), texts, "document", EncodeOptions(str(folder), tokens=60))


def test_kills_at_ten_random_moments_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    """SIGKILL: the ids on disk are those of the texts, with one kill after another in the middle of the work."""
    generator, context = random.Random(4), multiprocessing.get_context("forkserver")
    kept = [0]
    for kill in range(11):
        started = context.Event()
        worker = context.Process(target=_work, args=(str(tmp_path), started))
        worker.start()
        assert started.wait(60)
        if kill < 10:
            time.sleep(generator.uniform(0.01, 0.12))
            worker.kill()
        worker.join()
        ids = sum(path.stat().st_size // 20 for path in tmp_path.rglob("*.ids"))
        assert ids >= kept[-1]
        kept.append(ids)
    assert worker.exitcode == 0
    assert kept[-1] == 3000, kept
    assert len(set(kept)) > 3, f"the kills hit nothing: {kept}"
    (folder,) = tmp_path.iterdir()
    rows = sum(path.stat().st_size // 48 for path in folder.glob("*.rows"))
    assert 3000 <= rows <= 3000 + 10 * 60  # rows of a batch whose ids were not written are never read


class Cheap(ToyEncoder):
    """Vectors of 4 kB that cost nothing to make."""

    def encode(self, texts: Sequence[str], role: Role) -> np.ndarray:
        hashes = np.frombuffer(b"".join(map(text_hash, texts)), dtype=np.uint64).reshape(len(texts), 2)
        return np.tile(hashes % 1000 + 1.0, (1, self.dimension // 2)).astype(np.float32)


def test_memory_does_not_grow_with_the_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the texts, 32 MB of vectors, take only the index more: the vectors are never in memory together."""
    from capt.pretrain.retrieval import encode, rankings
    from capt.pretrain.retrieval.search import by_id

    monkeypatch.setattr(encode, "WINDOW", 1000)
    monkeypatch.setattr(rankings, "BLOCK", 500)
    peaks = []
    for count in (2000, 8000):
        encoder, names = Cheap(1024), [str(i) for i in range(count)]
        order = by_id(names)
        tracemalloc.start()
        try:
            store = embed(encoder, names, "document", EncodeOptions(str(tmp_path / str(count))))
            queries = rows_of(store, names[:3])
            rankings.search(queries, iter(names), store, 10, order, rankings.Scoring())
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert sum(path.stat().st_size for path in store.folder.glob("*.rows")) == count * 4096
    assert peaks[0] < 30 << 20, peaks
    assert peaks[1] - peaks[0] < 6000 * 500, f"{(peaks[1] - peaks[0]) / 6000:.0f} bytes for each further text"
