"""Tables of pairs as tests write them, in every kind of file."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from capt.pretrain.pairs.forms import Pair, read_pairs

Rows = Sequence[Mapping[str, Any]]


def write_json(path: Path, rows: Rows) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def write_table(path: Path, rows: Rows) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_tabs(path: Path, rows: Rows) -> Path:
    path.write_text(
        "\n".join("\t".join(map(str, cells)) for cells in (rows[0], *(row.values() for row in rows))) + "\n"
    )
    return path


def write_parquet(path: Path, rows: Rows) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def write_saved(path: Path, rows: Rows) -> Path:
    datasets.Dataset.from_list(list(rows)).save_to_disk(path)
    return path


def packed(write: Callable[[Path, Rows], Path]) -> Callable[[Path, Rows], Path]:
    def write_packed(path: Path, rows: Rows) -> Path:
        plain = write(path.with_suffix(""), rows)
        path.write_bytes(gzip.compress(plain.read_bytes()))
        return path

    return write_packed


WRITERS: dict[str, Callable[[Path, Rows], Path]] = {
    "a.jsonl": write_json,
    "a.jsonl.gz": packed(write_json),
    "a.csv": write_table,
    "a.csv.gz": packed(write_table),
    "a.tsv": write_tabs,
    "a.parquet": write_parquet,
    "saved": write_saved,
}
WITH_LISTS = ["a.jsonl", "a.jsonl.gz", "a.parquet", "saved"]
TEXTS = ['a "quoted" word', 'b"', "c, d", "'e'", "naïve 日本 😀", "1984", "[f]", "g\u2028h", "two  spaces", "İ", "#x;y"]


def some_texts(number: int, *, line_breaks: bool) -> list[str]:
    rng = random.Random(number)
    joints = [" ", ", ", ' " ', *(["\n"] if line_breaks else [])]
    return [f"{i} {rng.choice(TEXTS)}{rng.choice(joints)}{rng.choice(TEXTS)}" for i in range(40)]


def read(*files: Path, **options: Any) -> list[Pair]:
    return [pair for _, pair in read_pairs(files, **options)]


def beir(folder: Path, judgements: Sequence[tuple[str, str, object]], split: str = "test") -> Path:
    (folder / "qrels").mkdir(parents=True)
    write_json(folder / "corpus.jsonl", [{"_id": f"d{i}", "title": "T" * (i % 2), "text": f"t{i}"} for i in range(6)])
    write_json(folder / "queries.jsonl", [{"_id": f"q{i}", "text": f"query {i}"} for i in range(4)])
    rows = [{"query-id": q, "corpus-id": d, "score": s} for q, d, s in judgements]
    write_tabs(folder / "qrels" / f"{split}.tsv", rows)
    return folder
