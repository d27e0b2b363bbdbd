"""The same pairs in every form and kind of file are read as the same pairs."""

from __future__ import annotations

import gzip
import json
import logging
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.pairs.data_config import PairData
from capt.pretrain.pairs.forms import FORMS, Counts, Pair, read_pairs
from capt.pretrain.pairs.layout import ROLES
from capt.pretrain.retrieval.data import read_collections, read_pair_rows
from tests.unit.pairs.written import (
    WITH_LISTS,
    WRITERS,
    beir,
    read,
    some_texts,
    write_json,
    write_parquet,
    write_table,
)

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


@pytest.mark.parametrize("form", ["auto", "named"])
def test_rows_that_are_lists_are_read_in_the_order_of_columns(tmp_path: Path, form: str) -> None:
    t = some_texts(7, line_breaks=True)
    path = tmp_path / "a.jsonl"
    shapes: dict[str, list[Any]] = {
        "columns": [[t[0], t[1]], [t[2], t[3], t[4]], [t[5], t[6], t[7], t[8]], [t[9], [t[10]], [t[11], t[12]]]],
        "scores": [[t[0], t[1], 0.25], [t[2], t[3], 1], [t[4], t[5], 0]],
        "texts": [[t[0]], [t[1]], [t[2]]],
    }
    for name, rows in shapes.items():
        expected = [Pair(q, (p[0] if isinstance(p, list) else p,),
                         tuple(text for part in n for text in ([part] if isinstance(part, str) else part)))
                    for q, p, *n in rows] if name == "columns" else [
                        Pair(q, tuple(p[:1]), score=float(p[1]) if p else None) for q, *p in rows]  # fmt: skip
        write_json(path, rows)
        assert read(path, form="auto" if form == "auto" else name) == expected
        packed = tmp_path / "a.json.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert read(packed) == expected
        if name == "columns":
            swapped = read(path, columns={"query": "column 2", "positive": "column 1"})
            assert [pair.query for pair in swapped] == [pair.positives[0] for pair in expected]
            found = [(row.query, tuple(row.positives), tuple(row.negatives)) for row in read_pair_rows([path])]
            assert found == [(pair.query, pair.positives, pair.negatives) for pair in expected]
    write_json(path, [[[t[0]], [t[1]]], [[t[2]], [t[3]], [t[4], t[5]]]])
    assert read(path) == [Pair(t[0], (t[1],)), Pair(t[2], (t[3],), (t[4], t[5]))]
    refused: list[tuple[Any, str]] = [
        ([["a", "b"], ["c", "d", 0.5]], "a row of scores"),
        ([["a", "b"], ["c"]], "the columns are 'column 1'"),
        ([["a", "b", 0.5], ["c", "d"]], "rows of a file have the same columns"),
        ([["a", "b", 0.5], ["c", "d", "e"]], "'column 3' must be a number"),
        ([[]], "the columns none are not"),
        ([[["a", "b"], ["c", "d"]]], "write one object a line: jq -c '.*' FILE"),
    ]
    for rows, message in refused:
        write_json(path, rows)
        with pytest.raises(DataError, match=message):
            read(path)


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
    assert counts.first["without_query"] == f"{tmp_path}/a.txt, line 3"


def test_one_of_several_columns_is_chosen(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", [{"title": "a", "body": "b"}, {"title": "c", "body": "d"}])
    assert read(path, columns={"text": "body"}) == [Pair("b", ()), Pair("d", ())]
    assert read(path, columns={"query": "body", "positive": "title"}) == [Pair("b", ("a",)), Pair("d", ("c",))]


def test_a_corpus_that_no_column_of_ids_belongs_to_is_refused(tmp_path: Path) -> None:
    # Rows would be read as queries alone, and train something else.
    corpus = write_json(tmp_path / "corpus.jsonl", [{"_id": i, "text": f"text {i}"} for i in range(3)])
    path = tmp_path / "a.csv"
    path.write_text("query,product_id\na,1\nb,2\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.csv, line 2: of the columns 'query', 'product_id' none is known"):
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
    with pytest.raises(DataError, match=r"c.jsonl, line 1: 'title' should be a text, it is 5; put quotes around it"):
        read(write_json(tmp_path / "c.jsonl", rows))


def test_beir(tmp_path: Path) -> None:
    folder = beir(
        tmp_path / "set", [("q1", "d1", 1), ("q0", "d2", 2), ("q1", "d4", 0), ("q1", "d3", 1), ("q3", "d5", 0)]
    )
    counts = Counts()
    found = dict(read_pairs([folder], split="test", counts=counts))
    path = folder / "qrels" / "test.tsv"
    assert found == {
        f"{path}, line 2": Pair("query 1", ("T t1", "T t3"), ("t4",)),
        f"{path}, line 3": Pair("query 0", ("t2",)),
    }
    assert (counts.rows, counts.without_positive, counts.first["without_positive"]) == (3, 1, f"{path}, line 6")


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
        f"judgements that contradict an earlier one, the last counts: 1, the first at {place}, line 4"
    ]


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (
            "corpus.jsonl",
            {"_id": "d1", "title": 0, "text": "t"},
            r"corpus.jsonl, line 1: 'title' should be a text, it is 0",
        ),
        (
            "corpus.jsonl",
            {"_id": "d1", "title": [], "text": "t"},
            r"corpus.jsonl, line 1: 'title' should be a text, it is \[\]",
        ),
        (
            "corpus.jsonl",
            {"_id": " ", "text": "t"},
            "corpus.jsonl, line 1: .?._id.? is empty; give the row an id, or remove it",
        ),
        (
            "queries.jsonl",
            {"_id": "", "text": "t"},
            "queries.jsonl, line 1: .?._id.? is empty; give the row an id, or remove it",
        ),
        (
            "qrels/test.tsv",
            "q1\td1\t1_0",
            "test.tsv, line 1: .* a whole number as score are expected, found 'q1', 'd1', '1_0'",
        ),
        (
            "qrels/test.tsv",
            "q1\td1\tnan",
            "test.tsv, line 1: .* a whole number as score are expected, found 'q1', 'd1', 'nan'",
        ),
        ("qrels/test.tsv", "q1\t\t1", "test.tsv, line 1: query-id, corpus-id .* expected, found 'q1', '', '1'"),
        ("qrels/test.tsv", "\td1\t1", "test.tsv, line 1: query-id, corpus-id .* expected, found '', 'd1', '1'"),
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
    assert list(read_pairs([path])) == [
        (f"{path}, line 2", Pair("a\nb", ("c\nd",))),
        (f"{path}, line 6", Pair("e", ("f",))),
    ]


def test_several_files_and_patterns(tmp_path: Path) -> None:
    for i in range(3):
        write_json(tmp_path / f"{i}.jsonl", [{"query": f"q{i}", "pos": [f"p{i}"]}])
    assert [place for place, _ in read_pairs([tmp_path / "[12].jsonl", tmp_path / "0.jsonl"])] == [
        f"{tmp_path}/{i}.jsonl, line 1" for i in (1, 2, 0)
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
    assert f"rows left out, the query is empty: 2, the first at {path}, line 2" in caplog.text
    assert all(remark in caplog.text for remark in counts.remarks())
    assert len(counts.remarks()) == 8


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
    assert found == {"some/pairs, row 1": Pair("a", ("c",)), "some/pairs, row 2": Pair("b", ("d",))}
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
