"""A search over one's own documents: what is found, against literal references; changes, kills, passages, places."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError
from capt.pretrain.engine.task import Role
from capt.pretrain.retrieval import index as room
from capt.pretrain.retrieval import index_build
from capt.pretrain.retrieval.data import read_collections
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.evaluate import evaluate
from capt.pretrain.retrieval.graph import has_faiss
from capt.pretrain.retrieval.index import BuildOptions, Hit, SearchIndex, build_index
from capt.pretrain.retrieval.index_measure import measure_index
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RetrievalSettings
from capt.pretrain.retrieval.passages import PassageCutter
from capt.pretrain.retrieval.sources import SourceOptions, find_sources, html_text, read_sources
from tests.support import Capt, start_forked
from tests.unit.retrieval.toy import ToyEncoder, ToyScorer, write_beir, write_sentence_folder

LENGTH = 20
WORDS = [f"w{i}" for i in range(60)]


class Reader(ToyEncoder):
    """A toy encoder that reads 20 tokens, and may kill its process after some texts."""

    def __init__(self, stop: int = 1 << 30) -> None:
        super().__init__(length=LENGTH)
        self._stop = stop

    def lengths(self, texts: Sequence[str], role: Role) -> list[int]:
        return [min(LENGTH, count) for count in super().lengths(texts, role)]

    def encode(self, texts: Sequence[str], role: Role) -> np.ndarray:
        if len(self.encoded) >= self._stop:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode([" ".join(text.split()[: LENGTH - 1]) for text in texts], role)


class Letters(Reader):
    """A reader whose tokens are letters, so that the tokens of a word are no sum of parts that it knows."""

    def lengths(self, texts: Sequence[str], role: Role) -> list[int]:
        return [min(LENGTH, len(text) + 1) for text in texts]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Reader:
    encoder = Reader()
    for module in (room, index_build):
        monkeypatch.setattr(module, "load_text_encoder", lambda *_: encoder)
    return encoder


def write_texts(folder: Path, count: int, seed: int = 0) -> Path:
    """Files of 5 to 70 words, in lines of five."""
    generator = random.Random(seed)
    folder.mkdir()
    for number in range(count):
        words = generator.choices(WORDS, k=generator.randint(5, 70))
        lines = [" ".join(words[start : start + 5]) for start in range(0, len(words), 5)]
        (folder / f"{number:03d}.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_what_is_found_is_what_the_formulas_say(toy: Reader, tmp_path: Path) -> None:
    """Cosines and BM25 in float64 over all passages, the best of each document, reciprocal ranks, ties by id."""
    texts = write_texts(tmp_path / "texts", 130)
    report = build_index([texts], "toy", tmp_path / "index")
    assert (report.documents, report.added) == (130, 130)
    assert report.passages > 250
    found = SearchIndex.open(tmp_path / "index")
    rows = list(found.passages())
    queries = ["w1 w2 w3", "w59 w58", "w7", "nothing of it"]
    vectors = np.stack([toy._vector(row["text"]) for row in rows]).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    tokens = [row["text"].split() for row in rows]
    mean = np.mean([len(each) for each in tokens])
    for query in queries:
        asked = toy._vector(query).astype(np.float64)
        cosines = vectors @ (asked / np.linalg.norm(asked))
        bm25 = np.zeros(len(rows))
        for word in query.split():
            holders = sum(word in each for each in tokens)
            for number, each in enumerate(tokens):
                count = each.count(word)
                norm = count + 1.5 * (0.25 + 0.75 * len(each) / mean)
                bm25[number] += np.log(1 + (len(rows) - holders + 0.5) / (holders + 0.5)) * count / norm
        ranked, best_passages = {}, {}
        for mode, scores in (("dense", cosines), ("bm25", bm25)):
            best: dict[str, float] = {}
            passages: dict[str, str] = {}
            for row, score in zip(rows, np.float32(scores), strict=True):
                least = -np.inf if mode == "dense" else 0
                if score > best.get(row["id"], least):
                    best[row["id"]], passages[row["id"]] = score, row["text"]
            ranked[mode] = sorted(sorted(best, reverse=True), key=lambda name: -best[name])[:100]
            best_passages[mode] = passages
            (hits,) = found.search([query], 100, mode)
            assert [hit.document for hit in hits] == ranked[mode]
            assert np.abs([hit.score - best[hit.document] for hit in hits]).max(initial=0) < 1e-5
        fused: dict[str, float] = {}
        for ranking in ranked.values():
            for rank, name in enumerate(ranking, start=1):
                fused[name] = fused.get(name, 0) + 1 / (60 + rank)
        expected = sorted(sorted(fused, reverse=True), key=lambda name: -np.float32(fused[name]))[:12]
        (hits,) = found.search([query], 12)
        assert [hit.document for hit in hits] == expected
        for hit in hits:  # the passage of the better rank
            ranks = {mode: names.index(hit.document) for mode, names in ranked.items() if hit.document in names}
            assert hit.passage == best_passages[min(ranks, key=ranks.__getitem__)][hit.document]


def test_places_are_those_of_the_files(toy: Reader, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", 20)
    build_index([texts], "toy", tmp_path / "index")
    for row in SearchIndex.open(tmp_path / "index").passages():
        text = Path(row["file"]).read_text()
        assert row["line"] == 1 + text.count("\n", 0, text.index(row["text"]))


def test_passages_cover_a_text_and_fit(tmp_path: Path) -> None:
    """Every word is in a passage, none is longer than is read, and they share words; also without any space."""
    encoder = Reader()
    cutter = PassageCutter(encoder, 4)
    generator = random.Random(1)
    for _ in range(50):
        words = [f"x{i}" + generator.choice(["", "", ".", "\n\n", "\n"]) for i in range(generator.randint(1, 300))]
        text = " ".join(words)
        (passages,) = cutter.passages_of([text])
        assert max(encoder.lengths([text[a:b] for a, b in passages], "document")) < LENGTH or len(passages) == 1
        assert " ".join(text.split()).startswith(" ".join(text[slice(*passages[0])].split()))
        for (_, end), (begin, _) in pairwise(passages):
            assert begin <= end + 3  # nothing but blank space between them
        assert passages[-1][1] == len(text.rstrip())
        assert all(a < b for a, b in passages)
        assert len(passages) < 2 or any(later < end for (_, end), (later, _) in pairwise(passages))
    ends = [text[:end] for _, end in cutter.passages_of(["one two. " * 30])[0]] if (text := "one two. " * 30) else []
    assert all(each.endswith("two.") for each in ends), (
        "a passage ends with a sentence where one ends in its second half"
    )
    (passages,) = PassageCutter(Letters()).passages_of(["\u6f22" * 100 + " " + "a" * 95])
    assert (passages[0], passages[-1][1]) == ((0, LENGTH - 2), 196)
    assert max(end - begin for begin, end in passages) < LENGTH - 1
    with pytest.raises(ConfigError, match="--overlap 15: passages have 18 tokens, of which at most half"):
        PassageCutter(encoder, 15)


def _killed(folder: str, stop: int) -> None:
    encoder = Reader(stop)
    for module in (room, index_build):
        module.load_text_encoder = lambda *_: encoder  # type: ignore[attr-defined]
    options = BuildOptions(tokens=60)
    build_index([Path(folder) / "texts"], "toy", Path(folder) / "index", options)


def files_of(index: SearchIndex) -> list[bytes]:
    folder = index.folder / index.record.generation
    return [(folder / name).read_bytes() for name in ("passages.jsonl", "documents.jsonl", "vectors.npy", "order.npy")]


def test_a_kill_loses_nothing_and_a_change_costs_what_changed(toy: Reader, tmp_path: Path) -> None:
    texts, options = write_texts(tmp_path / "texts", 60), BuildOptions(tokens=60)
    killed = start_forked(_killed, str(tmp_path), 50)
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    with pytest.raises(
        DataError, match=r"index: no index; capt search build DOCUMENTS --model FOLDER --out .*index makes"
    ):
        SearchIndex.open(tmp_path / "index")
    first = build_index([texts], "toy", tmp_path / "index", options)
    assert 0 < first.encoded <= first.passages - 50
    assert build_index([texts], "toy", tmp_path / "whole", options).encoded == first.passages
    assert files_of(SearchIndex.open(tmp_path / "index")) == files_of(SearchIndex.open(tmp_path / "whole"))
    # Two documents go, one changes, five are new: those six are encoded, and what was open answers as before.
    open_before = SearchIndex.open(tmp_path / "index")
    before = open_before.search(["w1 w2"], 5)
    for name in ("003.txt", "017.txt"):
        (texts / name).unlink()
    (texts / "005.txt").write_text("another text")
    for number in range(5):
        (texts / f"new{number}.txt").write_text(f"a new text {number}")
    killed = start_forked(_killed, str(tmp_path), 0)
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert SearchIndex.open(tmp_path / "index").search(["w1 w2"], 5) == before
    second = build_index([texts], "toy", tmp_path / "index", options)
    assert (second.added, second.changed, second.removed, second.encoded) == (5, 1, 2, 6)
    assert open_before.search(["w1 w2"], 5) == before
    assert SearchIndex.open(tmp_path / "index").search(["new"], 5, "bm25")[0][0].document.endswith("new4.txt")
    again = build_index([texts], "toy", tmp_path / "again", options)
    found, fresh = SearchIndex.open(tmp_path / "index"), SearchIndex.open(tmp_path / "again")
    assert files_of(found)[:2] == files_of(fresh)[:2]
    assert np.abs(found.vectors - fresh.vectors).max() < 1e-6
    third = build_index([texts], "toy", tmp_path / "index", options)
    assert (third.added, third.changed, third.removed, third.encoded) == (0, 0, 0, 0)
    assert SearchIndex.open(tmp_path / "index").record == found.record
    assert again.passages == third.passages
    assert len(list((tmp_path / "index").glob("*generation*"))) == 1
    # Vectors that are lost are encoded again, whatever has changed.
    shutil.rmtree(tmp_path / "index" / "vectors")
    (texts / "new0.txt").unlink()
    lost = build_index([texts], "toy", tmp_path / "index", options)
    assert (lost.removed, lost.encoded) == (1, lost.passages)


@pytest.mark.parametrize(("package", "options"), [("bm25s", BuildOptions()), ("faiss", BuildOptions(approximate=True))])
def test_a_package_that_is_missing_is_said_before_anything_is_encoded(
    package: str, options: BuildOptions, toy: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "encode", lambda *_: pytest.fail("encoded"))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=package):
        build_index([write_texts(tmp_path / "texts", 3)], "toy", tmp_path / "index", options)


def test_only_what_an_index_holds_is_replaced(toy: Reader, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", 3)
    with pytest.raises(DataError, match="texts: a folder with other files, such as 00"):
        build_index([texts], "toy", texts)
    build_index([texts], "toy", tmp_path / "index")
    toy._facts["model"] = "another"
    with pytest.raises(
        CheckpointError, match=r"toy: not the model that .*index was built with; name that one \(--model\)"
    ):
        SearchIndex.open(tmp_path / "index").search(["w1"])
    assert SearchIndex.open(tmp_path / "index").search(["w1"], mode="bm25")[0]
    report = build_index([texts], "toy", tmp_path / "index")
    assert (report.added, report.changed, report.encoded) == (0, 0, report.passages)
    assert SearchIndex.open(tmp_path / "index").search(["w1"])[0]


def test_documents_of_every_form(tmp_path: Path) -> None:
    """Ids, lines, titles and fields; hidden files, the index itself and rows without a text are left out."""
    (tmp_path / "in" / ".git").mkdir(parents=True)
    for name in ("index", "none"):
        (tmp_path / "in" / name).mkdir()
    files = {
        "a.txt": "first\nsecond\n", "b.md": "# Head\n", ".git/c.txt": "hidden", "index/passages.jsonl": "{}",
        "d.html": "<html><head><style>p {}</style></head>\n<p>one <b>bo</b>ld\n<p>two &amp; three</p></html>",
        "e.csv": 'id,text,year\nx,"of e",1990\ny,,1991\n',
        "f.jsonl": '{"title": "T", "text": "of f", "tags": ["a"], "new": true}\n{"text": null}\n{"text": NaN}\n',
        "g.bin": "no document",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / "in" / name).write_text(text)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    named = [str(tmp_path / each) for each in ("in", "in/a.txt", "link/a.txt", "in/../in/a.txt")]
    found = list(read_sources(find_sources(named, tmp_path / "in" / "index"), SourceOptions()))
    names = {each.name.removeprefix(f"{tmp_path}/in/"): (each.line, each.text.split(), each.fields) for each in found}
    assert names == {
        "a.txt": (1, ["first", "second"], {}), "b.md": (1, ["#", "Head"], {}),
        "d.html": (1, ["one", "bold", "two", "&", "three"], {}), "x": (2, ["of", "e"], {"year": "1990"}),
        "f.jsonl:1": (1, ["T", "of", "f"], {"title": "T", "new": "true"}),
    }  # fmt: skip
    page = html_text(files["d.html"])
    assert [page.split("\n").index(line) for line in page.split("\n") if line.strip()] == [1, 2]
    lines = list(read_sources([tmp_path / "in" / "a.txt"], SourceOptions(lines=True)))
    assert [(each.name.rpartition("/")[2], each.line, each.text) for each in lines] == [
        ("a.txt:1", 1, "first"), ("a.txt:2", 2, "second"),
    ]  # fmt: skip
    for value in ("3", "0", "false", "[]"):
        (tmp_path / "number.jsonl").write_text(f'{{"text": "a"}}\n{{"text": {value}}}\n')
        with pytest.raises(DataError, match=r'number\.jsonl, line 2: "text" should be a text, it is'):
            list(read_sources([tmp_path / "number.jsonl"], SourceOptions()))
    (tmp_path / "in" / "h.jsonl").write_text('{"_id": "x", "text": "again"}\n')
    with pytest.raises(DataError, match=r"h\.jsonl, line 1: the id 'x' is that of .*e\.csv, line 2, too"):
        list(read_sources(find_sources([str(tmp_path / "in" / name) for name in ("*.csv", "h.*")]), SourceOptions()))
    with pytest.raises(DataError, match=r"e\.csv, line 2: no \"body\"; .*\(--text-column\) of 'id', 'text', 'year'"):
        list(read_sources([tmp_path / "in" / "e.csv"], SourceOptions("body")))
    with pytest.raises(DataError, match=r"no file of documents in it; known: \.txt, \.md"):
        find_sources([str(tmp_path / "in" / "none")])
    folder = write_beir(tmp_path / "beir")
    assert [each.name for each in read_sources(find_sources([str(folder)]), SourceOptions())] == [
        f"d{i}" for i in range(60)
    ]


def test_filters_and_a_reranker(toy: Reader, tmp_path: Path) -> None:
    rows = [{"_id": f"d{i}", "text": f"w1 {WORDS[i]}", "year": 1990 + i % 2} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_index([tmp_path / "rows.jsonl"], "toy", tmp_path / "index")
    found = SearchIndex.open(tmp_path / "index")
    for mode in room.MODES:
        (hits,) = found.search(["w1 w2"], 50, mode, where={"year": "1991"})
        assert {hit.document for hit in hits} == {f"d{i}" for i in range(1, 40, 2)}
        everything = [hit for hit in found.search(["w1 w2"], 50, mode)[0] if hit.fields["year"] == "1991"]
        if mode != "hybrid":  # whose scores are ranks
            assert [hit for hit in hits if hit.score] == [hit for hit in everything if hit.score]
    assert found.search(["w1"], where={"file": "elsewhere", "year": "1990"}) == [[]]
    with pytest.raises(ConfigError, match="--where yaer: the documents have no such field; did you mean 'year'"):
        found.search(["w1"], where={"yaer": "1990"})
    by_year = ToyScorer(lambda _, text: -float(text.split()[1][1:]))
    (hits,) = found.search(["w1 w7"], 3, reranker=by_year)
    assert [hit.document for hit in hits] == ["d0", "d1", "d2"]
    assert [hit.score for hit in hits] == [0, -1, -2]
    with pytest.raises(DataError, match="a score that is not finite for the query 'w1' with 'w1 w"):
        found.search(["w1"], reranker=ToyScorer(lambda *_: np.nan))


@pytest.mark.skipif(not has_faiss(), reason="faiss is not installed: the extra ann")
def test_a_graph_finds_nearly_what_the_exact_search_finds(
    toy: Reader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = write_texts(tmp_path / "texts", 700)
    caplog.set_level("INFO")
    build_index([texts], "toy", tmp_path / "exact")
    build_index([texts], "toy", tmp_path / "graph", BuildOptions(approximate=True))
    assert "approximate search: it finds" in caplog.text
    exact, graph = SearchIndex.open(tmp_path / "exact"), SearchIndex.open(tmp_path / "graph")
    assert exact.record.recall is None
    assert graph.record.recall is not None
    assert graph.record.recall > 0.95
    queries = [f"{a} {b}" for a, b in zip(WORDS[:30], WORDS[30:], strict=True)]
    pairs = list(zip(exact.search(queries, 10, "dense"), graph.search(queries, 10, "dense"), strict=True))
    assert np.mean([len({*map(str, a)} & {*map(str, b)}) for a, b in pairs]) > 9.5
    scores = {(query, hit.document): hit.score for query, (hits, _) in zip(queries, pairs, strict=True) for hit in hits}
    for query, (_, hits) in zip(queries, pairs, strict=True):
        assert all(scores.get((query, hit.document), hit.score) == hit.score for hit in hits)
    assert build_index([texts], "toy", tmp_path / "graph").encoded == 0
    assert SearchIndex.open(tmp_path / "graph").record.recall is None


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentence_folder(tmp_path_factory.mktemp("model") / "st")


def test_the_search_is_that_of_the_evaluation(sentences: Path, tmp_path: Path) -> None:
    """The figures of a BEIR folder by `capt search measure` are those by `capt evaluate --fusion`."""
    folder = write_beir(tmp_path / "beir", documents=200, queries=30)
    (collection,) = read_collections(folder)
    rows = [
        {
            "query": text,
            "document": [name for name, grade in collection.judged[query].items() if grade and name[0] == "d"],
        }
        for query, text in collection.queries
    ]
    rows = [row for row in rows if row["document"]]
    lines = ["query-id\tcorpus-id\tscore"]
    texts = {text: query for query, text in collection.queries}
    lines += [f"{texts[row['query']]}\t{name}\t1" for row in rows for name in row["document"]]  # type: ignore[index]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = RetrievalSettings(fusion=True)
    expected = evaluate(sentences, [folder], EncodeOptions(str(tmp_path / "store")), EncoderOptions(), settings)
    build_index([folder], sentences, tmp_path / "index")
    result = measure_index(SearchIndex.open(tmp_path / "index"), tmp_path / "questions.jsonl")
    theirs, ours = (each["sections"][0] for each in (expected, result))
    for system, mode in (("full", "dense"), ("bm25", "bm25"), ("fusion", "hybrid")):
        assert ours["poolers"][mode] == theirs["poolers"][system]
    assert ours["differences"]["hybrid - dense, ndcg@10"] == theirs["differences"]["fusion - full, ndcg@10"]


class Terminal(io.StringIO):
    """Lines that are typed."""

    def isatty(self) -> bool:
        return True


def test_from_a_folder_of_text_to_a_search(
    capt: Capt, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands: build, ask, ask from the standard input, filter, measure, export."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for name, text in {"a": "the river runs\n\nover the stone", "b": "no bird sings", "c": "a king reads"}.items():
        (tmp_path / "docs" / f"{name}.txt").write_text(text)
    code, out, err = capt("search", "build", "docs", "--model", str(sentences), "--out", "index")
    assert (code, out) == (
        0,
        "index: 3 documents in 3 passages; 3 added, 0 changed, 0 removed, 3 passages encoded\n",
    ), err
    code, out, _ = capt("search", "index", "what bird sings?", "--top", "2", "--mode", "bm25")
    assert (code, out.split()) == (
        0,
        ["what", "bird", "sings?", *out.split()[3:4], "docs/b.txt:1", "no", "bird", "sings"],
    )
    code, out, _ = capt("search", "index", "river", "king", "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    assert [each["query"] for each in answers] == ["river", "king"]
    assert {hit["document"] for hit in answers[0]["hits"]} == {f"docs/{name}.txt" for name in "abc"}
    assert answers[0]["hits"][0].keys() == {*Hit.__annotations__, "place"}
    monkeypatch.setattr("sys.stdin", io.StringIO("\nriver\n"))
    assert json.loads(capt("search", "index", "--json")[1]) == answers[0]
    loads: list[Path] = []
    monkeypatch.setattr(
        room, "load_text_encoder", lambda model, options: (loads.append(model), load_text_encoder(model, options))[1]
    )
    monkeypatch.setattr("sys.stdin", Terminal("river\n\nking\n"))
    code, out, err = capt("search", "index", "--json")
    assert ([json.loads(line) for line in out.splitlines()], err.count("question> ")) == (answers, 4)
    assert len(loads) == 1, "one load for all questions"
    code, _, err = capt("search", "index", "x", "--where", "file")
    assert (code, err) == (2, "error: --where file: FIELD=VALUE is expected, such as author=Keynes\n")
    code, _, err = capt("search", "nowhere", "x")
    assert code == 2
    assert err.startswith(
        "error: nowhere: no index; capt search build DOCUMENTS --model FOLDER --out nowhere makes one"
    )
    (tmp_path / "q.csv").write_text("query,document\nwhat bird sings,docs/b.txt\nking,docs/c.txt\n")
    code, out, err = capt("search", "measure", "index", "q.csv")
    assert code == 0, err
    assert "2 questions, 3 documents" in out
    assert out.startswith("index: index\n")
    assert "hybrid - bm25, ndcg@10" in out
    assert "95% none" not in out
    (tmp_path / "q.csv").write_text("query,document\nwhat bird sings,b.txt\n")
    assert (
        "the document 'b.txt' is not in the index, whose ids are such as 'docs/a.txt'"
        in capt("search", "measure", "index", "q.csv")[2]
    )
    for form in ("npy", "parquet"):
        assert capt("search", "export", "index", "--out", form, "--to", form)[0] == 0
    found = SearchIndex.open(tmp_path / "index")
    rows = [json.loads(line) for line in (tmp_path / "npy" / "passages.jsonl").read_text().splitlines()]
    table = pyarrow.parquet.read_table(tmp_path / "parquet" / "passages.parquet").to_pylist()
    assert [row["id"] for row in rows] == [row["id"] for row in table] == ["docs/a.txt", "docs/b.txt", "docs/c.txt"]
    assert np.array_equal(np.load(tmp_path / "npy" / "vectors.npy"), found.vectors)
    assert np.array_equal(np.array([row["vector"] for row in table], dtype=np.float32), found.vectors)


def test_passages_of_a_row_have_its_line(toy: Reader, tmp_path: Path) -> None:
    """Line ends in a cell of jsonl are no lines of the file."""
    rows = [{"text": "\n".join(WORDS)}, {"text": "w1"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_index([tmp_path / "a.jsonl"], "toy", tmp_path / "index")
    lines = [row["line"] for row in SearchIndex.open(tmp_path / "index").passages()]
    assert lines == [1] * (len(lines) - 1) + [2]
    assert len(lines) > 3


@pytest.mark.parametrize("name", ["passages.jsonl", "documents.jsonl", "words/vocab.index.json"])
def test_a_file_that_was_cut_is_named(toy: Reader, tmp_path: Path, name: str) -> None:
    build_index([write_texts(tmp_path / "texts", 5)], "toy", tmp_path / "index")
    path = tmp_path / "index" / "generation-000001" / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"damaged.*build the index again"):
        SearchIndex.open(tmp_path / "index")


def test_grades_of_questions_are_judgements_and_an_id_of_the_row_is_no_answer(toy: Reader, tmp_path: Path) -> None:
    """Gains are grades, as in trec_eval; a document of grade 0 is no answer, and a question without an answer has 0."""
    texts = [f"w{number} w{number + 1}" for number in range(20)]
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
    )
    build_index([tmp_path / "d.jsonl"], "toy", tmp_path / "index")
    found = SearchIndex.open(tmp_path / "index")
    grades = [("w3 w4", 3, 1), ("w3 w4", 2, 3), ("w3 w4", 15, 0), ("w3 w4", 16, -1), ("w7 w8", 7, 0)]
    lines = [f"{row},{query},{name},{grade}\n" for row, (query, name, grade) in enumerate(grades)]
    (tmp_path / "q.csv").write_text("id,query,doc_id,relevance\n" + "".join(lines))
    (section,) = measure_index(found, tmp_path / "q.csv")["sections"]
    (hits,) = found.search(["w3 w4"], 100, "bm25")
    gains = [{"3": 1, "2": 3}.get(hit.document, 0) for hit in hits]
    dcg = sum(gain / np.log2(place + 2) for place, gain in enumerate(gains[:10]))
    assert gains[0] == 1
    assert section["poolers"]["bm25"]["ndcg@10"] == pytest.approx(dcg / (3 + 1 / np.log2(3)) / 2)
    for grade, fault in (
        ("0.5", "line 2: 'score' is 0.5: a judgement is a whole"),
        ("yes", "number"),
        ("0", "no grade"),
    ):
        (tmp_path / "q.csv").write_text(f"query,document,score\nw3,3,{grade}\n")
        with pytest.raises(DataError, match=fault):
            measure_index(found, tmp_path / "q.csv")


def test_questions_that_are_none(toy: Reader, tmp_path: Path) -> None:
    build_index([write_texts(tmp_path / "texts", 5)], "toy", tmp_path / "index")
    found = SearchIndex.open(tmp_path / "index")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        found.search(["caf\udce9"])
    with pytest.raises(DataError, match="a question is empty"):
        found.search(["w1", " "])
    (tmp_path / "q.csv").write_text("query,document\n")
    with pytest.raises(DataError, match="no question in it"):
        measure_index(found, tmp_path / "q.csv")
