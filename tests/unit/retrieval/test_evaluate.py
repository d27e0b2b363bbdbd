"""Evaluation end to end: the forms of data, sentence-transformers' own figures, and the command line."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, UserError
from capt.pretrain.config.retrieval import METRICS
from capt.pretrain.retrieval.compare import compare
from capt.pretrain.retrieval.data import Collection, read_collections, read_documents, read_queries
from capt.pretrain.retrieval.encode import embed
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.evaluate import evaluate
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RetrievalSettings
from capt.pretrain.retrieval.rankings import SearchCorpus
from capt.pretrain.retrieval.sentence_models import positions_of
from tests.finetune import write_encoder
from tests.support import Capt
from tests.unit.retrieval.toy import write_beir, write_sentence_folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentence_folder(tmp_path_factory.mktemp("model") / "st")


def measured(
    model: Path, data: Path, store: Path, documents_by: Path | None = None, **settings: Any
) -> dict[str, dict[str, float]]:
    chosen = EncodeOptions(str(store)), EncoderOptions(), RetrievalSettings(**settings)
    result = evaluate(model, [data], *chosen, documents_by=documents_by)
    return dict(result["sections"][0]["poolers"])


def test_the_figures_are_those_of_sentence_transformers(sentences: Path, tmp_path: Path) -> None:
    """InformationRetrievalEvaluator, prompts included. Its nDCG knows no grades, so that these are 0 and 1."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    folder = write_beir(tmp_path / "beir", documents=200, queries=30)
    rows = (folder / "corpus.jsonl").read_text().splitlines()[:-1]  # ties are theirs by arrival
    (folder / "corpus.jsonl").write_text("".join(f"{row}\n" for row in dict.fromkeys(rows)))
    qrels = folder / "qrels" / "test.tsv"
    lines = [line.split("\t") for line in qrels.read_text().splitlines() if "absent" not in line and "d199" not in line]
    qrels.write_text("".join(f"{q}\t{d}\t{s if s == 'score' else min(int(s), 1)}\n" for q, d, s in lines))
    (collection,) = read_collections(folder)
    relevant = {query: {name for name, grade in of.items() if grade} for query, of in collection.judged.items()}
    theirs = InformationRetrievalEvaluator(
        {name: text for name, text in collection.queries if relevant[name]},
        dict(collection.documents()),
        {name: names for name, names in relevant.items() if names},
        accuracy_at_k=[1],
        precision_recall_at_k=[1, 10, 100],
        map_at_k=[100],
        query_prompt_name="query",
        corpus_prompt_name="document",
    )(SentenceTransformer(str(sentences), device="cpu"))
    ours = measured(sentences, folder, tmp_path / "store", dims="8")
    for name in METRICS:
        (expected,) = (value for key, value in theirs.items() if key.replace("cosine_", "") == name)
        assert ours["full"][name] == pytest.approx(expected, abs=1e-9), name
    assert ours["8"] != ours["full"]


def test_documents_may_be_by_another_model(sentences: Path, tmp_path: Path) -> None:
    """A literal ranking of one model's vectors of queries and another one's of documents."""
    folder = write_beir(tmp_path / "beir", documents=60, queries=12)
    other = write_sentence_folder(tmp_path / "other", initializer_range=0.3)
    (collection,) = read_collections(folder)
    own, theirs = (load_text_encoder(model, EncoderOptions()) for model in (sentences, other))
    names, texts = zip(*collection.documents(), strict=True)
    rows = theirs.encode(list(texts), "document")
    reciprocal = []
    for name, text in collection.queries:
        scores = (rows / np.linalg.norm(rows, axis=1)[:, None]) @ own.encode([text], "query")[0]
        ranked = [names[i] for i in np.lexsort((names, scores))[::-1] if names[i] != name][:10]
        grades = collection.judged[name]
        if max(grades.values()) > 0:
            reciprocal.append(next((1 / place for place, each in enumerate(ranked, 1) if grades.get(each, 0) > 0), 0.0))
    options = EncodeOptions(str(tmp_path / "store"))
    settings = RetrievalSettings(precision="int8,binary")
    result = evaluate(sentences, [folder], options, EncoderOptions(), settings, documents_by=other)
    (section,) = result["sections"]
    assert section["name"] == "beir, documents by other, int8 and binary", "a run keeps it beside its own figures"
    found = measured(sentences, folder, tmp_path / "store", documents_by=other)["full"]
    assert found["mrr@10"] == pytest.approx(np.mean(reciprocal), abs=1e-9)
    assert found != measured(sentences, folder, tmp_path / "store")["full"]
    wide = write_sentence_folder(tmp_path / "wide", hidden_size=24)
    with pytest.raises(
        ConfigError, match=r"--documents-by .*24 dimensions, and .* has 32: train it with distillation\.proj"
    ):
        measured(sentences, folder, tmp_path / "store", documents_by=wide)


def test_the_fusion_is_that_of_the_runs_of_pytrec_eval(sentences: Path, tmp_path: Path) -> None:
    """Runs by sentence-transformers and by bm25s, ranked as trec_eval does, fused, and measured by it."""
    import bm25s
    from sentence_transformers import SentenceTransformer

    pytrec_eval = pytest.importorskip("pytrec_eval", reason="pytrec-eval-terrier is not installed")
    folder = write_beir(tmp_path / "beir", documents=200, queries=30)
    (collection,) = read_collections(folder)
    names, texts = zip(*collection.documents(), strict=True)
    model = SentenceTransformer(str(sentences), device="cpu")
    asked = [text for _, text in collection.queries]
    rows = [model.encode_query(asked).astype(np.float64), model.encode_document(list(texts)).astype(np.float64)]
    dense = np.divide(rows[0] @ rows[1].T, np.linalg.norm(rows[0], axis=1)[:, None] * np.linalg.norm(rows[1], axis=1))
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    index.index(bm25s.tokenize(list(texts), stopwords=None, show_progress=False), show_progress=False)
    words = [index.get_scores(each) for each in bm25s.tokenize(asked, stopwords=None, return_ids=False)]
    fused = {}
    for number, (query, _) in enumerate(collection.queries):
        sums: dict[str, float] = {}
        for scores, least in ((np.round(dense[number], 6), -np.inf), (words[number], 0)):
            run = {name: float(score) for name, score in zip(names, scores, strict=True) if score > least}
            for rank, name in enumerate(sorted(run, key=lambda name: (run[name], name), reverse=True)[:100], start=1):
                sums[name] = sums.get(name, 0) + 1 / (60 + rank)
        fused[query] = sums
    judged = {query: of for query, of in collection.judged.items() if max(of.values()) > 0}
    theirs = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10", "recall.10"}).evaluate(fused)
    ours = measured(sentences, folder, tmp_path / "store", fusion=True)
    assert list(ours) == ["full", "bm25", "fusion"]
    for name, measure in (("ndcg@10", "ndcg_cut_10"), ("recall@10", "recall_10")):
        assert ours["fusion"][name] == pytest.approx(np.mean([theirs[query][measure] for query in judged]), abs=1e-9)
    assert ours["fusion"]["ndcg@10"] not in (ours["full"]["ndcg@10"], ours["bm25"]["ndcg@10"])


@pytest.mark.parametrize("kind", ["run-less folder", "foreign family", "sentence-transformers"])
def test_vectors_are_those_of_the_libraries(kind: str, sentences: Path, tmp_path: Path) -> None:
    """Mean pooling over all tokens of a Hugging Face model, and whatever a sentence-transformers folder says."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    texts = ["the river runs", "a stone", "no bird sings and the door opens and the tree falls"]
    if kind == "sentence-transformers":
        folder, model = sentences, SentenceTransformer(str(sentences), device="cpu")
    else:
        folder = write_encoder(tmp_path / "hf", "RobertaForMaskedLM" if kind == "run-less folder" else "BertModel")
        part = Transformer(str(folder), max_seq_length=64)
        model = SentenceTransformer(modules=[part, Pooling(32, pooling_mode="mean")], device="cpu")
    prompt = "no " if kind == "sentence-transformers" else ""
    with torch.inference_mode():
        expected = model.encode([prompt + text for text in texts])
    encoder = load_text_encoder(folder, EncoderOptions())
    assert np.abs(encoder.encode(texts, "query") - expected).max() < 1e-5
    assert encoder.lengths(texts, "query") == [
        len(row) for row in model.tokenizer([prompt + text for text in texts])["input_ids"]
    ]
    assert "no prompts" in encoder.protocol() or "'no '" in encoder.protocol()


def test_ids_of_documents_are_those_of_their_rows(tmp_path: Path) -> None:
    """Line numbers begin with 1 and the ids of many sets with 0: in their place they would shift all judgements."""
    for key in ("_id", "docid", "pid"):
        (tmp_path / "c.JSONL").write_text(f'{{"{key}": 0, "text": "a"}}\n{{"{key}": 1, "text": "b"}}\n')
        assert list(read_documents(tmp_path / "c.JSONL")) == [("0", "a"), ("1", "b")]
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "queries.jsonl").write_text('{"query_id": 7, "text": "b"}\n')
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("7\t1\t1\n")
    (collection,) = read_collections(tmp_path)
    with pytest.raises(DataError, match=r'corpus\.jsonl, line 1: no "_id", by which judgements name it'):
        SearchCorpus.of(collection)


def test_nano_beir_and_pairs_give_the_figures_of_the_beir_folder(sentences: Path, tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "beir")
    expected = measured(sentences, folder, tmp_path / "store")
    (collection,) = read_collections(folder)
    rows = {
        "corpus": [{"_id": name, "text": text} for name, text in collection.documents()],
        "queries": [{"_id": name, "text": text} for name, text in collection.queries],
        "qrels": [
            {"query-id": q, "corpus-id": d, "score": g} for q, of in collection.judged.items() for d, g in of.items()
        ],
    }
    for kind, content in rows.items():
        (tmp_path / "nano" / kind).mkdir(parents=True)
        path = tmp_path / "nano" / kind / "NanoToy-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
    assert measured(sentences, tmp_path / "nano", tmp_path / "store") == expected

    documents = dict(collection.documents())
    pairs = [
        {"query": text, "pos": [documents["d1"], documents["d2"]], "neg": [documents["d3"]]}
        for _, text in collection.queries
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (of_pairs,) = read_collections(tmp_path / "pairs.jsonl")
    assert len(list(of_pairs.documents())) == 3
    copies = [{"query": f" {row['query'].upper()}", "pos": [row["pos"][1].upper()]} for row in pairs]
    (tmp_path / "copies.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*pairs, *copies]))
    (with_copies,) = read_collections(tmp_path / "copies.jsonl")
    assert list(with_copies.documents()) == list(of_pairs.documents())
    assert (with_copies.queries, with_copies.judged) == (of_pairs.queries, of_pairs.judged)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    (in_parquet,) = read_collections(tmp_path / "pairs.parquet")
    assert list(in_parquet.documents()) == list(of_pairs.documents())
    assert in_parquet.judged == of_pairs.judged
    assert measured(sentences, tmp_path / "pairs.jsonl", tmp_path / "store")["full"]["recall@10"] == 1


def test_a_query_that_is_a_document_does_not_find_itself(sentences: Path, tmp_path: Path) -> None:
    """The same id alone is not enough: many sets count queries and documents from 1. Nor is a relevant one left out."""
    folder = write_beir(tmp_path / "beir", documents=30)
    (collection,) = read_collections(folder)
    text = dict(collection.documents())["d4"]
    for name, relevant, left_out in (("d4", "d5", True), ("other", "d4", False), ("d4", "d4", False)):
        (folder / "queries.jsonl").write_text(json.dumps({"_id": name, "text": text}) + "\n")
        (folder / "qrels" / "test.tsv").write_text(f"q\td\ts\n{name}\t{relevant}\t1\n")
        plain = EncoderOptions(query_prompt="", document_prompt="")
        result = evaluate(sentences, [folder], EncodeOptions(str(tmp_path / "store")), plain, RetrievalSettings())
        assert ("left out of its own ranking" in result["sections"][0]["protocol"]) == left_out
        if relevant == "d4":
            assert result["sections"][0]["poolers"]["full"]["mrr@10"] == 1
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "d5", "text": text}) + "\n")
    (folder / "qrels" / "test.tsv").write_text("q\td\ts\nd5\td5\t1\n")
    assert measured(sentences, folder, tmp_path / "store")["full"]["recall@100"] == 1


@pytest.mark.parametrize(
    ("qrels", "queries", "says"),
    [
        ("q1\td1\t0\nq2\td2\t-1\n", "12", "no judgement of its queries is above 0"),
        ("q1\td1\t0.5\nq2\td2\t1\n", "12", "line 1: query-id, corpus-id and a whole number"),
        ("q1\td1\tnan\nq2\td2\t1\n", "12", "line 1: query-id, corpus-id and a whole number"),
        ("q1\td1\t\nq2\td2\t1\n", "12", "line 1: query-id, corpus-id and a whole number"),
        ("q1\td1\t1\nq2\td2\t1\nq3\td2\t1\n", "12", "1 judged queries are not among the queries"),
        ("q1\td1\t1\nq1\td1\t1\nq2\td2\t1\nq2\td2\t2\n", "12", "1 judgements contradict an earlier one"),
        ("q1\td1\t1e3\nq2\td2\t+1.\n", "12", ""),
        ("q0\td1\t1\n", "0", "1 queries have no text"),
        ("q1\td1\t1\n", "11", "the id 'q1' is there twice; leave one of the two out"),
        ("q1\td3\t1\nq2\td1\t0\n", "12", "none of the relevant documents is in the corpus"),
        ("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t1\n", "12", ""),
    ],
)
def test_no_judgement_or_query_is_lost_without_a_word(qrels: str, queries: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d1", "text": "a"}\n{"_id": "d2", "text": "b"}\n')
    rows = [{"_id": f"q{each}", "text": "a" * int(each)} for each in queries]
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "qrels" / "test.tsv").write_text(qrels)
    try:
        (collection,) = read_collections(tmp_path)
        said = "; ".join(collection.remarks)
        SearchCorpus.of(collection)
        assert len(collection.queries) == len(queries)
    except DataError as error:
        said = str(error)
    assert says in said if says else not said


@pytest.mark.parametrize("score", [0.4, float("nan"), float("inf"), 1e308, None, "1"])
def test_a_judgement_in_parquet_is_a_whole_number(score: object, tmp_path: Path) -> None:
    tables = {"corpus": {"_id": ["1"], "text": ["a"]}, "queries": {"_id": ["1"], "text": ["b"]},
              "qrels": {"query-id": ["1"], "corpus-id": ["1"], "score": [score]}}  # fmt: skip
    for name, table in tables.items():
        (tmp_path / name).mkdir()
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / name / "Nano.parquet")
    with pytest.raises(DataError, match=r'Nano.parquet, row 1: "score" is .*; a whole number is expected'):
        read_collections(tmp_path)


@pytest.mark.parametrize(("column", "value"), [("_id", ""), ("title", 5)])
def test_documents_in_parquet_have_ids_and_titles_that_are_texts(column: str, value: object, tmp_path: Path) -> None:
    tables = {"corpus": {"_id": ["1"], "text": ["a"], "title": ["t"]} | {column: [value]}, "queries": {"_id": ["1"],
              "text": ["b"]}, "qrels": {"query-id": ["1"], "corpus-id": ["1"]}}  # fmt: skip
    for name, table in tables.items():
        (tmp_path / name).mkdir()
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / name / "Nano.parquet")
    (collection,) = read_collections(tmp_path)
    with pytest.raises(DataError, match=f"Nano.parquet, row 1: .{column}. (is empty|should be a text)"):
        list(collection.documents())


@pytest.mark.parametrize("column", ["is_duplicate", "Label", "score"])
def test_a_label_of_pairs_is_not_passed_over_in_silence(
    column: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Quora's file: two questions that are no duplicates would count as one that finds the other.
    path = tmp_path / "quora.csv"
    path.write_text(f"id,question1,question2,{column}\n0,a b,c d,0\n1,e f,g h,1\n", encoding="utf-8")
    (collection,) = read_collections(path)
    assert len(list(collection.documents())) == 2
    says = f"{path}: {column!r} is not read; every row counts as a pair that belongs together"
    assert [record.getMessage() for record in caplog.records] == [says]


def test_bm25_of_texts_without_a_word() -> None:
    pytest.importorskip("bm25s", reason="bm25s is not installed")
    from capt.pretrain.retrieval.rankings import SearchCorpus, bm25_rankings

    collection = Collection("c", lambda: iter([("1", ""), ("2", "!")]), [("q", "a word")], {"q": {"1": 1}})
    assert bm25_rankings(collection, SearchCorpus.of(collection)) == [[]]


def test_bm25_beside_the_model(sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the literal formula: idf log(1 + (N - n + .5) / (n + .5)), tf / (tf + k1 (1 - b + b L / mean L))."""
    pytest.importorskip("bm25s", reason="bm25s is not installed")
    import math
    import re

    from capt.pretrain.retrieval.rankings import SearchCorpus, bm25_rankings

    folder = write_beir(tmp_path / "beir")
    (collection,) = read_collections(folder)
    corpus = SearchCorpus.of(collection)
    texts = [re.findall(r"(?u)\b\w\w+\b", text.lower()) for _, text in collection.documents()]
    mean = sum(map(len, texts)) / len(texts)
    for (_, query), found in zip(collection.queries, bm25_rankings(collection, corpus), strict=True):
        scores = {}
        for name, words in zip(corpus.names, texts, strict=True):
            scores[name] = sum(
                math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
                * words.count(word)
                / (words.count(word) + 1.5 * (0.25 + 0.75 * len(words) / mean))
                for word in re.findall(r"(?u)\b\w\w+\b", query.lower())
                if (n := sum(word in other for other in texts))
            )
        ranked = [round(scores[name], 4) for name in found]
        assert ranked == sorted(ranked, reverse=True)
        assert len(found) == sum(score > 0 for score in scores.values())
    systems = measured(sentences, folder, tmp_path / "store", bm25=True)
    assert list(systems) == ["full", "bm25"]
    monkeypatch.setattr("capt.pretrain.retrieval.evaluate.embed", lambda *_: pytest.fail("encoded"))
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UserError, match="the package bm25s is not installed"):
        measured(sentences, folder, tmp_path / "store", fusion=True)


def test_the_command_line(sentences: Path, tmp_path: Path, capt: Capt) -> None:
    folder = write_beir(tmp_path / "beir")
    store, kept, out = (str(tmp_path / name) for name in ("store", "figures.jsonl", "out.json"))
    data = ["--retrieval", str(folder), "--store", store]
    code, said, err = capt(
        "evaluate", str(sentences), *data, "--dims", "16,8", "--per-query", kept, "--out", out, "--json"
    )
    assert code == 0, err
    assert json.loads(said)["sections"] == json.loads(Path(out).read_text())["sections"]
    rows = [json.loads(line) for line in Path(kept).read_text().splitlines()]
    assert {row["system"] for row in rows} == {"full", "16", "8"}
    means = json.loads(said)["sections"][0]["poolers"]["8"]
    assert np.mean([row["map@100"] for row in rows if row["system"] == "8"]) == pytest.approx(means["map@100"])
    code, said, _ = capt("compare", kept, f"{kept}:8", "--json")
    assert code == 0
    (line,) = (row for row in json.loads(said) if row["metric"] == "map@100")
    assert line["second"] == pytest.approx(means["map@100"])
    # Of several models one table: nDCG@10 of each, and its difference from the first.
    others = [f"{kept}:8", f"{kept}:16"]
    code, said, _ = capt("compare", kept, *others, "--json")
    figures = {row["system"]: row for row in json.loads(said) if row["metric"] == "ndcg@10"}
    assert [*figures] == others
    code, said, _ = capt("compare", kept, *others)
    first, *rest = (words.split() for words in said.splitlines()[2:])
    assert first == ["figures", f"{figures[others[0]]['first']:.4f}"]
    for words, (system, row) in zip(rest, figures.items(), strict=True):
        assert words[:3] == [system.rpartition(":")[2], f"{row['second']:.4f}", f"{row['difference']:+.4f}"]
    code, said, _ = capt("encode", str(sentences), "--text", str(folder), "--out", store, "--json")
    assert code == 0
    assert [each["encoded"] for each in json.loads(said)["sources"]] == [0, 1]  # a query without judgements
    _, said, _ = capt("encode", str(sentences), "--text", str(folder), "--out", store, "--length", "16")
    assert said.endswith(f"\nnext: capt evaluate {sentences} --retrieval {folder} --store {store} --length 16\n")
    text = tmp_path / "text.txt"
    text.write_text("the river runs\n\nthe river runs\na stone\n")
    _, said, _ = capt("encode", str(sentences), "--text", str(text), "--out", store, "--json")
    assert [(each["texts"], each["encoded"]) for each in json.loads(said)["sources"]] == [(3, 2)]
    # The forms that capt neighbors takes: patterns, files of text of every suffix, and a column of a table.
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "rows.csv").write_text("body,year\na stone,1990\nno bird,1991\n")
    (tmp_path / "more" / "page.md").write_text("the river runs\nthe moon\n")
    given = ["--text", str(tmp_path / "more" / "*"), "--text-column", "body", "--out", store, "--json"]
    assert [
        (each["texts"], each["encoded"]) for each in json.loads(capt("encode", str(sentences), *given)[1])["sources"]
    ] == [(4, 2)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--retrieval", "DATA", "--dims", "999"], "--dims 999"),
        (["--retrieval", "DATA", "--dims", "x"], "whole numbers"),
        (["--retrieval", "DATA", "--samples", "3"], "--samples has no meaning with --retrieval"),
        (["--retrieval", "DATA", "--pooler", "mean"], "says itself how it pools"),
        (["--retrieval", "DATA", "--split", "dev"], "it has test: give --split"),
        (["--retrieval", "DATA", "--dtype", "int4"], "choose fp32, fp16, int8 or binary"),
        (["--retrieval", "DATA", "--launcher", "ray"], "local, ssh, srun"),
        (["--retrieval", "DATA", "--retrieval", "DATA"], "two data sets are called 'beir'"),
        (["--retrieval", "nowhere"], "no such file or folder"),
        (["--bm25"], "--bm25 has no meaning without --retrieval"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: list[str], says: str, sentences: Path, tmp_path: Path, capt: Capt
) -> None:
    folder = write_beir(tmp_path / "beir")
    given = [str(folder) if each == "DATA" else each for each in arguments]
    code, _, err = capt("evaluate", str(sentences), "--store", str(tmp_path / "store"), *given)
    assert code == 2, err
    assert says in err


def test_compare_refuses_other_queries(tmp_path: Path) -> None:
    figures = dict.fromkeys(METRICS, 0.5)
    rows = [{"set": "s", "split": "test", "system": "full", "query": f"q{i}", **figures} for i in range(3)]
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("".join(json.dumps(row) + "\n" for row in rows))
    second.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    with pytest.raises(DataError, match="no query 'q2'"):
        compare(str(first), str(second))
    with pytest.raises(DataError, match="no figures of 'bm25'"):
        compare(f"{first}:bm25", str(second))
    (tmp_path / "c.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="not a line of capt evaluate"):
        compare(str(first), str(tmp_path / "c.jsonl"))
    second.write_text(first.read_text().replace("0.5", "NaN"))
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: ndcg@10 is nan; a finite number is expected"):
        compare(str(first), str(second))
    second.write_text(first.read_text() * 2)
    with pytest.raises(DataError, match=r"b\.jsonl, line 4: query 'q0' of s test again; a file holds one evaluation"):
        compare(str(first), str(second))


def test_documents_of_each_form(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "beir", documents=4)
    (tmp_path / "text.txt").write_text("one\n\ntwo\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"_id": 7, "title": "T", "text": "two"}\n')
    assert list(read_documents(tmp_path / "text.txt")) == [("1", "one"), ("3", "two")]
    assert list(read_documents(tmp_path / "rows.jsonl")) == [("1", "one"), ("7", "T two")]
    assert len(list(read_documents(folder))) == 4
    (tmp_path / "rows.csv").write_text('_id,text\n1,one\n7,"T, two"\n')
    assert list(read_documents(tmp_path / "rows.csv")) == [("1", "one"), ("7", "T, two")]
    for name in ("table.csv", "collection.tsv", "array.json", "rows.parquet"):
        (tmp_path / name).write_bytes(b"0\ta text\n1\tanother\n")
        with pytest.raises(DataError, match=f"{name}.*(separated by|text.*, it is None|not JSON|not a readable)"):
            next(read_documents(tmp_path / name))
    for name, content in (("utf16.txt", "one\n".encode("utf-16-le")), ("nul.jsonl", b'{"text": "a\\u0000b"}\n')):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}, line 1: binary, not text"):
            next(read_documents(tmp_path / name))
    with pytest.raises(ConfigError, match="not a BEIR folder"):
        read_collections(tmp_path / "rows.jsonl", "dev")
    shutil.rmtree(folder / "qrels")
    assert len(list(read_documents(folder))) == 4
    assert len(list(read_queries(folder))) == 9
    with pytest.raises(ConfigError):
        load_text_encoder(folder, EncoderOptions(pooling="max"))


@pytest.mark.realdata
def test_cranfield_by_bm25(data_folder: Path) -> None:
    """The classical collection; figures of BM25 on it are known to be about this."""
    pytest.importorskip("bm25s", reason="bm25s is not installed")
    from capt.pretrain.retrieval.metrics import mean_metrics, query_metrics
    from capt.pretrain.retrieval.rankings import SearchCorpus, bm25_rankings

    (collection,) = read_collections(data_folder / "retrieval" / "cranfield")
    rankings = bm25_rankings(collection, SearchCorpus.of(collection))
    found = zip(collection.queries, rankings, strict=True)
    figures = mean_metrics([query_metrics(ranking, collection.judged[name]) for (name, _), ranking in found])
    assert figures["ndcg@10"] == pytest.approx(0.3512, abs=5e-4)


@pytest.mark.parametrize(("kind", "room"), [("bert", 514), ("roberta", 512), ("mpnet", 512), ("camembert", 512)])
def test_positions_that_padding_takes_are_not_for_tokens(kind: str, room: int) -> None:
    config = SimpleNamespace(max_position_embeddings=514, pad_token_id=1, model_type=kind)
    assert positions_of([SimpleNamespace(auto_model=SimpleNamespace(config=config))]) == room


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (EncoderOptions(length=65), "length 65: .* takes at most 64 tokens"),
        (EncoderOptions(document_prompt="no " * 30), "the document prompt .* fills all 24 tokens"),
        (EncoderOptions(query_prompt="no " * 30, length=12), "the query prompt .* fills all 12 tokens"),
        (EncoderOptions(query_prompt="no " * 30, length=64), ""),
    ],
)
@pytest.mark.parametrize("kind", ["sentence-transformers", "ours"])
def test_a_text_has_room_behind_its_prompt(
    kind: str, options: EncoderOptions, says: str, sentences: Path, tmp_path: Path
) -> None:
    folder = sentences if kind == "sentence-transformers" else write_encoder(tmp_path / "encoder", "BertModel")
    if kind == "ours" and options.length is None:
        options = replace(options, length=24)
    if kind == "ours" and options.length == 65:
        says = "length 65: .* takes 3 to 64 tokens"
    if not says:
        load_text_encoder(folder, options)
        return
    with pytest.raises(ConfigError, match=says):
        load_text_encoder(folder, options)


def test_a_table_of_vectors_has_no_limit_of_length(sentences: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    table = StaticEmbedding(Tokenizer.from_file(str(sentences / "tokenizer.json")), embedding_dim=8)
    SentenceTransformer(modules=[table], device="cpu").save(str(tmp_path / "table"), create_model_card=False)
    encoder = load_text_encoder(tmp_path / "table", EncoderOptions())
    assert "texts of any length" in encoder.protocol()
    assert encoder.encode(["river " * 500, ""], "document").shape == (2, 8)
    with pytest.raises(ConfigError, match="takes texts of any length"):
        load_text_encoder(tmp_path / "table", EncoderOptions(length=20))


@pytest.mark.parametrize(("similarity", "warned"), [("euclidean", True), ("manhattan", True), ("cosine", False)])
def test_distances_that_are_not_taken_are_said(
    similarity: str, warned: bool, sentences: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(sentences, tmp_path / "model")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": similarity}))
    assert load_text_encoder(folder, EncoderOptions()).similarity == "cosine"
    assert (f"made for {similarity} distances; texts are compared by cosine" in caplog.text) == warned


def test_a_module_in_a_pickle_is_told_its_conversion(sentences: Path, tmp_path: Path) -> None:
    """LaBSE's layer, and others of their time, are ``2_Dense/pytorch_model.bin``: removed, the folder would be none."""
    folder = shutil.copytree(sentences, tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*modules, dense]))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"2_Dense: holds no model.safetensors but .*: python -c .*safetensors"):
        load_text_encoder(folder, EncoderOptions())
    # What nobody opens is no fault of a folder: weights beside safetensors, and those of other tools.
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "pytorch_model.bin").touch()
    load_text_encoder(folder, EncoderOptions())


def test_embedding_is_refused_where_a_vector_is_not_finite(tmp_path: Path) -> None:
    from tests.unit.retrieval.toy import ToyEncoder

    class Broken(ToyEncoder):
        def encode(self, texts: list[str], role: str) -> np.ndarray:  # type: ignore[override]
            return np.full((len(texts), self.dimension), np.nan, dtype=np.float32)

    with pytest.raises(DataError, match="cannot hold"):
        embed(Broken(), ["a"], "document", EncodeOptions(str(tmp_path)))
