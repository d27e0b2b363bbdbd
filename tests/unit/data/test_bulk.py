from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.leases import Leases
from capt.pretrain.base.overlap import same_text
from capt.pretrain.data import bulk, parts
from capt.pretrain.data import prepare as prepare_module
from capt.pretrain.data.config import DataConfig
from capt.pretrain.data.filters import DocumentFilters
from capt.pretrain.data.paths import resolve_files
from capt.pretrain.data.prepare import prepare, prepare_folder
from capt.pretrain.data.shards import ShardSet
from capt.pretrain.data.units import units_of
from tests.unit.data.doubles import ByteTokenizer
from tests.unit.data.faulty import damaged, faulty_store

WORDS = ("river", "stone", "light", "window", "garden", "bridge", "paper", "music", "winter", "letter", "ocean")


def texts(count: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    return [
        "\n".join(" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) + f" {i}." for _ in range(draw.randint(1, 9)))
        for i in range(count)
    ]


def write_text(path: Path) -> None:
    draw = random.Random(2)
    blank = ["\n\n", "\n \n", "\r\n\r\n", "\n\n\n\n", "\n" + " " * 2000 + "\n\ufeff", "\n\n\ufeff"]
    with path.open("w", newline="") as file:
        for text in texts(150):
            file.write(text + draw.choice(blank))
        file.write("one long document without any blank line\n" * 200)


def write_lines(path: Path) -> None:
    rows = [{"text": text if i % 11 else None} for i, text in enumerate(texts(150, 3))]
    rows.insert(40, {"text": "a row that is longer than several units. " * 200})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts(150, 4)}), path, row_group_size=20)


def write_wiki(path: Path) -> None:
    path.write_text(
        "".join(f" \n = Title {i} = \n \n {text} \n \n == Part == \n" for i, text in enumerate(texts(80, 5)))
    )


def write_packed(path: Path) -> None:
    path.write_bytes(gzip.compress("\n\n".join(texts(60, 6)).encode()))


def write_csv(path: Path) -> None:
    quoted = (text.replace('"', '""') for text in texts(60, 7))
    path.write_text("number,text\r\n" + "".join(f'{i},"{text}"\r\n' for i, text in enumerate(quoted)))


FORMS = {
    "a.txt": write_text,
    "b.jsonl": write_lines,
    "c.parquet": write_parquet,
    "d.tokens": write_wiki,
    "e.txt.gz": write_packed,
    "f.csv": write_csv,
}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("[tv]*/*")}


def config(files: Path | list[Path], cache: Path, **keys: object) -> DataConfig:
    named = [str(path) for path in files] if isinstance(files, list) else str(files)
    return DataConfig(**({"files": named, "cache": cache, "workers": 1, "validation_fraction": 0.1} | keys))


@contextmanager
def small_shards() -> Iterator[None]:
    """Plans with shards of 5,000 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        prepare_plan = bulk.prepare_plan
        patch.setattr(
            prepare_module, "prepare_plan", lambda plan, *given: prepare_plan(replace(plan, shard_tokens=5000), *given)
        )
        yield


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for name, write in FORMS.items():
        write(folder / name)
    return folder


@pytest.mark.parametrize("start", [None, "one|river", " = [^=]"])
def test_the_bytes_are_those_of_one_pass(corpus: Path, tmp_path: Path, start: str | None) -> None:
    data = config(corpus / "*", tmp_path / "cache", document_start=start)
    made = prepare_folder(data, ByteTokenizer(), tmp_path / "out", unit_bytes=5000)
    assert set(made) == {"train", "validation"}
    for split, shards in made.items():
        once = prepare(data, ByteTokenizer(), split)
        assert once is not None
        assert {file.name: file.read_bytes() for file in once.folder.iterdir()} == {
            file.name: file.read_bytes() for file in shards.folder.iterdir()
        }
    assert made["train"].rows_without_text == 14
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["card.json", "card.md", "train", "validation"]


def documents(shards: ShardSet | None) -> list[str]:
    assert shards is not None
    read = ByteTokenizer().decode
    borders = shards.starts.tolist()
    return [read(shards.read(begin, end)) for begin, end in itertools.pairwise(borders)]


def test_filters_leave_the_same_documents_whatever_the_units(tmp_path: Path) -> None:
    base = [text.replace("\n", " ") for text in texts(60, 8)]
    rows = [*base, "short", *(f"  {text.upper()}  " for text in base[:9]), *(text + " end" for text in base[9:14])]
    rows += ["spam spam eggs " * 40, "ein Satz über das Wetter und die Berge im Süden", base[20]]
    random.Random(4).shuffle(rows)
    (tmp_path / "rows|1.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    filters = DocumentFilters(min_words=3, max_words=100, exact=True)
    seen: set[str] = set()
    expected = []
    for row in rows:  # the same, written down once more
        if 3 <= len(row.split()) <= 100 and same_text(row) not in seen:
            seen.add(same_text(row))
            expected.append(row.rstrip())
    results = []
    for unit_bytes in (2000, 1 << 20):
        out = tmp_path / f"out{unit_bytes}"
        data = config(tmp_path / "rows|1.jsonl", tmp_path / "cache", validation_fraction=0)
        made = prepare_folder(data, ByteTokenizer(), out, filters=filters, license="CC0", unit_bytes=unit_bytes)
        assert documents(made["train"]) == expected
        card = json.loads((out / "card.json").read_text())
        results.append([(step["name"], step["removed"], step["left"]) for step in card["steps"]])
        assert card["documents"] == len(rows)
        assert card["license"] == "CC0"
        assert results[-1][-1][2] == card["splits"]["train"]["documents"] == len(expected)
        assert all(step["example"] for step in card["steps"])
        duplicate, stays = (text.partition(": ")[2] for text in card["steps"][-1]["example"])
        assert same_text(duplicate)[:40] == same_text(stays)[:40]
        assert "| exact | `True` | " in (out / "card.md").read_text()
        assert r"rows\|1.jsonl | " in (out / "card.md").read_text()  # a name that would end its cell
        with pytest.raises(DataError, match="train holds other shards than this job makes"):
            prepare_folder(data, ByteTokenizer(), out, filters=DocumentFilters(exact=True), unit_bytes=unit_bytes)
    assert results[0] == results[1]
    assert results[0][:2] == [("min_words", 1, len(rows) - 1), ("max_words", 1, len(rows) - 2)]


def test_twenty_kills_at_random_moments_change_nothing(corpus: Path, tmp_path: Path) -> None:
    data = config(corpus / "*", tmp_path / "cache")
    filters = DocumentFilters(min_words=2, exact=True)
    made = prepare_folder(data, ByteTokenizer(), tmp_path / "whole", filters=filters, unit_bytes=20_000)
    expected = content(tmp_path / "whole")
    begin = time.monotonic()
    prepare_folder(data, ByteTokenizer(), tmp_path / "again", filters=filters, unit_bytes=20_000)
    needed = time.monotonic() - begin
    draw, parts, kills, out = random.Random(6), {}, 0, tmp_path / "killed"
    while kills < 20:
        if (pid := os.fork()) == 0:
            try:
                prepare_folder(data, ByteTokenizer(), out, filters=filters, unit_bytes=20_000)
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0.0, 0.3 * needed))
        os.kill(pid, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            kills += 1
        if (out / "train").exists():  # it was as fast as the kill: from the beginning
            assert content(out) == expected
            assert list(out.glob(".card*")) == []
            out, parts = tmp_path / f"killed{kills}", {}
            continue
        found = {path: path.stat().st_ino for path in out.glob(".work/*/parts/[0-9]*")}
        assert found.items() >= parts.items(), "a finished part was made again"
        parts = found
    prepare_folder(data, ByteTokenizer(), out, filters=filters, unit_bytes=20_000)
    assert content(out) == expected
    assert made["train"].documents > 300


@pytest.mark.timeout(120)
def test_several_processes_give_the_bytes_of_one(corpus: Path, tmp_path: Path) -> None:
    data = config(corpus / "*", tmp_path / "cache")
    prepare_folder(data, ByteTokenizer(), tmp_path / "one", filters=DocumentFilters(exact=True), unit_bytes=10_000)
    several = config(corpus / "*", tmp_path / "cache", workers=2)
    prepare_folder(several, ByteTokenizer(), tmp_path / "two", filters=DocumentFilters(exact=True), unit_bytes=10_000)
    assert content(tmp_path / "two") == content(tmp_path / "one")
    (corpus / "b.jsonl").write_text('{"text": "a"}\n' * 500 + "no json\n")
    with pytest.raises(DataError, match=r"b\.jsonl, line \d+ after byte [\d,]+, column 1: not JSON"):
        prepare_folder(several, ByteTokenizer(), tmp_path / "bad", unit_bytes=5000)


def test_two_hosts_give_the_bytes_of_one_though_one_of_them_is_lost(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts share nothing but the folder: what tells that one is gone is a lease that nobody touches any longer."""
    monkeypatch.setattr(bulk, "Leases", partial(Leases, beat=0.2, expires=2.0))
    prepare_folder(config(corpus / "*", tmp_path / "cache"), ByteTokenizer(), tmp_path / "one", unit_bytes=10_000)
    log = tmp_path / "log"

    def start(name: str, dies: bool) -> int:
        if pid := os.fork():
            return pid
        write, made = bulk.write_part, 0

        def logged(folder: Path, *given: Any, **keys: Any) -> Any:
            nonlocal made
            made += 1
            if dies and made == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            record = write(folder, *given, **keys)
            time.sleep(0.1)
            with log.open("a") as file:
                file.write(f"{name} {folder.name.split('.')[1]}\n")
            return record

        try:
            socket.gethostname, bulk.write_part = (lambda: name), logged
            data = config(corpus / "*", tmp_path / f"cache-{name}")
            prepare_folder(data, ByteTokenizer(), tmp_path / "two", unit_bytes=10_000)
            os._exit(0)
        finally:
            os._exit(1)

    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (start("a", True), start("b", False))]
    assert ends == [-signal.SIGKILL, 0]
    assert content(tmp_path / "two") == content(tmp_path / "one")
    made = [line.split() for line in log.read_text().splitlines()]
    assert sum(host == "a" for host, _ in made) == 2, made
    assert len({part for _, part in made}) == len(made), f"a part was made twice: {made}"


def test_a_hub_set_is_read_where_it_lies(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for i in range(2):
        table = pyarrow.table({"text": texts(30, 10 + i), "id": list(range(30))})
        pyarrow.parquet.write_table(table, folder / f"train-{i:05}-of-00002.parquet", row_group_size=10)
    data = DataConfig(name=str(folder), cache=tmp_path / "cache", workers=1, validation_fraction=0)
    made = prepare_folder(data, ByteTokenizer(), tmp_path / "out", unit_bytes=500)
    assert documents(made["train"]) == [text.rstrip() for i in range(2) for text in texts(30, 10 + i)]
    assert [part["format"] for part in made["train"].manifest.source] == [".parquet"] * 2


def test_a_saved_set_takes_filters_too(tmp_path: Path) -> None:
    rows = ["a b c", "d", "A  b c", "e f g", None]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "saved")
    data = DataConfig(name=str(tmp_path / "saved"), cache=tmp_path / "cache", workers=1, validation_fraction=0)
    made = prepare_folder(data, ByteTokenizer(), tmp_path / "out", filters=DocumentFilters(min_words=2, exact=True))
    assert documents(made["train"]) == ["a b c", "e f g"]
    assert made["train"].rows_without_text == 1
    with pytest.raises(DataError, match=r"no text in .* that the filters leave"):
        prepare_folder(data, ByteTokenizer(), tmp_path / "none", filters=DocumentFilters(min_words=9))


def test_a_file_without_text_is_named(corpus: Path, tmp_path: Path) -> None:
    (corpus / "z.txt").write_text(" \n" * 3000)
    data = config(corpus / "[ez].txt*", tmp_path / "cache")
    with pytest.raises(DataError, match=r"z\.txt holds no text"):
        prepare_folder(data, ByteTokenizer(), tmp_path / "out", unit_bytes=1500)


def test_a_folder_in_the_place_of_a_split_is_refused_before_the_work(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "train").mkdir(parents=True)
    (tmp_path / "out" / "train" / "notes").touch()
    with pytest.raises(DataError, match=r"out/train already exists and is not empty"):
        prepare_folder(config(corpus / "a.txt", tmp_path / "cache"), ByteTokenizer(), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]


def test_a_vanished_file_is_said_at_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hash_file(file: Path, *_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))

    monkeypatch.setattr(bulk, "hash_file", hash_file)
    monkeypatch.setattr(
        bulk.PreparationWorker, "load_hashes", lambda *_: pytest.fail("the whole corpus was read again")
    )
    with pytest.raises(FileNotFoundError, match=r"a\.txt"):
        prepare_folder(config(corpus / "a.txt", tmp_path / "cache"), ByteTokenizer(), tmp_path / "out")


def small_files(folder: Path, count: int) -> list[str]:
    """Files of a few lines, every eleventh with rows without text; the texts."""
    folder.mkdir()
    made = []
    for number, text in enumerate(texts(count, 11)):
        rows: list[str | None] = [text, *([None] * 2 if number % 11 == 0 else []), f"the end of {number}"]
        (folder / f"{number:04}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        made += [row.rstrip() for row in rows if row is not None]
    return made


def test_small_files_share_a_unit(tmp_path: Path) -> None:
    """A unit costs files, syncs and a lease, whatever its size. Each file keeps its own record."""
    expected = small_files(tmp_path / "text", 300)
    (tmp_path / "text" / "0150.txt").write_text("a large file between small ones\n\n" * 2000)
    files = resolve_files([str(tmp_path / "text" / "*")], "data.files")
    units = units_of(files, None, 20_000)
    assert [source.file for unit in units for source in unit.sources if unit.span is None] == [
        file for file in files if file.name != "0150.txt"
    ]
    assert all(unit.bytes <= 20_000 and len(unit.sources) <= 64 for unit in units)
    assert sum(unit.span is None for unit in units) <= 10
    (tmp_path / "text" / "0150.txt").unlink()
    data = config(tmp_path / "text" / "*", tmp_path / "cache", validation_fraction=0)
    made = prepare_folder(data, ByteTokenizer(), tmp_path / "out", unit_bytes=20_000)
    assert documents(made["train"]) == expected
    without = {part["name"]: part.get("rows_without_text", 0) for part in made["train"].manifest.source}
    assert without == {
        str(file): 2 * (number % 11 == 0) for number, file in enumerate(sorted((tmp_path / "text").iterdir()))
    }
    once = prepare(data, ByteTokenizer(), "train")
    assert once is not None
    assert content(tmp_path / "out") == {f"train/{path.name}": path.read_bytes() for path in once.folder.iterdir()}


def test_of_small_files_in_a_unit_the_right_one_is_named(tmp_path: Path) -> None:
    small_files(tmp_path / "text", 40)
    twice = "a document that is in two files, word by word"
    for name in ("0007.jsonl", "0031.jsonl"):
        with (tmp_path / "text" / name).open("a") as file:
            file.write(json.dumps({"text": twice}) + "\n")
    data = config(tmp_path / "text" / "*", tmp_path / "cache", validation_fraction=0)
    prepare_folder(data, ByteTokenizer(), tmp_path / "out", filters=DocumentFilters(exact=True))
    (step,) = json.loads((tmp_path / "out" / "card.json").read_text())["steps"]
    assert step["removed"] == 1
    assert [text.partition(": ")[0].rpartition("/")[2] for text in step["example"]] == ["0031.jsonl", "0007.jsonl"]
    (tmp_path / "text" / "0020.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(DataError, match=r"0020\.jsonl holds no text"):
        prepare_folder(data, ByteTokenizer(), tmp_path / "again")
    (tmp_path / "text" / "0020.jsonl").write_text("no json\n")
    with pytest.raises(DataError, match=r"0020\.jsonl, line 1, column 1: not JSON"):
        prepare_folder(data, ByteTokenizer(), tmp_path / "again")


@pytest.mark.parametrize("when", ["hash", "part"])
def test_a_small_file_that_changes_while_it_is_prepared_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    small_files(tmp_path / "text", 9)
    name = {"hash": "hash_file", "part": "write_part"}[when]
    original, changed = getattr(bulk, name), tmp_path / "text" / "0005.jsonl"

    def changing(*given: Any, **keys: Any) -> Any:
        result = original(*given, **keys)
        os.utime(changed, (1, 1))
        return result

    monkeypatch.setattr(bulk, name, changing)
    data = config(tmp_path / "text" / "*", tmp_path / "cache", validation_fraction=0)
    with pytest.raises(DataError, match=r"0005\.jsonl changed while it was read"):
        prepare_folder(data, ByteTokenizer(), tmp_path / "out")


@pytest.mark.parametrize(("first", "is_taken"), [(700, True), (1000, True), (1001, False), (None, False)])
def test_rows_without_the_column_are_judged_alike_in_units(tmp_path: Path, first: int | None, is_taken: bool) -> None:
    """A file is refused whose first 1001 rows lack the column, wherever it is cut."""
    rows = [{"text" if first is not None and number >= first else "txt": "a b"} for number in range(1500)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = config(tmp_path / "rows.jsonl", tmp_path / "cache", validation_fraction=0)
    for unit_bytes in (2000, 1 << 20):
        with nullcontext() if is_taken else pytest.raises(DataError, match=r"rows\.jsonl, line 1: there is no 'text'"):
            prepare_folder(data, ByteTokenizer(), tmp_path / f"{unit_bytes}", unit_bytes=unit_bytes)


def test_rows_of_parquet_are_numbered_within_the_file(tmp_path: Path) -> None:
    rows = texts(60)
    rows[44] += "\0"
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet", row_group_size=20)
    data = config(tmp_path / "a.parquet", tmp_path / "cache")
    with pytest.raises(DataError, match=r"a\.parquet, row 45: 'text' is binary"):
        prepare_folder(data, ByteTokenizer(), tmp_path / "out", unit_bytes=500)


def test_equal_documents_are_found_wherever_passages_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in documents that are read in several pieces."""
    japanese = "東京都の天気は" * 1300
    rows = ["é" * 5000, "e\u0301" * 5000, japanese, f"  {japanese}", f"{japanese} x", "é" * 4000 + " " + "é" * 1000]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = config(tmp_path / "rows.jsonl", tmp_path / "cache", validation_fraction=0)
    for head in (1 << 24, 5000):
        monkeypatch.setattr(parts, "_HEAD", head)
        made = prepare_folder(data, ByteTokenizer(), tmp_path / f"{head}", filters=DocumentFilters(exact=True))
        assert made["train"].documents == 4


@pytest.mark.parametrize("seed", range(3))
def test_the_hash_of_a_text_is_that_of_its_form(seed: int) -> None:
    draw = random.Random(seed)
    letters = ["a", "e", "\u0301", "\u0323", " ", "\n", "\u00b4", "ｶﾞ", "가", "ᄀ", "ᅡ", "ﬁ", "ẞ"]
    text = "".join(draw.choices(letters, k=3000))
    whole = blake2b(same_text(text).encode(), digest_size=16).digest()
    places = [0, *sorted(draw.choices(range(3000), k=40)), len(text)]
    hashed = parts._TextHash()
    for begin, end in itertools.pairwise(places):
        hashed.update(text[begin:end])
    assert hashed.digest() == whole


def test_a_store_gets_the_bytes_of_a_folder_over_ten_kills(corpus: Path, tmp_path: Path) -> None:
    """Killed at random moments and continued; half of the time a shard was cut while it went to the store."""
    data = config(corpus / "*", tmp_path / "cache")
    make = partial(prepare_folder, data, ByteTokenizer(), filters=DocumentFilters(exact=True), unit_bytes=20_000)
    with faulty_store(), small_shards():
        begin = time.monotonic()
        make(tmp_path / "folder")
        needed = time.monotonic() - begin
        expected = content(tmp_path / "folder")
        assert sum(name.startswith("train/shard-") for name in expected) > 5
        draw, kills, box = random.Random(7), 0, tmp_path / "box"
        while kills < 10:
            if (pid := os.fork()) == 0:
                try:
                    make(tmp_path / "work", store=f"faulty:/{box}/set")
                finally:
                    os._exit(0)
            time.sleep(draw.uniform(0.0, 0.4 * needed))
            os.kill(pid, signal.SIGKILL)
            kills += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
            if (box / "set/train/manifest.json").exists():
                assert content(box / "set") == expected
                shutil.rmtree(box)
                shutil.rmtree(tmp_path / "work")
            for shard in (box / "set/train").glob("shard-*") if kills % 2 else ():
                if not list((tmp_path / "work").glob(f".work/*/records/train-{shard.name}.json")):
                    shard.write_bytes(shard.read_bytes()[:100])
        made = make(tmp_path / "work", store=f"faulty:/{box}/set")
        assert content(box / "set") == expected
        assert {path.name for path in (box / "set").iterdir()} == {"card.json", "card.md", "train", "validation"}
        assert list((tmp_path / "work").iterdir()) == []
        assert made["train"].documents == json.loads(expected["train/manifest.json"])["documents"]
        again = make(tmp_path / "work", store=f"faulty:/{box}/set")
        assert again.keys() == made.keys()
        with pytest.raises(DataError, match=r"train holds other shards than this job makes"):
            prepare_folder(data, ByteTokenizer(), tmp_path / "work", store=f"faulty:/{box}/set")


def test_what_becomes_of_files_in_the_store_is_noticed(corpus: Path, tmp_path: Path) -> None:
    """A file that the store damages, loses, or that another command replaces, before the manifest is there."""
    data, box = config(corpus / "*", tmp_path / "cache"), tmp_path / "box"
    make = partial(
        prepare_folder, data, ByteTokenizer(), tmp_path / "work", unit_bytes=20_000, store=f"faulty:/{box}/set"
    )
    with faulty_store() as store, small_shards(), pytest.MonkeyPatch.context() as patch:
        store.faults.append(damaged)
        with pytest.raises(DataError, match=r"validation/\S+\.bin: the store holds other bytes than were"):
            make()
        finish = bulk.PreparationWorker._finish
        for change in (Path.unlink, lambda path: path.write_bytes(b"x" * path.stat().st_size)):

            def spoiled(worker: bulk.PreparationWorker, change: Any = change) -> None:
                change(box / "set/train/shard-00001.bin")
                finish(worker)

            patch.setattr(bulk.PreparationWorker, "_finish", spoiled)
            with pytest.raises(DataError, match=r"set/train/shard-00001\.bin was removed or replaced"):
                make()
            assert not (box / "set/train/manifest.json").exists()
        patch.undo()
        (box / "set/train/shard-99999.bin").write_bytes(b"1")
        with pytest.raises(DataError, match=r"shard-99999\.bin belongs to another preparation: remove it"):
            make()
        (box / "set/train/shard-99999.bin").rename(box / "set/train/notes.txt")
        with pytest.raises(DataError, match=r"train/notes\.txt is where the shards go"):
            make()
        (box / "set/train/notes.txt").unlink()
        made = make()
        for name, record in made["train"].manifest.records().items():
            assert sha256((box / "set/train" / name).read_bytes()).hexdigest() == record.sha256


def test_a_store_that_cannot_be_written_is_told_before_the_work(corpus: Path, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("read only")

    with faulty_store() as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "pipe_file", refuse)
        with pytest.raises(DataError, match=r"box/set/\S+: the store refuses access \(PermissionError: read only\)"):
            prepare_folder(
                config(corpus / "*", tmp_path / "cache"), ByteTokenizer(), tmp_path / "work",
                store=f"faulty:/{tmp_path}/box/set",
            )  # fmt: skip
    assert not (tmp_path / "work").exists()
