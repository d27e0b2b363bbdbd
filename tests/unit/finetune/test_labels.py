"""Labels of one's own: every form of a file gives the same examples, and every bad row is named by file and line."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from capt.finetune.columns import Columns
from capt.finetune.glue.files import Examples, read_split
from capt.finetune.glue.tasks import GLUE
from capt.finetune.labels.config import LabelsData, LabelsJob
from capt.finetune.labels.data import held_out_rows, read_splits
from capt.finetune.labels.rows import Labelled, read_rows
from capt.pretrain.base.errors import ConfigError, DataError, UserError
from capt.pretrain.config.load import job_from_mapping

NASTY = ('She said "no", twice.', "a, b; c", "two\nlines", 'ends in a quote"', " spaces ", "ﬁ \u2028 é 😀", "'single'")
Rows = Sequence[dict[str, Any]]


def _csv(path: Path, rows: Rows, separator: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)


def _jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _gzipped(write: Callable[[Path, Rows], None]) -> Callable[[Path, Rows], None]:
    def both(path: Path, rows: Rows) -> None:
        write(path, rows)
        path.write_bytes(gzip.compress(path.read_bytes()))

    return both


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "rows.csv": _csv,
    "semicolons.csv": lambda path, rows: _csv(path, rows, ";"),
    "rows.csv.gz": _gzipped(_csv),
    "rows.jsonl": _jsonl,
    "rows.jsonl.gz": _gzipped(_jsonl),
    "rows.parquet": lambda path, rows: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path),
}


def _data(path: Path, **keys: Any) -> LabelsData:
    return LabelsData(train=path, **keys)


def _all(path: Path, **keys: Any) -> tuple[LabelsData, list[tuple[Any, ...]]]:
    """The data found, and all examples of both splits, in any order."""
    splits = read_splits(_data(path, **keys))
    return splits.data, sorted(_listed(splits.train) + _listed(splits.validation))


def _listed(examples: Examples) -> list[tuple[Any, ...]]:
    assert examples.labels is not None
    second = examples.second or [""] * len(examples)
    return list(zip(examples.first, second, map(str, examples.labels.tolist()), strict=True))


def _labels(kind: str, generator: np.random.Generator, count: int) -> list[Any]:
    if kind == "classification":
        return [("no", "yes", "maybe")[i % 3] for i in range(count)]
    if kind == "numbers":
        return [i % 3 for i in range(count)]
    if kind == "regression":
        return [float(x) for x in generator.normal(size=count).round(3)]
    return [[("a", "b", "c d")[k] for k in range(3) if (i >> k) & 1] for i in range(count)]


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", ["classification", "numbers", "regression", "multi_label"])
def test_every_form_of_a_file_gives_the_same_examples(kind: str, pair: bool, tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    labels = _labels(kind, generator, 24)
    rows = [
        {"id": i, "text": f"{NASTY[i % 7]} {i}", **({"text2": f"{i} {NASTY[i % 5]}"} if pair else {}), "label": label}
        for i, label in enumerate(labels)
    ]
    found: list[Any] = []
    for name, write in WRITERS.items():
        cells = "csv" in name and kind == "multi_label"
        written = [{**row, "label": json.dumps(row["label"])} for row in rows] if cells else rows
        write(tmp_path / name, written)
        data, examples = _all(tmp_path / name)
        found.append((data.model_copy(update={"train": Path()}), examples))
        assert (data.text, data.second, data.label) == ("text", "text2" if pair else None, "label")
    assert all(each == found[0] for each in found)
    data, examples = found[0]
    assert [example[:2] for example in examples] == sorted((r["text"], r.get("text2", "")) for r in rows)
    assert data.kind == ("classification" if kind == "numbers" else kind)
    expected = {"classification": ["maybe", "no", "yes"], "numbers": ["0", "1", "2"], "multi_label": ["a", "b", "c d"]}
    assert data.labels == expected.get(kind)
    if kind == "multi_label":
        one = [{**{k: v for k, v in row.items() if k != "label"},
                **{name: int(name in row["label"]) for name in ("a", "b", "c d")}} for row in rows]  # fmt: skip
        _csv(tmp_path / "columns.csv", one)
        assert _all(tmp_path / "columns.csv", label=["a", "b", "c d"])[1] == examples
        cells_of_a_table = [{**row, "label": "; ".join(row["label"])} for row in rows]
        _csv(tmp_path / "cells.csv", cells_of_a_table)
        assert _all(tmp_path / "cells.csv", kind="multi_label", label_separator=";")[1] == examples


def test_a_tsv_has_no_quotes_unless_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text('text\tlabel\n"a\tx\nb "quoted"\ty\nc\tx\nd\ty\n')
    assert [each[0] for each in _all(path)[1]] == ['"a', 'b "quoted"', "c", "d"]
    path.write_text('text\tlabel\n"a\tb"\tx\n"c ""d"""\ty\ne\tx\nf\ty\n')
    assert [each[0] for each in _all(path, quotes=True)[1]] == ["a\tb", 'c "d"', "e", "f"]


@pytest.mark.parametrize(("task", "keys"), [
    ("rte", {}), ("stsb", {}), ("qnli", {}), ("mnli", {}),
    ("qqp", {"text": "question1", "second": "question2", "label": "is_duplicate"}),
    ("mrpc", {"text": "#1 String", "second": "#2 String", "label": "Quality"}),
])  # fmt: skip
@pytest.mark.realdata
def test_glues_files_are_read_as_glue_reads_them(task: str, keys: dict[str, Any], data_folder: Path) -> None:
    split = "dev_matched" if task == "mnli" else "dev"
    theirs = read_split(data_folder / "glue", GLUE[task], split)
    data, ours = _all(Path(theirs.source), **keys)
    assert theirs.labels is not None
    if GLUE[task].regression:
        assert data.kind == "regression"
        assert ours == sorted(_listed(theirs))
        return
    assert data.labels == sorted(GLUE[task].labels)
    number = [data.labels.index(label) for label in GLUE[task].labels]
    assert theirs.second is not None
    expected = zip(theirs.first, theirs.second, (str(number[label]) for label in theirs.labels), strict=True)
    assert ours == sorted(expected)


def test_the_held_out_rows_are_a_share_of_every_class_and_share_no_text(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rows = [
        {"text": f"text {generator.integers(300)}", "label": ("a", "b", "c")[min(2, i % 10)]} for i in range(1000)
    ]  # fmt: skip
    _csv(tmp_path / "rows.csv", rows)
    read = read_rows(tmp_path / "rows.csv", _data(tmp_path / "rows.csv"))
    chosen: dict[int, list[int]] = {}
    for seed in range(3):
        chosen[seed] = held_out_rows(read, [str(row["label"]) for row in rows], 0.2, seed)
        assert chosen[seed] == held_out_rows(read, [str(row["label"]) for row in rows], 0.2, seed)
        kept = set(range(1000)) - set(chosen[seed])
        assert not {read.first[i] for i in chosen[seed]} & {read.first[i] for i in kept}
        assert 0.15 < len(chosen[seed]) / 1000 < 0.25
    assert chosen[0] != chosen[1] != chosen[2]
    unique = [{"text": f"text {i}", "label": "rare" if i % 20 == 0 else "usual"} for i in range(1000)]
    _csv(tmp_path / "unique.csv", unique)
    splits = read_splits(_data(tmp_path / "unique.csv", validation_share=0.2))
    assert splits.validation.labels is not None
    assert (len(splits.validation), int((splits.validation.labels == 0).sum())) == (200, 10)


@pytest.mark.parametrize("many", [False, True])
def test_every_class_of_any_table_is_trained_on(many: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generator = np.random.default_rng(11)
    split = refused = 0
    for trial in range(150):
        texts, classes = int(generator.integers(2, 40)), int(generator.integers(2, 16))
        # Some classes are rare, and some texts come twice, with one label or two.
        share = generator.dirichlet(np.full(classes, 0.4))
        numbers = [int(generator.integers(texts)) for _ in range(int(generator.integers(2, 60)))]
        drawn = [generator.choice(classes, size=int(generator.integers(0, 4)) if many else 1, p=share) for _ in numbers]
        labels: list[Any] = [tuple(sorted({f"c{k}" for k in each})) for each in drawn]
        labels = labels if many else [label[0] for label in labels]
        rows = Labelled(tmp_path, Columns("text", None, ("label",)), [], [f"text {n}" for n in numbers], None, labels)
        try:
            held_out = held_out_rows(rows, labels, float(generator.choice([0.1, 0.5, 0.9])), trial)
        except DataError:
            refused += 1
            continue
        split += 1
        kept = sorted(set(range(len(labels))) - set(held_out))
        assert held_out
        assert not {rows.first[i] for i in held_out} & {rows.first[i] for i in kept}
        every, trained = (
            {n for i in some for n in ([labels[i]], labels[i])[many]} for some in (range(len(labels)), kept)
        )
        assert trained == every
    assert split > 100
    assert refused
    assert "with one text alone, which is trained on, so that validation has none of it: 'c" in caplog.text


def _schema(path: Path, names: list[str], labels: list[Any], form: str) -> None:
    """A parquet file as ``datasets`` writes it: numbers, and the names of the classes in the schema."""
    one = {"names": names, "_type": "ClassLabel"}
    kind = {"one": one, "sequence": {"feature": one, "_type": "Sequence"}, "list": {"feature": one, "_type": "List"},
            "old": [one]}[form]  # fmt: skip
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": kind}
    table = pyarrow.table({"text": [f"text {i}" for i in range(len(labels))], "label": labels})
    described = json.dumps({"info": {"features": features}})
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": described}), path)


@pytest.mark.parametrize("form", ["one", "sequence", "list", "old"])
def test_the_names_of_a_schema_are_those_of_the_classes(form: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    path = tmp_path / "rows.parquet"
    for names in (["contradiction", "neutral", "entailment"], ["5 stars", "1 star"], ["2", "1", "0"], ["b", "NaN", "a"],
                  ["true", "1", "True"], [" no", "yes "],
                  [f"label {i}" for i in generator.permutation(40)]):  # fmt: skip
        numbers = [int(n) for n in (*generator.permutation(len(names)), *generator.integers(len(names), size=60))]
        labels: list[Any] = numbers if form == "one" else [sorted({n, numbers[0]}) for n in numbers]
        _schema(path, names, labels, form)
        names = [name.strip() for name in names]
        for keys in ({}, {"labels": sorted(names)}):
            job = LabelsJob.model_validate(
                {"task": {"type": "labels"}, "data": _data(path, **keys), "model": {"init": "x"}}
            )
            splits = read_splits(job.data)
            found = job.with_data(splits.data).data.text_task
            assert found.names == tuple(keys.get("labels", names))
            assert found.kind == ("classification" if form == "one" else "multi_label")
            for part in (splits.train, splits.validation):
                assert part.labels is not None
                for text, label in zip(part.first, part.labels, strict=True):
                    own = labels[int(text.split()[1])]
                    if form == "one":
                        assert found.names[int(label)] == names[own]
                    else:
                        assert {found.names[i] for i in np.flatnonzero(label)} == {names[n] for n in own}


def test_a_schema_of_names_in_another_order_fits_by_name_and_numbers_stay_where_they_are_asked_for(
    tmp_path: Path,
) -> None:
    train, other = tmp_path / "train.parquet", tmp_path / "other.parquet"
    _schema(train, ["no", "yes"], [0, 1] * 8, "one")
    _schema(other, ["maybe", "yes", "no"], [2, 1, 2], "one")
    validation = read_splits(_data(train, validation=other)).validation
    assert validation.labels is not None
    assert validation.labels.tolist() == [0, 1, 0]
    assert read_splits(_data(train, labels=["1", "0"])).data.labels == ["1", "0"]
    assert read_splits(_data(train, kind="regression")).data.labels is None
    for labels, message in (
        ([0, 1, -1, 0, 1], "row 3: no label"),
        ([0, 1, 2, 0], "row 3: 'label' is 2, and its schema"),
    ):
        _schema(train, ["no", "yes"], labels, "one")
        with pytest.raises(DataError, match=message):
            read_splits(_data(train))
    pyarrow.parquet.write_table(pyarrow.table({"label": [1]}).replace_schema_metadata({"huggingface": "{"}), train)
    with pytest.raises(DataError, match=r"description of its columns by datasets\): not valid JSON"):
        read_splits(_data(train))


GOOD = [{"text": f"text {i}", "second": f"other {i}", "label": ("yes", "no")[i % 2]} for i in range(12)]
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"text": ""}, "'text' is empty"),
    ({"text": "  "}, "'text' is empty"),
    ({"second": ""}, "'second' is empty"),
    ({"label": ""}, r"no label \('label' is empty\); add it or remove the row"),
    ({"label": "  "}, "no label"),
]
TYPED: list[tuple[dict[str, Any], str]] = [
    ({"text": None}, "'text' is None; it must be text"),
    ({"text": 3}, "'text' is 3; it must be text"),
    ({"text": ["a"]}, "must be text"),
    ({"label": None}, "no label"),
    ({"label": float("nan")}, "no label"),
    ({"label": {"a": 1}}, "a class is a text or a whole number"),
    ({"text": "a\0b"}, "NUL"),
    ({"text": "\ud800"}, "surrogate"),
]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("at", [0, 5, 11])
def test_a_bad_row_is_named_wherever_it_is(form: str, at: int, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{form}"
    for change, message in [*MISTAKES, *(TYPED if form == "jsonl" else [])]:
        rows = [{**row, **change} if i == at else row for i, row in enumerate(GOOD)]
        WRITERS[f"rows.{form}"](path, rows)
        place = {"csv": f"line {at + 2}", "jsonl": f"line {at + 1}", "parquet": f"row {at + 1}"}[form]
        for role in ("train", "validation"):
            WRITERS[f"rows.{form}"](tmp_path / f"good.{form}", GOOD)
            files = {"train": tmp_path / f"good.{form}", role: path}
            with pytest.raises(DataError, match=message) as error:
                read_splits(LabelsData(**files))
            assert str(error.value).startswith(f"{path}, {place}: ")


@pytest.mark.parametrize(
    ("name", "content", "keys", "message"),
    [
        ("a.csv", 'text,label\n"a\nb",x\nc,\n', {}, "line 4: no label"),
        ("a.tsv", "text\tlabel\na\tx\nb\tc\ty\n", {}, "line 3: 3 cells, and 2 in .*; no cell .* set data.quotes=true"),
        ("a.tsv", "text\tlabel\na\tx\n\t\n", {}, "line 3: 'text' is empty"),
        ("a.csv", "text,label\n", {}, "the file holds no row"),
        ("a.csv", "great,yes\nbad,no\n", {}, "the first line must name the columns, and data.label=NAME"),
        ("a.csv", "one,two,label\na,b,x\n", {}, "set data.text=NAME"),
        ("a.csv", "id,label\n1,x\n2,y\n", {}, "set data.text=NAME"),
        ("a.csv", "text,label\na,x\n", {"label": "lable"}, "data.label of the job names; did you mean 'label'"),
        ("a.csv", "text,label\na,x\n", {"text": "txt"}, "no column 'txt', which data.text of the job names; did"),
        ("a.csv", "text,label\na,x\nb,x\n", {}, "every label is 'x'; there is nothing to learn"),
        ("a.csv", "text,label\na,x\nb,y\n", {}, "has a label of its own"),
        ("a.csv", "text,label\na,1.5\nb,1.5\nc,1.5\n", {}, "every score is 1.5"),
        ("a.csv", "text,label\na,1.5\nb,2\nc,n/a\n", {}, "line 4: label 'n/a' is not a number, as most labels are"),
        ("a.csv", "text,label\na,1.5\nb,inf\nc,2\n", {"kind": "regression"},
         "line 3: 'label' is 'inf'; a score must .*; correct it"),
        ("a.csv", "text,label\na,.7\nb,.7\n" + "c,.7\n" * 11, {}, "every score is 0.7"),
        ("a.csv", "text,label\na,1.5\nb,-1e300\nc,2\n", {}, "line 3: 'label' is '-1e300'; a score is between"),
        ("a.csv", "text,label\na,1\nb,1.0\nc,0\nd,0\n", {}, "line 3: label '1.0' reads as '1' above"),
        ("a.csv", "text,label\na,True\nb,true\nc,x\nd,x\n", {}, "line 3: label 'true' reads as 'True' above"),
        ("a.jsonl", '{"text": "a", "label": true}\n{"text": "b", "label": "True"}\n{"text": "c", "label": true}\n', {},
         "line 2: label 'True' reads as 'true' above"),
        ("a.csv", "text,label\na,caf\u00e9\nb,cafe\u0301\nc,x\nd,x\n", {}, "one class written in two ways"),
        ("a.csv", "text,label\na,x\nb,\"['x', 'y']\"\nc,x\n", {},
         "line 3: 'label' is .* a list as text; write it as JSON"),
        ("a.csv", "text,label\na,x\nb,\"['x', 'y']\"\nc,x\n", {"kind": "multi_label"},
         "line 3: 'label' is .* no JSON list"),
        ("a.csv", "text,label\na,x\na,y\na,x\n", {}, "1 different text; name held-out rows in data.validation"),
        ("a.csv", "text,label\na,x\nb,y\nc,z\nd,x\n", {"labels": ["x", "y"]}, "line 4: label 'z' is none of 'x', 'y'"),
        ("a.csv", "text,a,b\nt,0,1\nu,1,2\n", {"label": ["a", "b"]}, "line 3: 'b' is '2'; a column of a label holds"),
        ("a.jsonl", '{"text": "a", "label": "x"}\n{"text": "b"}\n', {},
         "line 2: no 'label'.*: complete the row, or remove it"),
        ("a.jsonl", '[{"text": "a", "label": "x"}]\n', {}, "line 1: a JSON object is needed, .* a list; write one"),
        ("a.jsonl", '{"text": "a", "label": ["x"]}\n{"text": "b", "label": null}\n', {"kind": "multi_label"},
         "line 2: 'label' is missing; a row without labels has an empty list"),
        ("a.jsonl", '{"text": "a", "label": []}\n{"text": "b", "label": []}\n', {}, "no row has a label"),
        ("a.csv", '"text", "label"\n"a", "x"\n', {}, 'line 1: the name "label" is between double quotes'),
        ("a.csv", "text,label\na,x\nb,y\0\nc,x\n", {}, "line 3: 'label' is binary, not text"),
        ("a.csv", "text,label\na,x\nb,nan\nc,x\nd,y\n", {}, "line 3: 'label' is 'nan', as a missing label is"),
        ("a.csv", "text,label\na,x\nb,#N/A\nc,x\nd,y\n", {}, "line 3: 'label' is '#N/A', as a missing"),
        ("a.jsonl", '{"text": "a", "label": ["x", "y"]}\n{"text": "b", "label": ["NaN"]}\n', {},
         "line 2: 'label' is 'NaN', as a missing"),
        ("a.csv", "text,label\na,x\nb,#REF!\nc,x\nd,y\n", {}, "line 3: 'label' is '#REF!', as a missing"),
        ("a.jsonl", '{"text": "a", "label": [1, 3]}\n{"text": "b", "label": [0, 1, 0]}\n', {},
         r"line 2: 'label' is \[0, 1, 0\], numbers and no names of labels. .* data.label=\[NAME,NAME\]"),
        ("a.csv", 'text,label\na,"[0.25, 0.75]"\nb,"[0.5, 0.5]"\n', {}, r"line 2: .*0.75.*, numbers and no names"),
        ("a.jsonl", '{"text": "a", "label": [0, 1]}\n{"text": "b", "label": [1, 0]}\n', {},
         r"every row has the labels '0, 1'; there is nothing to learn. .* data.label=\[NAME,NAME\]"),
        ("a.jsonl", "".join(f'{{"text": "a", "label": {cell}}}\n' for cell in ("true", "false", "1", "0") * 2), {},
         "line 3: label '1' reads as 'true' above"),
        ("a.csv", "text,label\na,x\nb,x\u200b\nc,y\nd,y\n", {}, "one class written in two ways"),
        ("a.csv", "text,label\na,x y\nb,x  y\nc,z\nd,z\n", {}, "one class written in two ways"),
        ("a.csv", 'text;score\na;"3,5"\nb;1,5\nc;3,5\n', {}, "numbers with a comma, as '3,5'; write 3.5"),
        ("a.txt", "text,label\n", {}, "one column alone, 'text'; .* write a table as .csv"),
        ("a.xlsx", "x", {}, "no reader for files ending in .xlsx; known: .*csv"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place_and_remedy(
    name: str, content: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as error:
        read_splits(_data(tmp_path / name, **keys))
    assert str(error.value).startswith(str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("row.csv", "row.csv does not exist; did you mean .*rows.csv"),
        ("none.parquet", "none.parquet does not exist; the folder .* has rows.csv: correct the path"),
        ("", "is a folder; name its files, for example .*csv"),
    ],
)
def test_a_file_that_is_not_there_comes_with_a_remedy(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "rows.csv").write_text("text,label\na,x\n")
    with pytest.raises(DataError, match=message):
        read_splits(_data(tmp_path / name))


def test_a_label_that_was_never_trained_on_is_refused_in_validation(tmp_path: Path) -> None:
    _csv(tmp_path / "train.csv", GOOD)
    _csv(tmp_path / "validation.csv", [*GOOD[:3], {**GOOD[3], "label": "maybe"}])
    with pytest.raises(DataError, match=r"validation\.csv, line 5: label 'maybe' is none of 'no', 'yes'; correct it"):
        read_splits(_data(tmp_path / "train.csv", validation=tmp_path / "validation.csv"))


@pytest.mark.parametrize("label", ["nan", "3,5"])
def test_a_class_that_looks_like_something_else_is_one_where_it_is_listed(label: str, tmp_path: Path) -> None:
    _csv(tmp_path / "rows.csv", [{"text": f"t {i}", "label": label if i % 2 else "9,0"} for i in range(8)])
    assert read_splits(_data(tmp_path / "rows.csv", labels=["9,0", label])).data.kind == "classification"


def test_the_columns_of_labels_may_hold_what_pandas_writes(tmp_path: Path) -> None:
    """Beside a missing cell, which is refused where it is, pandas writes 0 and 1 as 0.0 and 1.0."""
    _csv(tmp_path / "rows.csv", [{"text": f"t {i}", "a": float(i % 2), "b": "False"} for i in range(8)])
    found = read_splits(_data(tmp_path / "rows.csv", label=["a", "b"])).train.labels
    assert found is not None
    assert set(map(tuple, found.tolist())) == {(0.0, 0.0), (1.0, 0.0)}


def test_a_decimal_and_a_whole_number_are_one_class(tmp_path: Path) -> None:
    rows = [{"text": f"t {i}", "label": Decimal(f"{i % 2}.00")} for i in range(8)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read_splits(_data(tmp_path / "rows.parquet")).data.labels == ["0", "1"]


def test_a_text_with_two_labels_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,x\nb,y\nA ,y\na,x\nc,x\nc,y\n")
    read_splits(_data(path))
    assert f"rows whose text has another label above: 2, the first is {path}, line 4" in caplog.text


@pytest.mark.parametrize(
    ("mark", "classes", "rows"), [("-1", ("0", "1", "2"), 1), ("-", ("no", "yes"), 1), ("-1", ("0", "1"), 30)]
)
def test_a_mark_of_rows_without_a_label_is_said(
    mark: str, classes: tuple[str, ...], rows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # SNLI has 785 such rows of 550,152. As frequent as the others, it is a class of its own, as of feelings.
    labels = [classes[i % len(classes)] for i in range(60)] + [mark] * rows
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"t {i},{label}\n" for i, label in enumerate(labels)))
    assert mark in (read_splits(_data(path)).data.labels or ())
    said = f"{mark!r} is read as a class, and is rare (1 row, the first is {path}, line 62)"
    assert (said in caplog.text) == (rows == 1)
    assert ("SNLI" in caplog.text) == (rows == 1)


def test_validation_on_texts_that_are_trained_on_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _csv(tmp_path / "train.csv", GOOD)
    _csv(tmp_path / "validation.csv", [*GOOD[:2], {**GOOD[2], "text": "a new one"}])
    read_splits(_data(tmp_path / "train.csv", validation=tmp_path / "validation.csv"))
    assert "data.validation overlaps data.train: 2 of 3 texts are in both" in caplog.text
    (tmp_path / "link.csv").symlink_to(tmp_path / "train.csv")
    for same in ("train.csv", "link.csv"):
        with pytest.raises(ValueError, match=r"data\.validation is .*train\.csv, which is trained on"):
            _data(tmp_path / "train.csv", validation=tmp_path / same)


def test_many_whole_numbers_are_not_guessed_about(tmp_path: Path) -> None:
    _csv(tmp_path / "rows.csv", [{"text": f"t {i}", "score": i} for i in range(40)])
    with pytest.raises(ConfigError, match=r"40 different whole numbers .*data\.kind=regression"):
        read_splits(_data(tmp_path / "rows.csv"))
    assert read_splits(_data(tmp_path / "rows.csv", kind="regression")).data.scale == pytest.approx(11.5, abs=0.5)


def test_random_bytes_are_refused_or_read(tmp_path: Path) -> None:
    """Damaged files of every form: a `UserError`, or examples, and never anything else."""
    rng = np.random.default_rng(0)
    for name, write in WRITERS.items():
        write(tmp_path / name, GOOD)
        content = (tmp_path / name).read_bytes()
        for _ in range(60):
            damaged = bytearray(content)
            for _ in range(int(rng.integers(1, 4))):
                place = int(rng.integers(len(damaged)))
                damaged[place : place + int(rng.integers(0, 3))] = rng.bytes(int(rng.integers(0, 3)))
            path = tmp_path / f"damaged.{name}"
            path.write_bytes(bytes(damaged))
            with suppress(UserError):
                read_splits(_data(path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"second": "b"}, "data.second needs data.text"),
        ({"text": "a", "second": "a"}, "name the column 'a' twice"),
        ({"label": ["a", "b"], "kind": "classification"}, "data.label names several columns"),
        ({"labels": ["a", "a"]}, "data.labels names 'a' twice"),
        ({"labels": ["a"], "kind": "regression"}, "data.kind=regression has none"),
        ({"kind": "ranking"}, "data.kind"),
        ({"validation_share": 1.0}, "less than 1"),
    ],
)
def test_keys_that_do_not_fit_are_refused(data: dict[str, Any], message: str) -> None:
    mapping = {"task": {"type": "labels"}, "data": {"train": "a.csv", **data}, "model": {"init": "x"}}
    with pytest.raises(ConfigError, match=message):
        job_from_mapping(mapping, "test")


def test_the_job_says_what_it_found_and_finds_it_again(tmp_path: Path) -> None:
    _csv(tmp_path / "rows.csv", GOOD)
    mapping = {"task": {"type": "labels"}, "data": {"train": str(tmp_path / "rows.csv")}, "model": {"init": "x"}}
    job = job_from_mapping(mapping, "test")
    assert isinstance(job, LabelsJob)
    found = job.with_data(read_splits(job.data).data)
    assert (found.data.kind, found.data.labels, found.data.second) == ("classification", ["no", "yes"], "second")
    assert found.checkpoint.best == "accuracy"
    again = job_from_mapping(found.model_dump(mode="json", by_alias=True), "again")
    assert isinstance(again, LabelsJob)
    assert again.with_data(read_splits(again.data).data) == found
    other = job_from_mapping({**mapping, "checkpoint": {"best": "pearson"}}, "test")
    assert isinstance(other, LabelsJob)
    with pytest.raises(ConfigError, match="validation of classification reports no 'pearson'"):
        other.with_data(read_splits(other.data).data)
