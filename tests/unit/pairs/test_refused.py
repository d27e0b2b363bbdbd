"""Pairs that cannot be meant, and damaged files of them, are refused with their place and a remedy."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import zstandard

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.pairs.forms import Pair
from tests.unit.pairs.written import (
    Rows,
    beir,
    read,
    write_json,
)

FAULTS: dict[str, tuple[Rows, dict[str, Any], str]] = {
    "number for a text": ([{"query": "a", "pos": [3]}], {}, "line 1: \'pos' must be text, it holds 3"),
    "list for a query": ([{"query": ["a", "b"], "pos": ["c"]}], {}, "line 1: \'query' holds 2 texts"),
    "NUL": ([{"query": "a\0", "pos": ["c"]}], {}, "line 1: \'query' is binary"),
    "half a character": ([{"query": "\ud800", "pos": ["c"]}], {}, "line 1: \'query' is not text"),
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
    "another form later": ([{"query": "a", "pos": ["b"]}, {"text": "c"}], {}, "line 2: the columns are"),
    "a key misspelt later": ([{"query": "a", "pos": ["b"]}, {"query": "c", "psitive": "d"}], {},
                              "line 2: the columns are .*: complete the row"),
    "a score later": (
        [{"query": "a", "document": "b"}, {"query": "c", "document": "d", "score": 1}], {},
        "line 2: a row of scores.*pairs.*: complete the row, or give"
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
        "line 3: 3 cells, and 2 in the first line .'anchor', 'positive'.; put a text",
    ),
    "a header that a spreadsheet wrote": ("a.tsv", '"anchor"\t"positive"\n"a"\t"b"\n', "write the file as .csv"),
    "a cell too few": (
        "a.tsv",
        "anchor\tpositive\na\tb\nc\n",
        "line 3: 1 cells, and 2 in the first line .*; no cell may hold a tab; .* write the file as .csv",
    ),
    "an open quote": ("a.csv", 'anchor,positive\na,b\nc,"d\ne,f\n', "line 3: not CSV"),
    "a quote within": ("a.csv", 'anchor,positive\na,b\nc,"d" e\n', "line 3: not CSV"),
    "a list with spaces as text": (
        "a.csv",
        "query,pos\na,\"[ 'x', 'y' ] \"\n",
        "line 2: 'pos' holds a list written as text",
    ),
    "a list as text in JSON": (
        "a.jsonl",
        '{"query": "a", "pos": "[\'x\', \'y\']"}\n',
        "line 1: 'pos' holds a list written as text",
    ),
    "a list as text": ("a.csv", "query,pos\na,\"['x', 'y']\"\n", "line 2: 'pos' holds a list written as text"),
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
    """Something else follows the content, the content ends early, or the file is not packed at all."""
    text = b"one\ntwo\n" * 9
    whole = gzip.compress(text) if name.endswith(".gz") else zstandard.compress(text)
    (tmp_path / name).write_bytes(text if end == b"" else whole[:-5] if end is None else whole + end)
    with pytest.raises(DataError, match=f"damaged .*; .*{hint}"):
        read(tmp_path / name)


def test_a_link_that_leads_nowhere_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(DataError, match="a link that leads to no file"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("judgements", "split", "message"),
    [
        ([("q1", "d1", 1)], "train", r"train\.tsv: no such file; split=train is chosen, and there are test: choose"),
        ([("q1", "d9", 1)], "test", "test.tsv, line 2: 'corpus-id' names 'd9', which the corpus does not have"),
        ([("q9", "d1", 1)], "test", r"test\.tsv, line 2: query-id 'q9' is not in .*queries\.jsonl"),
        (
            [("q1", "d1", "x")],
            "test",
            r"test\.tsv, line 2: .* a whole number as score are expected, found 'q1', 'd1', 'x'",
        ),
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
    with pytest.raises(DataError, match=r"c\.jsonl, line 2: the id '1' has another text above"):
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
