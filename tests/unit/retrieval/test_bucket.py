"""Vectors in a bucket (moto's S3 on the loopback): machines come and go, and nothing that was uploaded is lost, encoded
twice, or believed when it was changed."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base import stores
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.base.stores import tree
from capt.pretrain.engine.task import Role
from capt.pretrain.retrieval import bucket as room
from capt.pretrain.retrieval.bucket import BucketVectors
from capt.pretrain.retrieval.encode import embed, rows_of
from capt.pretrain.retrieval.options import EncodeOptions
from capt.pretrain.retrieval.sources import SourceOptions, find_sources, read_sources
from capt.pretrain.retrieval.store import ID, VectorIdentity, VectorStore
from tests.support import run_capt, run_ranks, start_forked
from tests.unit.data.faulty import FaultyStore, faulty_store
from tests.unit.data.s3 import s3_bucket
from tests.unit.retrieval.toy import ToyEncoder, write_beir, write_sentence_folder

KILLS = int(os.environ.get("CAPT_RETRIEVAL_KILLS", "2"))
TEXTS = [f"word{i} " * (1 + i % 9) for i in range(100 + 200 * KILLS)]
BLOCK = 50 * 48  # bytes of fifty vectors
IDENTITY = VectorIdentity("m", "t", "p", 32, "mean", 3)
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
NAMES = [text_hash(each) for each in "abcd"]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


class Logged(ToyEncoder):
    """An encoder that writes down what it is about to encode, and after ``stop`` texts waits to be killed."""

    def __init__(self, log: Path, stop: int) -> None:
        super().__init__()
        self._log, self._stop = log, stop

    def encode(self, texts: Sequence[str], role: Role) -> np.ndarray:
        if len(self.encoded) >= self._stop:
            time.sleep(600)
        with self._log.open("a") as file:
            file.writelines(text_hash(text).hex() + "\n" for text in texts)
        return super().encode(texts, role)


def test_documents_of_a_search_are_read_from_a_bucket(bucket: str) -> None:
    """A folder there, a pattern, and the corpus of a BEIR folder."""
    files = {"docs/a.txt": "a text\n", "docs/in/b.jsonl": '{"_id": "b", "text": "of a row"}\n', "docs/c.bin": "none"}
    files |= {
        "beir/corpus.jsonl": '{"_id": "d", "text": "judged"}\n',
        "beir/queries.jsonl": '{"_id": "q", "text": "?"}\n',
    }
    for name, text in files.items():
        stores.put_bytes(text.encode(), f"{bucket}/search/{name}")
    for source, names in (("docs", ["docs/a.txt", "b"]), ("docs/*.txt", ["docs/a.txt"]), ("beir", ["d"])):
        found = read_sources(find_sources([f"{bucket}/search/{source}"]), SourceOptions())
        assert [each.name.removeprefix(f"{bucket}/search/") for each in found] == names


def _encode(url: str, machine: str, environment: Mapping[str, str], stop: int = 1 << 30) -> int:
    """Encode the texts on a machine, whose cache and log are new; the number of vectors in the store."""
    os.environ.update(environment, XDG_CACHE_HOME=machine)
    room.BLOCK_BYTES = BLOCK
    Path(machine).mkdir(exist_ok=True)
    store = embed(Logged(Path(machine) / "log", stop), TEXTS, "document", EncodeOptions(url, tokens=60))
    return len(store)


def _encoded(machine: Path) -> list[str]:
    return (machine / "log").read_text().split() if (machine / "log").exists() else []


def _blocks(url: str) -> int:
    return sum(file.name.endswith(".ids") for file in tree(url))


def _uploaded(url: str) -> set[str]:
    """The texts of the blocks that are whole."""
    found: set[str] = set()
    for file in tree(url):
        if file.name.endswith(".ids"):
            ids = np.frombuffer(stores.read_small(file.url), dtype=ID)
            found |= {bytes(text).hex() for text in ids["text"]}
    return found


def test_machines_that_are_killed_encode_nothing_that_is_in_the_bucket(bucket: str, tmp_path: Path) -> None:
    """Every machine begins with an empty cache; the last one is of two ranks. A small cache reads what a folder has."""
    url, draw = f"{bucket}/vectors", random.Random(5)
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for kill in range(KILLS):
        machine, before = tmp_path / f"machine-{kill}", _uploaded(url)
        aim = _blocks(url) + draw.randint(1, 2)
        process = start_forked(_encode, url, str(machine), environment, 200)
        while process.is_alive() and _blocks(url) < aim:
            time.sleep(0.1)
        time.sleep(draw.uniform(0, 0.2))
        process.kill()
        process.join()
        assert process.exitcode == -9
        assert not before & set(_encoded(machine)), "encoded again although it was uploaded"
        assert before < _uploaded(url), "what was uploaded stays, and more has come"
    before, last = _uploaded(url), tmp_path / "last"
    assert run_ranks(_encode, 2, url, str(last), environment) == [len(TEXTS)] * 2
    assert len(_encoded(last)) == len(set(_encoded(last))) == len(TEXTS) - len(before)
    assert not before & set(_encoded(last))
    local = rows_of(embed(ToyEncoder(), TEXTS, "document", EncodeOptions(str(tmp_path / "here"), tokens=60)), TEXTS)
    limit = 3 * (BLOCK + 60 * 48)
    small = BucketVectors(url, ToyEncoder().identity("document"), tmp_path / "small", limit)
    for start in range(0, len(TEXTS), 250):
        assert (rows_of(small, TEXTS[start : start + 250]) == local[start : start + 250]).all()
        assert sum(path.stat().st_size for path in (tmp_path / "small/stored").glob("*.bin")) <= limit
    assert len(BucketVectors(url, ToyEncoder().identity("query"), tmp_path / "small", limit)) == 0, "another prompt"
    files = {file.name: file.size for file in tree(small.url)}
    listed = json.loads(stores.read_small(f"{small.url}/index.json"))
    assert listed == {name: files[name] for name in listed}
    assert sum(size for name, size in listed.items() if name.endswith(".ids")) == len(TEXTS) * ID.itemsize


def test_the_command_line(bucket: str, tmp_path: Path) -> None:
    """A second machine evaluates what the first one has encoded; no credential is written."""
    model, beir, url = write_sentence_folder(tmp_path / "model"), write_beir(tmp_path / "beir"), f"{bucket}/cli"

    def capt(*arguments: str, machine: str, code: int = 0) -> tuple[str, str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / machine)}
        done = run_capt(*arguments, cwd=tmp_path, env=environment, warm=False)
        assert done.returncode == code, done.stderr
        return done.stdout, done.stderr

    given = ["encode", str(model), "--text", str(beir), "--out", url, "--json"]
    said, log = capt(*given, machine="first")
    assert [(each["encoded"], each["stored"]) for each in json.loads(said)["sources"]] == [(60, 60), (9, 9)]
    assert all(each["folder"].startswith(f"{url}/") for each in json.loads(said)["sources"])
    assert "encoded 60 texts" in log
    said, log = capt("evaluate", str(model), "--retrieval", str(beir), "--store", url, "--json", machine="second")
    assert "ndcg@10" in said
    assert "encoded" not in log
    texts = [json.loads(line)["text"] for line in (beir / "corpus.jsonl").read_text().splitlines()]
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"query": f"about {text}", "pos": [text]}) + "\n" for text in texts[:8])
    )
    mine = ["mine", "--pairs", "pairs.jsonl", "--model", str(model), "--number", "2", "--last", "6", "--short", "keep"]
    _, log = capt(*mine, "--store", url, "--out", "of-a-bucket", machine="second")
    assert "encoded 8 texts" in log, "the queries alone: documents are in the bucket"
    capt(*mine, "--store", "here", "--out", "of-a-folder", machine="second")
    assert (tmp_path / "of-a-bucket/pairs.jsonl").read_text() == (tmp_path / "of-a-folder/pairs.jsonl").read_text()
    _, log = capt(*given, "--cache-bytes", "1KB", machine="third", code=2)
    assert "--cache-bytes 1,000: a file of s3://bucket/cli/" in log
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"hunter2" not in written


@pytest.fixture
def store() -> Iterator[type[FaultyStore]]:
    with faulty_store() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "WRITABLE", ("faulty",))
        yield made


def _filled(tmp_path: Path, identity: VectorIdentity = IDENTITY, rows: np.ndarray = ROWS) -> BucketVectors:
    """Two blocks of two vectors in a store that is a folder."""
    made = BucketVectors(f"faulty:/{tmp_path}/there", identity, tmp_path / "cache", 1 << 20)
    for start in (0, 2):
        made.add(NAMES[start : start + 2], rows[start : start + 2])
        made.close()
    made.reload()
    made.finish(4)
    return made


@pytest.mark.parametrize("field", [field.name for field in fields(VectorIdentity)])
def test_a_change_of_any_part_of_the_key_reads_nothing(field: str, tmp_path: Path, store: type[FaultyStore]) -> None:
    made = _filled(tmp_path)
    assert (made.vectors(NAMES[::-1]) == ROWS[::-1]).all()
    changed: dict[str, Any] = {"length": 33, "dimension": 4, "dtype": "fp16", "precision": "bf16"}
    other = replace(IDENTITY, **{field: changed.get(field, "other")})
    assert len(BucketVectors(f"faulty:/{tmp_path}/there", other, tmp_path / "cache", 1 << 20)) == 0


def test_a_copy_of_the_store_is_a_folder_of_vectors(tmp_path: Path, store: type[FaultyStore]) -> None:
    half = replace(IDENTITY, dtype="fp16")
    _filled(tmp_path, half)
    assert (VectorStore(tmp_path / "there", half).vectors(NAMES) == ROWS).all()


def _file(tmp_path: Path, made: BucketVectors, text: bytes, ending: str) -> Path:
    (path,) = (
        path for path in tmp_path.glob(f"there/*/*.{ending}") if text in path.with_suffix(".ids").read_bytes()
    )  # fmt: skip
    return path


@pytest.mark.parametrize("what", ["truncated", "removed", "no ids"])
def test_a_block_that_is_not_whole_is_encoded_again(
    what: str, tmp_path: Path, store: type[FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    path = _file(tmp_path, _filled(tmp_path), NAMES[0], "ids" if what == "no ids" else "rows")
    if what == "truncated":
        os.truncate(path, 5)
    else:
        path.unlink()
    again = BucketVectors(f"faulty:/{tmp_path}/there", IDENTITY, tmp_path / "cache", 1 << 20)
    assert [name in again for name in NAMES] == [False, False, True, True]
    assert ("the block is not whole" in caplog.text) == (what != "no ids")
    again.add(NAMES[:2], ROWS[:2])
    again.close()
    again.reload()
    assert (again.vectors(NAMES) == ROWS).all()


def test_a_block_that_takes_the_place_of_one_of_its_size_is_listed(tmp_path: Path, store: type[FaultyStore]) -> None:
    made = _filled(tmp_path)
    damaged = [_file(tmp_path, made, NAMES[0], ending) for ending in ("rows", "ids")]
    for path in damaged:
        path.unlink()
    again = BucketVectors(f"faulty:/{tmp_path}/there", IDENTITY, tmp_path / "cache", 1 << 20)
    again.add(NAMES[1::-1], ROWS[1::-1])
    again.close()
    again.reload()
    again.finish(2)
    folder = damaged[0].parent
    listed = json.loads((folder / "index.json").read_text())
    assert {path.name for path in (*folder.glob("*.rows"), *folder.glob("*.ids"))} <= set(listed)
    assert damaged[0].name not in listed


@pytest.mark.parametrize("ending", ["rows", "ids"])
def test_changed_bytes_are_not_believed(ending: str, tmp_path: Path, store: type[FaultyStore]) -> None:
    path = _file(tmp_path, _filled(tmp_path), NAMES[2], ending)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match=rf"{path.name}: expected SHA-256 .*remove the block .* encoded again"):
        BucketVectors(f"faulty:/{tmp_path}/there", IDENTITY, tmp_path / "other", 1 << 20).vectors(NAMES)


def test_an_upload_that_fails_is_said_and_no_block_is_promised(
    tmp_path: Path, store: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, pipe = _filled(tmp_path), FaultyStore.pipe_file

    def fail(self: FaultyStore, path: str, *given: Any, **keys: Any) -> None:
        if path.endswith(".ids"):
            raise OSError("503 Slow Down")
        pipe(self, path, *given, **keys)

    monkeypatch.setattr(FaultyStore, "pipe_file", fail)
    made.add([text_hash("e")], ROWS[:1])
    with pytest.raises(DataError, match=r"\.ids could not be written in 3 attempts: OSError: 503 Slow Down"):
        made.close()
    again = BucketVectors(f"faulty:/{tmp_path}/there", IDENTITY, tmp_path / "cache", 1 << 20)
    assert len(again) == 4


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("https://host/vectors", "such a store is only read; known: s3://"),
        ("s3://user:hunter2@bucket/x", "holds a user, a password or a signature"),
        ("ftp://host/x", "unknown store"),
    ],
)
def test_places_that_vectors_cannot_be_written_to(place: str, says: str) -> None:
    from capt.launcher.commands.options import written_place

    with pytest.raises(ConfigError, match=says) as error:
        written_place(place)
    assert "hunter2" not in str(error.value)
