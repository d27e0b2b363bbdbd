"""Files of pairs and retrieval sets from somebody else: every form, damaged, mislabelled, packed or planted."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from capt.pretrain.pairs.forms import FORMS, Counts, read_pairs
from capt.pretrain.retrieval.data import read_collections
from tests.fuzz.harness import HOSTILE, check, inputs, library, mutated, snapshot
from tests.fuzz.planting import changed_json, plant

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".jsonl.gz", ".csv.gz", ".parquet")
NAMES = (
    "query",
    "anchor",
    "pos",
    "positive",
    "neg",
    "negative_1",
    "score",
    "label",
    "text",
    "id",
    "a",
    "positive_ids",
    "",
)
ROWS: Sequence[list[dict[str, Any]]] = [
    [{"query": f"q{i}", "pos": [f"p{i}", "é"], "neg": [f"n{i}"], "pos_scores": [1, 0.5]} for i in range(4)],
    [{"anchor": f"a, {i}", "positive": f'"p" {i}', "negative": f"n{i}"} for i in range(4)],
    [{"sentence1": f"a{i}", "sentence2": f"b{i}", "score": i / 4} for i in range(4)],
    [{"text": f"日本 {i}"} for i in range(4)],
    [{"query_text": f"q{i}", "positive_document_ids": ["d1"], "negative_document_ids": [f"d{i}"]} for i in range(4)],
    [{"query": f"q{i}", "positive_passages": [{"docid": i, "title": "t", "text": f"x{i}"}]} for i in range(4)],
]
CORPUS = "\n".join(json.dumps({"_id": f"d{i}", "title": "t", "text": f"document {i}"}) for i in range(4))


def _rows(rng: random.Random) -> list[dict[str, Any]]:
    rows = [dict(row) for row in rng.choice(ROWS)]
    kind = rng.randrange(5)
    if kind == 0:  # values of others
        rows = [row if rng.random() < 0.5 else changed_json(rng, row) for row in rows]
    elif kind == 1:  # columns of others
        names = rng.sample(NAMES, rng.randint(1, 5))
        rows = [{name: rng.choice([*HOSTILE, "text", "more text"]) for name in names} for _ in rows]
    elif kind == 2:  # mixed-up columns
        names = rng.sample(list(rows[0]), len(rows[0]))
        rows = [dict(zip(names, row.values(), strict=True)) for row in rows]
    elif kind == 3:  # one row for all
        rows = [rows[0]] * 4
    return rows


def _content(rng: random.Random, suffix: str) -> bytes:
    rows = _rows(rng)
    if suffix == ".parquet":
        out = io.BytesIO()
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row for row in rows if isinstance(row, dict)]), out)
        except (pyarrow.ArrowException, OverflowError, TypeError, ValueError):  # what parquet itself cannot hold
            return rng.randbytes(50)
        return out.getvalue()
    plain = suffix.removesuffix(".gz")
    if plain in (".csv", ".tsv"):
        tables = [row for row in rows if isinstance(row, dict)] or [{"a": "b"}]
        lines = [list(tables[0]), *(list(row.values()) for row in tables)]
        text = io.StringIO(newline="")
        if plain == ".csv":
            csv.writer(text).writerows(lines)
        else:
            text.write("\n".join("\t".join(map(str, line)) for line in lines))
        content = text.getvalue().encode("utf-8", "surrogatepass")
    elif plain == ".txt":
        content = "\n".join(str(rng.choice([*HOSTILE, "text"])) for _ in rows).encode("utf-8", "surrogatepass")
    else:
        content = "\n".join(map(json.dumps, rows)).encode()
    if rng.random() < 0.3:
        content = mutated(rng, content)
    return gzip.compress(content, mtime=0) if suffix.endswith(".gz") else content


def _damage(rng: random.Random, path: Path, suffix: str) -> None:
    kind = rng.randrange(8)
    if kind == 0:
        plant(rng, path)
        if path.is_file() and path.stat().st_size > 1 << 30:
            path.unlink()  # gigabytes of NUL are one line, refused after 64 MB: seconds
    elif kind == 1:
        path.write_bytes(_content(rng, rng.choice(SUFFIXES)))  # what the name does not say
    elif kind == 2:
        path.write_bytes(
            rng.choice((b"\0", b"[", b'{"query":', b'"', b",", b"\n", b"\xff", b"9")) * rng.choice((1, 3000))
        )
    else:
        path.write_bytes(_content(rng, suffix))


def _beir(rng: random.Random, folder: Path) -> None:
    (folder / "qrels").mkdir(parents=True)
    content = {
        "corpus.jsonl": CORPUS,
        "queries.jsonl": '{"_id": "q1", "text": "one"}\n{"_id": "q2", "text": "two"}',
        "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t1\nq2\td3\t0",
    }
    for name, text in content.items():
        (folder / name).write_text(text)
    if rng.random() < 0.9:
        name = rng.choice(list(content))
        if rng.random() < 0.3:
            _damage(rng, folder / name, Path(name).suffix)
        else:
            (folder / name).write_bytes(mutated(rng, content[name].encode()))


def test_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "pairs"
    codes = set()
    for number, rng in inputs("pairs"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        suffix = rng.choice(SUFFIXES)
        path = folder / f"a{suffix}"
        options: dict[str, Any] = {}
        if rng.random() < 0.2:
            _beir(rng, path := folder / "set")
            options["split"] = "test"
        else:
            _damage(rng, path, suffix)
            if rng.random() < 0.3:
                corpus = folder / "corpus.jsonl"
                corpus.write_bytes(mutated(rng, CORPUS.encode()) if rng.random() < 0.5 else CORPUS.encode())
                options["corpus"] = corpus
            if rng.random() < 0.3:
                options["form"] = rng.choice(list(FORMS))
            if rng.random() < 0.2:
                options["columns"] = {rng.choice(("query", "positive", "negative", "text")): rng.choice(NAMES)}
        before = snapshot(folder)
        counts = Counts()

        def read(path: Path = path, options: dict[str, Any] = options, counts: Counts = counts) -> None:
            for place, pair in read_pairs([path], counts=counts, **options):
                assert place.startswith(str(path))
                assert pair.query.strip()
                assert all(text.strip() for text in (*pair.positives, *pair.negatives))

        outcome = library(read)
        check(outcome, f"pairs:{number}")
        assert snapshot(folder) == before
        if outcome.code == 0:
            assert counts.used > 0
            assert counts.rows == counts.used + counts.without_query + counts.without_positive, f"pairs:{number}"
        codes.add(outcome.code)
    assert codes == {0, 2}


def _nano_beir(rng: random.Random, folder: Path) -> None:
    tables: dict[str, list[dict[str, Any]]] = {
        "corpus": [{"_id": f"d{i}", "title": "t", "text": f"document {i}"} for i in range(4)],
        "queries": [{"_id": f"q{i}", "text": f"query {i}"} for i in range(2)],
        "qrels": [{"query-id": f"q{i}", "corpus-id": f"d{i}", "score": i} for i in range(2)],
    }
    for name, rows in tables.items():
        (folder / name).mkdir(parents=True)
        out = io.BytesIO()
        changed = [changed_json(rng, row) if rng.random() < 0.2 else row for row in rows]
        with suppress(pyarrow.ArrowException, OverflowError, TypeError, ValueError, AttributeError):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(changed), out)
        content = out.getvalue()
        path = folder / name / "NanoSet-00000-of-00001.parquet"
        path.write_bytes(mutated(rng, content) if content and rng.random() < 0.2 else content)


def test_collections(tmp_path: Path) -> None:
    folder = tmp_path / "sets"
    codes = set()
    for number, rng in inputs("collections"):
        shutil.rmtree(folder, ignore_errors=True)
        path, split = folder / "set", rng.choice((None, None, "test", "dev"))
        kind = rng.randrange(4)
        if kind == 0:
            _nano_beir(rng, path)
        elif kind == 1:
            folder.mkdir()
            path = folder / f"a{(suffix := rng.choice(SUFFIXES))}"
            _damage(rng, path, suffix)
        else:
            _beir(rng, path)
        before = snapshot(folder)

        def read(path: Path = path, split: str | None = split) -> None:
            for collection in read_collections(path, split):
                assert collection.queries
                for document, text in collection.documents():
                    assert isinstance(document, str)
                    assert isinstance(text, str)

        outcome = library(read)
        check(outcome, f"collections:{number}")
        assert snapshot(folder) == before
        codes.add(outcome.code)
    assert codes == {0, 2}
