"""The same pairs in every form and kind of file are read as the same pairs; what cannot be meant is refused."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.pairs.config import PairData
from capt.pretrain.pairs.forms import FORMS, Counts, Pair, read_pairs
from capt.pretrain.pairs.layout import ROLES
from capt.pretrain.retrieval.data import read_collections

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


# ---- every form in every kind of file


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "columns", [(q, p) for q in ("anchor", "question", "my left") for p in ("positive", "doc_1", "pos")]
)
def test_two_columns(tmp_path: Path, name: str, columns: tuple[str, str]) -> None:
    texts = some_texts(1, line_breaks=name != "a.tsv")
    rows = [dict(zip(columns, two, strict=True)) for two in zip(texts[::2], texts[1::2], strict=True)]
    assert read(WRITERS[name](tmp_path / name, rows)) == [Pair(q, (p,)) for q, p in (row.values() for row in rows)]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "columns", [("anchor", "positive", "negative"), ("sent0", "sent1", "hard_neg"), ("a", "b", "c", "d"),
                ("query", "positive", "negative_1", "negative_2")]
)  # fmt: skip
def test_negatives_in_columns(tmp_path: Path, name: str, columns: tuple[str, ...]) -> None:
    texts, width = some_texts(2, line_breaks=name != "a.tsv"), len(columns)
    rows = [dict(zip(columns, texts[i : i + width], strict=True)) for i in range(0, len(texts) - width, width)]
    expected = [Pair(q, (p,), tuple(n)) for q, p, *n in (row.values() for row in rows)]
    assert read(WRITERS[name](tmp_path / name, rows)) == expected


def test_numbered_negatives_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    row = {"negative_10": "ten", "positive": "p", "negative_2": "two", "anchor": "a"}
    assert read(write_json(tmp_path / "a.jsonl", [row])) == [Pair("a", ("p",), ("two", "ten"))]


@pytest.mark.parametrize("name", WITH_LISTS)
def test_flagembedding(tmp_path: Path, name: str) -> None:
    t = some_texts(3, line_breaks=True)
    rows = [
        {
            "query": t[0],
            "pos": t[1:3],
            "neg": t[3:6],
            "pos_scores": [1, 0.5],
            "neg_scores": [0.25, -3, 0],
            "prompt": "x",
        },
        {"query": t[6], "pos": t[7:8], "neg": t[8:9], "pos_scores": [2], "neg_scores": [1], "prompt": "x"},
    ]
    expected = [
        Pair(t[0], (t[1], t[2]), tuple(t[3:6]), (1.0, 0.5), (0.25, -3.0, 0.0), prompt="x"),
        Pair(t[6], (t[7],), (t[8],), (2.0,), (1.0,), prompt="x"),
    ]
    for form in ("auto", "flagembedding", "columns"):
        assert read(WRITERS[name](tmp_path / f"{form}-{name}", rows), form=form) == expected


def test_keys_of_json_rows_may_be_absent(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "pos": "b"},
        {"pos": ["c"], "query": "d", "neg": ["e"]},
        {"query": "f", "pos": ["g"], "neg": None},
    ]
    assert read(write_json(tmp_path / "a.jsonl", rows)) == [
        Pair("a", ("b",)),
        Pair("d", ("c",), ("e",)),
        Pair("f", ("g",)),
    ]


def test_columns_by_order_stay_the_same_when_the_keys_of_a_row_are_in_another(tmp_path: Path) -> None:
    rows = [{"left": "a", "right": "b"}, {"right": "c", "left": "d"}]
    assert read(write_json(tmp_path / "a.jsonl", rows)) == [Pair("a", ("b",)), Pair("d", ("c",))]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "columns", [("sentence1", "sentence2", "score"), ("left", "right", "x"), ("question1", "question2", "is_duplicate")]
)
def test_scores(tmp_path: Path, name: str, columns: tuple[str, str, str]) -> None:
    texts = some_texts(4, line_breaks=name != "a.tsv")
    rows = [dict(zip(columns, (texts[i], texts[i + 1], i / 40), strict=True)) for i in range(0, 40, 2)]
    expected = [Pair(texts[i], (texts[i + 1],), score=i / 40) for i in range(0, 40, 2)]
    for form in ("auto", "scores"):
        assert read(WRITERS[name](tmp_path / f"{form}-{name}", rows), form=form) == expected


@pytest.mark.parametrize("name", WRITERS)
def test_one_column_alone(tmp_path: Path, name: str) -> None:
    texts = some_texts(5, line_breaks=name != "a.tsv")
    path = WRITERS[name](tmp_path / name, [{"text": text} for text in texts])
    assert read(path) == read(path, form="texts") == [Pair(text, ()) for text in texts]


def test_lines_are_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\x85\u2028 2\n\nthree".encode())
    counts = Counts()
    assert read(tmp_path / "a.txt", counts=counts) == [Pair("one", ()), Pair("two\x85\u2028 2", ()), Pair("three", ())]
    assert (counts.rows, counts.used, counts.without_query) == (4, 3, 1)
    assert counts.first["without_query"] == f"{tmp_path}/a.txt:3"


def test_one_of_several_columns_is_chosen(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", [{"title": "a", "body": "b"}, {"title": "c", "body": "d"}])
    assert read(path, columns={"text": "body"}) == [Pair("b", ()), Pair("d", ())]
    assert read(path, columns={"query": "body", "positive": "title"}) == [Pair("b", ("a",)), Pair("d", ("c",))]


def test_a_corpus_that_no_column_of_ids_belongs_to_is_refused(tmp_path: Path) -> None:
    # Rows would be read as queries alone, and train something else.
    corpus = write_json(tmp_path / "corpus.jsonl", [{"_id": i, "text": f"text {i}"} for i in range(3)])
    path = tmp_path / "a.csv"
    path.write_text("query,product_id\na,1\nb,2\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.csv:2: of the columns 'query', 'product_id' none is known"):
        read(path, corpus=corpus)
    named = {"query": "query", "positive": "product_id"}
    expected = [Pair("a", ("text 1",)), Pair("b", ("text 2",))]
    assert read(path, corpus=corpus, columns=named) == expected
    path.write_text("query,positive_id\na,1\nb,2\n", encoding="utf-8")
    assert read(path, corpus=corpus) == expected
    with pytest.raises(DataError, match=r"'positive_id' holds ids; name the texts"):
        read(path)


@pytest.mark.parametrize("name", WITH_LISTS)
@pytest.mark.parametrize("corpus_name", WRITERS)
def test_ids_with_a_corpus(tmp_path: Path, name: str, corpus_name: str) -> None:
    texts = some_texts(6, line_breaks=corpus_name != "a.tsv")
    corpus = WRITERS[corpus_name](
        tmp_path / f"corpus-{corpus_name}",
        [{"docid": f"d{i}", "title": "", "document_text": t} for i, t in enumerate(texts)],
    )
    rows = [
        {"query_id": "1", "query_text": "x", "positive_document_ids": ["d3"], "negative_document_ids": ["d5", "d39"]},
        {"query_id": "2", "query_text": "y", "positive_document_ids": ["d4", "d0"], "negative_document_ids": ["d2"]},
    ]
    path = WRITERS[name](tmp_path / name, rows)
    own = [text.strip() for text in texts]
    assert read(path, corpus=corpus) == read(path, corpus=corpus, form="ids")
    assert read(path, corpus=corpus) == [
        Pair("x", (own[3],), (own[5], own[39])), Pair("y", (own[4], own[0]), (own[2],))
    ]  # fmt: skip


def test_passages_as_objects(tmp_path: Path) -> None:
    """Tevatron's older form, and NeMo's, in which a document may be an id."""
    rows = [
        {
            "query": "x",
            "positive_passages": [{"docid": "1", "title": "T", "text": "t"}],
            "negative_passages": [{"text": "n"}],
        },
        {"query": "y", "positive_passages": [{"docid": "2", "title": "", "text": "u"}], "negative_passages": []},
    ]
    assert read(write_json(tmp_path / "a.jsonl", rows)) == [Pair("x", ("T t",), ("n",)), Pair("y", ("u",))]
    corpus = write_json(tmp_path / "corpus.jsonl", [{"id": 7, "text": "seven"}, {"id": 8, "text": "eight"}])
    rows = [{"question_id": "q", "question": "x", "pos_doc": [{"id": "7"}], "neg_doc": [{"id": "8"}]}]
    assert read(write_json(tmp_path / "b.jsonl", rows), corpus=corpus) == [Pair("x", ("seven",), ("eight",))]
    rows = [{"query": "x", "positive_passages": [{"docid": "1", "title": 5, "text": "t"}]}]
    with pytest.raises(DataError, match=r"c.jsonl:1: 'title' should be a text, it is 5; put quotes around it"):
        read(write_json(tmp_path / "c.jsonl", rows))


def beir(folder: Path, judgements: Sequence[tuple[str, str, object]], split: str = "test") -> Path:
    (folder / "qrels").mkdir(parents=True)
    write_json(folder / "corpus.jsonl", [{"_id": f"d{i}", "title": "T" * (i % 2), "text": f"t{i}"} for i in range(6)])
    write_json(folder / "queries.jsonl", [{"_id": f"q{i}", "text": f"query {i}"} for i in range(4)])
    rows = [{"query-id": q, "corpus-id": d, "score": s} for q, d, s in judgements]
    write_tabs(folder / "qrels" / f"{split}.tsv", rows)
    return folder


def test_beir(tmp_path: Path) -> None:
    folder = beir(
        tmp_path / "set", [("q1", "d1", 1), ("q0", "d2", 2), ("q1", "d4", 0), ("q1", "d3", 1), ("q3", "d5", 0)]
    )
    counts = Counts()
    found = dict(read_pairs([folder], split="test", counts=counts))
    path = folder / "qrels" / "test.tsv"
    assert found == {f"{path}:2": Pair("query 1", ("T t1", "T t3"), ("t4",)), f"{path}:3": Pair("query 0", ("t2",))}
    assert (counts.rows, counts.without_positive, counts.first["without_positive"]) == (3, 1, f"{path}:6")


@pytest.mark.parametrize(
    "qrels",
    [
        "q1\td1\t1\nq1\td4\t0\n",
        "q1 0 d1 1\nq1 0 d4 0\n",
        "query_id\tdoc_id\trelevance\r\nq1\td1\t1\r\nq1\td4\t0\r\n",
        "Corpus-ID\tQuery-ID\tScore\nd1\tq1\t1\nd4\tq1\t0\n",
        "corpus-id\tquery-id\tscore\tby\nd1\tq1\t1\tx\nd4\tq1\t0\ty\n",
        "q1\td1\t1\nq1\td4\t0\nq1\td1\t1\n",
        "q1\td1\t0\nq1\td4\t2\nq1\td1\t1\nq1\td4\t0\n",
        "q1\td1\t0.1e1\nq1\td4\t0e3\n",
    ],
)
def test_qrels_of_other_tools_are_read_alike_for_training_and_for_evaluation(qrels: str, tmp_path: Path) -> None:
    folder = beir(tmp_path / "set", [("q1", "d1", 1)])
    (folder / "qrels" / "test.tsv").write_bytes(qrels.encode())
    assert read(folder, split="test") == [Pair("query 1", ("T t1",), ("t4",))]
    (collection,) = read_collections(folder)
    assert collection.judged == {"q1": {"d1": 1, "d4": 0}}


def test_judgements_that_contradict_each_other_are_counted(tmp_path: Path) -> None:
    folder = beir(tmp_path / "set", [("q1", "d1", 1), ("q1", "d2", 1), ("q1", "d1", 0), ("q1", "d2", "1.0")])
    list(read_pairs([folder], split="test", counts=(counts := Counts())))
    place = folder / "qrels" / "test.tsv"
    assert counts.remarks() == [
        f"judgements that contradict an earlier one, the last counts: 1, the first at {place}:4"
    ]


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("corpus.jsonl", {"_id": "d1", "title": 0, "text": "t"}, r"corpus.jsonl:1: 'title' should be a text, it is 0"),
        (
            "corpus.jsonl",
            {"_id": "d1", "title": [], "text": "t"},
            r"corpus.jsonl:1: 'title' should be a text, it is \[\]",
        ),
        (
            "corpus.jsonl",
            {"_id": " ", "text": "t"},
            "corpus.jsonl:1: .?._id.? is empty; give the row an id, or remove it",
        ),
        (
            "queries.jsonl",
            {"_id": "", "text": "t"},
            "queries.jsonl:1: .?._id.? is empty; give the row an id, or remove it",
        ),
        (
            "qrels/test.tsv",
            "q1\td1\t1_0",
            "test.tsv:1: .* a whole number as score are expected, found 'q1', 'd1', '1_0'",
        ),
        (
            "qrels/test.tsv",
            "q1\td1\tnan",
            "test.tsv:1: .* a whole number as score are expected, found 'q1', 'd1', 'nan'",
        ),
        ("qrels/test.tsv", "q1\t\t1", "test.tsv:1: query-id, corpus-id .* expected, found 'q1', '', '1'"),
        ("qrels/test.tsv", "\td1\t1", "test.tsv:1: query-id, corpus-id .* expected, found '', 'd1', '1'"),
    ],
)
def test_faults_of_beir_folders_are_refused_alike_for_training_and_for_evaluation(
    file: str, content: dict[str, object] | str, says: str, tmp_path: Path
) -> None:
    folder = beir(tmp_path / "set", [("q1", "d1", 1)])
    (folder / file).write_text((content if isinstance(content, str) else json.dumps(content)) + "\n")
    with pytest.raises(DataError, match=says):
        read(folder, split="test")
    with pytest.raises(DataError, match=says):
        [list(collection.documents()) for collection in read_collections(folder)]


@pytest.mark.realdata
def test_real_data() -> None:
    data = Path(os.environ["CAPT_DATA"])
    cranfield = read(data / "retrieval" / "cranfield", split="test")
    judgements = (data / "retrieval" / "cranfield" / "qrels" / "test.tsv").read_text().splitlines()[1:]
    relevant = {line.split("\t")[0] for line in judgements if int(line.split("\t")[2]) > 0}
    assert len(cranfield) == len(relevant)
    sts = read(data / "glue" / "STS-B" / "train.tsv")
    assert len(sts) == 5749
    assert sts[0] == Pair("A plane is taking off.", ("An air plane is taking off.",), score=5.0)


@pytest.mark.parametrize("name", WITH_LISTS)
def test_a_text_of_digits_is_a_text_where_values_have_types(tmp_path: Path, name: str) -> None:
    rows = [{"left": "in what year", "right": "1984"}, {"left": "where", "right": "here"}]
    assert read(WRITERS[name](tmp_path / name, rows)) == [Pair("in what year", ("1984",)), Pair("where", ("here",))]


# ---- places


def test_a_place_is_the_line_at_which_a_row_begins(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('anchor,positive\n"a\nb","c\r\nd"\n\ne,f\n')
    assert list(read_pairs([path])) == [(f"{path}:2", Pair("a\nb", ("c\nd",))), (f"{path}:6", Pair("e", ("f",)))]


def test_several_files_and_patterns(tmp_path: Path) -> None:
    for i in range(3):
        write_json(tmp_path / f"{i}.jsonl", [{"query": f"q{i}", "pos": [f"p{i}"]}])
    assert [place for place, _ in read_pairs([tmp_path / "[12].jsonl", tmp_path / "0.jsonl"])] == [
        f"{tmp_path}/{i}.jsonl:1" for i in (1, 2, 0)
    ]


# ---- what is counted


def test_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"query": "a", "pos": ["b"], "neg": ["c"]},
        {"query": " ", "pos": ["b"]},
        {"query": None, "pos": ["b"]},
        {"query": "a", "pos": ["", " "]},
        {"query": "a", "pos": []},
        {"query": "a", "pos": ["b", None], "neg": ["", "d"], "neg_scores": [1, 2]},
        {"query": "a", "pos": ["b"], "neg": ["c"]},
        {"query": "e\u0301 f", "pos": ["\u00e9  f"]},
        {"query": "g", "pos": ["h"], "neg": [" h ", "g", "i"], "neg_scores": [1, 2, 3]},
    ]
    rows.append({"query": "k", "pos": ["nan"]})
    path, counts = write_json(tmp_path / "a.jsonl", rows), Counts()
    with caplog.at_level(logging.WARNING):
        found = read(path, counts=counts)
    assert found.pop() == Pair("k", ("nan",))
    assert counts.as_missing == 1
    assert found[1] == Pair("a", ("b",), ("d",), negative_scores=(2.0,))
    assert found[-1] == Pair("g", ("h",), ("i",), negative_scores=(3.0,))
    assert (counts.rows, counts.used, len(found)) == (10, 6, 5)
    assert (counts.without_query, counts.without_positive, counts.empty_texts) == (2, 2, 4)
    assert (counts.duplicates, counts.query_is_positive) == (1, 1)
    assert (counts.negative_is_positive, counts.negative_is_query) == (1, 1)
    assert f"rows left out, the query is empty: 2, the first at {path}:2" in caplog.text
    assert all(remark in caplog.text for remark in counts.remarks())
    assert len(counts.remarks()) == 8


# ---- what is refused

FAULTS: dict[str, tuple[Rows, dict[str, Any], str]] = {
    "number for a text": ([{"query": "a", "pos": [3]}], {}, "1: 'pos' must be text, it holds 3"),
    "list for a query": ([{"query": ["a", "b"], "pos": ["c"]}], {}, "1: 'query' holds 2 texts"),
    "NUL": ([{"query": "a\0", "pos": ["c"]}], {}, "1: 'query' is binary"),
    "half a character": ([{"query": "\ud800", "pos": ["c"]}], {}, "1: 'query' is not text"),
    "scores of another number": ([{"query": "a", "pos": ["c"], "pos_scores": [1, 2]}], {}, "2 scores for 1 document;"),
    "score is NaN": ([{"query": "a", "pos": ["c"], "pos_scores": [float("nan")]}], {}, "not a finite number"),
    "score is a text": ([{"sentence1": "a", "sentence2": "b", "score": "good"}], {}, "must be a number.*mixed up"),
    "similarity is NaN": ([{"sentence1": "a", "sentence2": "b", "score": float("nan")}], {},
                          "not a finite number; correct it, or remove the row"),
    "similarity out of range": ([{"sentence1": "a", "sentence2": "b", "score": 87}], {},
                                "87 in 'score' is out of .*: divide all"),
    "score is missing": ([{"sentence1": "a", "sentence2": "b", "score": None}], {}, "must be a number, it holds None"),
    "label is a class": ([{"sentence1": "a", "sentence2": "b", "label": 2}], {}, "labels of classes are no scores"),
    "label is a name": ([{"sentence1": "a", "sentence2": "b", "label": "entailment"}], {}, "name of a class"),
    "score and negatives": ([{"anchor": "a", "positive": "b", "negative": "c", "score": 1}], {}, "is a score of two"),
    "roles out of order": ([{"doc": "a", "query": "b"}], {}, "'doc', 'query' are not a query and its positive"),
    "roles out of order, in capitals": ([{"doc": "a", "Query": "b"}], {}, "are not a query and its positive"),
    "ids in capitals without a corpus": ([{"Query": "a", "Pos_IDs": ["1"]}], {}, "name the texts.* by corpus"),
    "negative without a positive": ([{"query": "a", "neg": ["b"]}], {}, "are not a query and its positive"),
    "text beside another": ([{"text": "a", "source": "web"}], {}, "are not a query and its positive"),
    "text with a class": ([{"text": "a", "label": 1}], {}, "form=texts with columns"),
    "numbers alone": ([{"a": 1, "b": 2}], {}, "are not a query and its positive"),
    "no columns": ([{}], {}, "the columns none are not"),
    "another form later": ([{"query": "a", "pos": ["b"]}, {"text": "c"}], {}, ":2: the columns are"),
    "a key misspelt later": ([{"query": "a", "pos": ["b"]}, {"query": "c", "psitive": "d"}], {},
                              ":2: the columns are .*: complete the row"),
    "a score later": (
        [{"query": "a", "document": "b"}, {"query": "c", "document": "d", "score": 1}], {},
        ":2: a row of scores.*pairs.*: complete the row, or give"
    ),
    "ids without a corpus": ([{"query": "a", "positive_document_ids": ["1"]}], {}, "name the texts.* by corpus"),
    "objects without text": ([{"query": "a", "pos": [{"id": "1"}]}], {}, "an object without 'text'"),
    "column that is not there": ([{"a": "x", "b": "y"}], {"columns": {"query": "a", "positive": "c"}}, "names 'c'"),
    "negatives that are not there": (
        [{"a": "x", "b": "y"}],
        {"columns": {"query": "a", "positive": "b", "negative": "n1, n2"}},
        "no row has the column 'n1'",
    ),
    "form does not fit": ([{"a": "x", "b": "y"}], {"form": "flagembedding"}, "are not 'query' and 'pos'"),
    "no scores": ([{"query": "x", "pos": "y"}], {"form": "scores"}, "are not two texts and a score"),
    "no usable row": ([{"query": "", "pos": ["b"]}, {"query": "a", "pos": []}], {}, "no usable row of 2: .*empty"),
    "one query": ([{"query": "a", "pos": ["b"]}, {"query": "a", "pos": ["c"]}], {}, "every query of 2 rows is 'a'"),
    "one document": ([{"query": "a", "pos": ["b"]}, {"query": "c", "pos": ["b"]}], {}, "every document of 2 rows"),
    "one text": ([{"text": "a"}, {"text": "a"}], {}, "every query of 2 rows is 'a'"),
    "one score": (
        [{"sentence1": t, "sentence2": t + "x", "score": 1} for t in "ab"], {}, "every score of 2 rows is 1; "
    ),
    "a column twice": ([{"query": t, "pos": [t]} for t in "ab"], {}, "every query equals its document"),
    "negatives are positives": ([{"query": t, "pos": [t + "x"], "neg": [t + "x"]} for t in "ab"], {}, "every negative"),
    "queries are numbers": ([{"query": t, "pos": [t + "x"]} for t in "12"], {}, "every query is a number, as '1'"),
    "documents are numbers": ([{"query": t + "x", "pos": [t]} for t in "12"], {}, "every document is a number, as '1'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, fault: str) -> None:
    rows, options, message = FAULTS[fault]
    path = write_json(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=message) as caught:
        read(path, **options)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


TABLES = {
    "no header": (
        "a.csv",
        "A man is here.,A woman is there.\nx,y\n",
        "line 1: 'A man is here.' is not a name of a column",
    ),
    "semicolons": ("a.csv", "anchor;positive\na;b\n", "are the cells separated by ';'"),
    "tabs in csv": ("a.csv", "anchor\tpositive\na\tb\n", "separated by '.t'"),
    "commas in tsv": ("a.tsv", "anchor,positive\na,b\n", "separated by ','"),
    "carriage returns": ("a.csv", "anchor,positive\ra,b\r", r"tr '\\r' '\\n' < FILE"),
    "carriage returns in tsv": ("a.tsv", "anchor\tpositive\ra\tb\r", r"tr '\\r' '\\n' < FILE"),
    "carriage returns in jsonl": ("a.jsonl", '{"query": "a", "pos": "b"}\r{}\r', r"tr '\\r' '\\n' < FILE"),
    "carriage returns in txt": ("a.txt", "one\rtwo\rthree", r"tr '\\r' '\\n' < FILE"),
    "Excel's separator": ("a.csv", "sep=;\nanchor;positive\na;b\n", "line 1: 'sep=;' tells Excel .*remove the line"),
    "Excel's separator, a comma": ("a.csv", "sep=,\nanchor,positive\na,b\n", "line 1: 'sep=' tells Excel"),
    "Excel's separator, a tab": ("a.tsv", "sep=\t\nanchor\tpositive\na\tb\n", "line 1: 'sep=' tells Excel"),
    "joined files": ("a.csv", "anchor,positive\na,b\nanchor, positive\nc,d\n", "line 3: repeats the names of the col"),
    "joined tsv": ("a.tsv", "anchor\tpositive\na\tb\n\ufeffanchor\tpositive\n", "line 3: repeats the names of the col"),
    "a space before quotes": ("a.csv", '"anchor", "positive"\n"a", "b"\n', 'line 1: the name "positive" is between'),
    "an empty first line": ("a.csv", "\nanchor,positive\na,b\n", "line 1: empty; the first line must name"),
    "a key twice": ("a.jsonl", '{"query": "a", "pos": "b", "pos": "c"}\n', "line 1: .*the key 'pos' occurs twice"),
    "an object over lines": ("a.json", '{\n"query": "a",\n"pos": "b"}\n', "write one object a line.*jq -c"),
    "two objects on a line": ("a.jsonl", '{"query": "a", "pos": "b"} {}\n', "write one object a line.*jq -c"),
    "UTF-32": ("a.txt", "\udcff\udcfe\0\0a\0\0\0", "iconv -f utf-32"),
    "a name twice": ("a.csv", "anchor,anchor\na,b\n", "line 1: two columns have the name 'anchor'"),
    "a cell too many": (
        "a.csv",
        "anchor,positive\na,b\nc,d,e\n",
        "line 3: 3 columns; the header has 2 .*; give the row a cell for each",
    ),
    "a header that a spreadsheet wrote": ("a.tsv", '"anchor"\t"positive"\n"a"\t"b"\n', "write the file as .csv"),
    "a cell too few": ("a.tsv", "anchor\tpositive\na\tb\nc\n", "line 3: 1 columns; the header has 2"),
    "an open quote": ("a.csv", 'anchor,positive\na,b\nc,"d\ne,f\n', "line 3: not CSV"),
    "a quote within": ("a.csv", 'anchor,positive\na,b\nc,"d" e\n', "line 3: not CSV"),
    "a list with spaces as text": (
        "a.csv",
        "query,pos\na,\"[ 'x', 'y' ] \"\n",
        "2: 'pos' holds a list written as text",
    ),
    "a list as text in JSON": (
        "a.jsonl",
        '{"query": "a", "pos": "[\'x\', \'y\']"}\n',
        "1: 'pos' holds a list written as text",
    ),
    "a list as text": ("a.csv", "query,pos\na,\"['x', 'y']\"\n", "2: 'pos' holds a list written as text"),
    "not UTF-8": ("a.csv", "anchor,positive\na,\udcff\n", "line 2: not UTF-8"),
    "a header alone": ("a.tsv", "anchor\tpositive\n", "no usable row of 0"),
    "nothing": ("a.csv", "", "is empty"),
    "a JSON list": ("a.json", '[{"query": "a"}]', "jq -c"),
    "not JSON": ("a.jsonl", '{"query": "a", "pos": ["b"]}\n{"query": \n', "line 2.*: not JSON .*; correct the line"),
    "unknown suffix": ("a.xlsx", "x", r"no reader for files ending in \.xlsx"),
    "packed parquet": ("a.parquet.gz", "x", "no reader for files"),
    "not parquet": ("a.parquet", "x", "not a readable parquet file"),
}


@pytest.mark.parametrize("fault", TABLES)
def test_damaged_tables(tmp_path: Path, fault: str) -> None:
    name, content, message = TABLES[fault]
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize(("name", "end", "hint"), [
    ("a.txt.gz", b"rest", "fetch or pack it again"), ("a.txt.gz", None, "fetch or pack it again"),
    ("a.txt.zst", b"rest", "fetch or pack it again"), ("a.txt.gz", b"", "name it without .gz"),
])  # fmt: skip
def test_a_damaged_archive_is_not_taken_for_a_plain_file(
    tmp_path: Path, name: str, end: bytes | None, hint: str
) -> None:
    """Behind the content stands something else, the content ends early, or the file is not packed at all."""
    text = b"one\ntwo\n" * 9
    whole = gzip.compress(text) if name.endswith(".gz") else zstandard.compress(text)
    (tmp_path / name).write_bytes(text if end == b"" else whole[:-5] if end is None else whole + end)
    with pytest.raises(DataError, match=f"damaged .*; .*{hint}"):
        read(tmp_path / name)


def test_a_link_that_leads_nowhere_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(DataError, match="a link that leads to no file"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "columns", [("Query", "Positive", "Negative"), ("Positive", "query", "NEGATIVE_1"), ("Text1", "sentence_b", "Neg")]
)
def test_columns_are_known_in_any_case(tmp_path: Path, name: str, columns: tuple[str, ...]) -> None:
    rows = [dict(zip(columns, (f"a{i}", f"b{i}", f"c{i}"), strict=True)) for i in range(3)]
    swapped = columns[0] == "Positive"
    expected = [Pair(f"{'ba'[not swapped]}{i}", (f"{'ba'[swapped]}{i}",), (f"c{i}",)) for i in range(3)]
    assert read(WRITERS[name](tmp_path / name, rows)) == expected


def test_a_column_that_is_asked_for_and_one_of_its_exact_name_come_first(tmp_path: Path) -> None:
    rows = [{"Query": f"a{i}", "query": f"b{i}", "pos": f"c{i}", " Neg ": f"d{i}"} for i in range(2)]
    path = write_json(tmp_path / "a.jsonl", rows)
    assert read(path) == [Pair(f"b{i}", (f"c{i}",), (f"d{i}",)) for i in range(2)]
    assert read(path, columns={"query": "Query"}) == [Pair(f"a{i}", (f"c{i}",), (f"d{i}",)) for i in range(2)]


def test_labels_may_be_true_and_false_and_scores_decimals(tmp_path: Path) -> None:
    """Quora's pairs have booleans, which pandas writes into csv as words; Spark writes decimals into parquet."""
    texts = [{"question1": f"a{i}", "question2": f"b{i}"} for i in range(2)]
    expected = [Pair(f"a{i}", (f"b{i}",), score=float(i)) for i in range(2)]
    truth = [{**row, "is_duplicate": bool(i)} for i, row in enumerate(texts)]
    for write, name in ((write_json, "a.jsonl"), (write_table, "a.csv"), (write_parquet, "a.parquet")):
        assert read(write(tmp_path / name, truth)) == expected
    decimals = [{**row, "score": Decimal(f"{i}.00")} for i, row in enumerate(texts)]
    assert read(write_parquet(tmp_path / "b.parquet", decimals)) == expected


def test_quotes_behind_a_space_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_text('anchor,positive\n"a", "b"\n"c","d"\n')
    assert read(tmp_path / "a.csv") == [Pair("a", (' "b"',)), Pair("c", ("d",))]
    assert "1 rows have a cell between double quotes, the first is line 2" in caplog.text
    assert "no space before the quotes" in caplog.text


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_quotes_in_tsv_are_text(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / name).write_text('anchor,positive\n"a",b\n'.replace(",", "," if name == "a.csv" else "\t"))
    assert read(tmp_path / name) == [Pair("a" if name == "a.csv" else '"a"', ("b",))]
    assert ("1 rows have a cell between double quotes, the first is line 2" in caplog.text) == (name == "a.tsv")


@pytest.mark.parametrize(
    ("judgements", "split", "message"),
    [
        ([("q1", "d1", 1)], "train", r"train\.tsv: no such file; split=train is chosen, and there are test: choose"),
        ([("q1", "d9", 1)], "test", "test.tsv:2: 'corpus-id' names 'd9', which the corpus does not have"),
        ([("q9", "d1", 1)], "test", r"test\.tsv:2: query-id 'q9' is not in .*queries\.jsonl"),
        ([("q1", "d1", "x")], "test", r"test\.tsv:2: .* a whole number as score are expected, found 'q1', 'd1', 'x'"),
        ([("q1", "d1", 0)], "test", "no usable row of 1"),
    ],
)
def test_damaged_beir(tmp_path: Path, judgements: list[tuple[str, str, object]], split: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(beir(tmp_path / "set", judgements), split=split)


def test_an_id_has_one_text(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", [{"query": "x", "pos": ["1"]}])
    corpus = write_json(tmp_path / "c.jsonl", [{"_id": "1", "text": "a"}, {"_id": "1", "text": "a"}])
    assert read(path, corpus=corpus) == [Pair("x", ("a",))]
    write_json(corpus, [{"_id": "1", "text": "a"}, {"_id": "1", "text": "b"}])
    with pytest.raises(DataError, match=r"c\.jsonl:2: the id '1' has another text above"):
        read(path, corpus=corpus)


def test_the_caller_is_told_of_wrong_options(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", [{"query": "x", "pos": ["1"]}])
    for options, message in [
        ({"form": "flagembeding"}, "did you mean 'flagembedding'"),
        ({"form": "ids"}, "form=ids needs the texts"),
        ({"form": "texts", "corpus": path}, "leave corpus out"),
        ({"columns": {"anchor": "x"}}, "columns: there is no role 'anchor'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read(path, **options)
    with pytest.raises(DataError, match="no file of pairs"):
        read()
    with pytest.raises(DataError, match=r"nothing\.jsonl does not exist"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="a folder without a data set"):
        read(tmp_path)


def test_a_set_of_the_hub_is_asked_for_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"dataset": ["x", "x"], "query": ["a", "b"], "document": ["c", "d"]})
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, subset: str | None, split: str) -> datasets.Dataset:
        asked.append((name, subset, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["default"])
    counts = Counts()
    found = dict(read_pairs([Path("some/pairs")], counts=counts))
    assert found == {"some/pairs:1": Pair("a", ("c",)), "some/pairs:2": Pair("b", ("d",))}
    assert counts.columns == {"some/pairs": "query 'query'; positive 'document'; not read 'dataset'"}
    assert len(read(Path("some/pairs/triplet"), split="dev")) == 2
    assert asked == [("some/pairs", None, "train"), ("some/pairs", "triplet", "dev")]


def test_a_file_is_named_once_whatever_it_is_called(tmp_path: Path) -> None:
    write_json(tmp_path / "a.jsonl", [{"query": "a", "pos": ["b"]}])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    (tmp_path / "folder").symlink_to(tmp_path)
    for other in ("a.jsonl", "link.jsonl", "folder/a.jsonl"):
        both = [str(tmp_path / name) for name in ("a.jsonl", other)]
        with pytest.raises(DataError, match=r"source pairs: .* is named twice"):
            list(next(PairData(files=both).each()).paths())
        with pytest.raises(DataError, match=rf"data\.validation_files: .*{other} is trained on too"):
            PairData(files=both[:1], validation_files=both[1:]).held_out_paths()


def test_no_name_has_two_roles() -> None:
    names = [name for known in ROLES.values() for name in known]
    assert len(names) == len(set(names))
    assert set(FORMS) >= {"auto", "beir"}


def test_a_first_line_that_may_be_a_pair_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.tsv"
    for header, said in (("apple\tpear", True), ("anchor\tpositive", False)):
        caplog.clear()
        path.write_text(f"{header}\ncat\tdog\nred\tblue\n")
        assert len(list(read_pairs([path]))) == 2
        assert ("the first line counts as names of columns" in caplog.text) == said
        assert ("data.columns='{query: NAME, positive: NAME}' names them" in caplog.text) == said


def test_the_index_that_pandas_writes_is_no_score(tmp_path: Path) -> None:
    columns = {"foo": ["a", "b"], "bar": ["x", "y"], "__index_level_0__": [0, 1]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert [pair.score for _, pair in read_pairs([tmp_path / "a.parquet"])] == [None, None]
