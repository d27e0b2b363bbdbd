"""Conditions on rows select what pyarrow's own filter selects, alike in every kind of file."""

from __future__ import annotations

import operator
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as pc
import pytest

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.data.row_filter import RowFilter
from capt.pretrain.pairs.data_config import PairData
from capt.pretrain.pairs.forms import Counts
from capt.pretrain.pairs.selection import Selection
from tests.unit.pairs.written import read, write_json, write_parquet, write_table

COLUMNS: dict[str, list[Any]] = {
    "drop": [True, False, None],
    "score": [-1.5, 0.0, 2.0, 7.25, None],
    "lang": ["en", "de", "de ", None],
}
ORDERS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
FLIPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _condition(rng: random.Random, depth: int) -> tuple[str, pc.Expression]:
    """A random condition, and the same one for pyarrow, whose `&`, `|` and `~` have the three truths of SQL."""
    kind = rng.choice(("and", "or", "not", "leaf", "leaf")) if depth else "leaf"
    if kind == "not":
        text, expression = _condition(rng, depth - 1)
        return f"not ({text})", ~expression
    if kind in ("and", "or"):
        (a, left), (b, right) = _condition(rng, depth - 1), _condition(rng, depth - 1)
        return f"({a}) {kind} ({b})", left & right if kind == "and" else left | right
    column = rng.choice(list(COLUMNS))
    values = [value for value in COLUMNS[column] if value is not None]
    field, literal = pc.field(column), rng.choice(values)
    way = rng.random()
    if way < 0.2:
        return (f"{column} is null", field.is_null()) if way < 0.1 else (f"{column} is not null", ~field.is_null())
    if way < 0.3:
        among = rng.sample(values, 2)
        found = (field == among[0]) | (field == among[1])
        inverted = rng.random() < 0.5
        return (
            f"{column} {'not ' if inverted else ''}in [{', '.join(map(_text, among))}]",
            ~found if inverted else found,
        )
    name = rng.choice(("==", "!=") if column == "drop" else list(ORDERS))
    expression = ORDERS[name](field, literal)
    if way < 0.6:
        return f"{_text(literal)} {FLIPPED[name]} {column}", expression
    return f"{column} {name} {_text(literal)}", expression


def _text(literal: Any) -> str:
    return str(literal).lower() if isinstance(literal, bool) else repr(literal)


def test_every_kind_of_file_and_pyarrow_select_the_same_rows(tmp_path: Path) -> None:
    rows = [
        {"query": f"q {i}{j}{k}", "document": f"d {i}{j}{k}", "drop": drop, "score": score, "lang": lang}
        for i, drop in enumerate(COLUMNS["drop"])
        for j, score in enumerate(COLUMNS["score"])
        for k, lang in enumerate(COLUMNS["lang"])
    ]
    table = pyarrow.Table.from_pylist(rows)
    written = [("a.jsonl", write_json), ("a.csv", write_table), ("a.parquet", write_parquet)]
    files = [write(tmp_path / name, rows) for name, write in written]
    rng, sizes, unknown = random.Random(5), set(), 0
    for _ in range(30):
        text, expression = _condition(rng, 3)
        expected = table.filter(expression)["query"].to_pylist()
        sizes.add(len(expected))
        for path in files:
            counts: dict[str, int] = {}

            def add(name: str, place: str, counts: dict[str, int] = counts) -> None:
                counts[name] = counts.get(name, 0) + 1

            found = [row.cells["query"] for row in Selection(text).rows(path, "train", add)]
            assert found == expected, (path.name, text)
            assert sum(counts.values()) == len(rows) - len(found)
            unknown += counts.get("null_compared", 0)
    assert len(sizes) > 8
    assert unknown > 100


def test_long_numbers_and_nan_mean_the_same_in_every_kind_of_file(tmp_path: Path) -> None:
    # Beyond 2^53 a float is no longer every whole number.
    rows = [{"query": f"q{i}", "positive": f"p{i}", "key": 2**53 + i, "grade": s}
            for i, s in enumerate((1.5, float("nan"), 3.0))]  # fmt: skip
    files = [write(tmp_path / f"a{suffix}", rows) for suffix, write in
             ((".jsonl", write_json), (".csv", write_table), (".parquet", write_parquet))]  # fmt: skip
    for path in files:
        for condition, kept in ((f"key == {2**53 + 1}", [1]), (f"key in [{2**53}]", [0]), ("grade != 3", [0]),
                                ("not (grade > 2)", [0])):  # fmt: skip
            found = read(path, selection=Selection(where=condition))
            assert [pair.query for pair in found] == [f"q{i}" for i in kept], (path, condition)


def test_pairs_are_read_without_the_columns_of_the_condition(tmp_path: Path) -> None:
    """Also where a column of the condition has a name that pairs know, and beside documents that are ids."""
    rows = [{"query": f"q{i}", "document": f"d{i}", "score": i, "label": i % 2 == 0} for i in range(6)]
    write_json(tmp_path / "corpus.jsonl", [{"_id": f"d{i}", "text": f"text {i}"} for i in range(6)])
    for write, name in ((write_json, "a.jsonl"), (write_table, "a.csv"), (write_parquet, "a.parquet")):
        path, counts = write(tmp_path / name, rows), Counts()
        found = read(path, form="columns", selection=Selection("2 <= score < 5 and label"), counts=counts)
        assert [(pair.query, pair.positives, pair.score) for pair in found] == [
            ("q2", ("d2",), None),
            ("q4", ("d4",), None),
        ]
        assert (counts.filtered, counts.rows) == (4, 2)
        named = {"form": "ids", "corpus": tmp_path / "corpus.jsonl", "columns": {"positive": "document"}}
        assert [pair.positives for pair in read(path, selection=Selection("score >= 4"), **named)] == [
            ("text 4",),
            ("text 5",),
        ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drop = false", "is no condition"),
        ("drop == null", "drop is null"),
        ("drop is 3", "takes a column and null"),
        ("drop < true", "have no order"),
        ("drop == duplicate", "compared with a value"),
        ("1 == 1", "compared with a value"),
        ("len(query)", "not part of a condition"),
        ("__import__('os').system('x') == 0", "compared with a value"),
        ("score + 1 > 3", "compared with a value"),
        ("lang in 'en'", "in a list of values"),
        ("", "is no condition"),
        ("(" * 300, "is no condition"),
        ("a == 1 and " * 400, "characters"),
    ],
)
def test_what_is_no_condition_is_refused_with_the_job(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        RowFilter(text)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="where"):
        PairData(files=["x"], where=text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dorp == false", "where names the column 'dorp', which no row has; did you mean 'drop'"),
        ("drop == 'no'", "compares it with a text"),
        ("score == true", "compares it with true or false"),
        ("lang > 3", r"'lang' is 'en' \(str\), and where compares it with a number, 3"),
    ],
)
def test_a_column_that_is_missing_or_of_another_type_is_named(tmp_path: Path, text: str, message: str) -> None:
    rows = [{"query": f"q{i}", "document": f"d{i}", "drop": False, "score": 2, "lang": "en"} for i in range(3)]
    for write, name in ((write_json, "a.jsonl"), (write_table, "a.csv"), (write_parquet, "a.parquet")):
        path = write(tmp_path / name, rows)
        if name == "a.csv" and text == "drop == 'no'":
            continue  # a cell without a type is read as the text that it is
        with pytest.raises(DataError, match=message) as caught:
            read(path, form="columns", selection=Selection(text))
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)
