"""Rerankers: pytrec_eval's figures of the library's scores, every first stage, runs as folders, kept scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.finetune.text_predictor import load_text_classifier
from capt.pretrain.base.errors import CheckpointError, DataError
from capt.pretrain.retrieval import rerank_evaluate as room
from capt.pretrain.retrieval.data import Collection, read_collections
from capt.pretrain.retrieval.neighbors import neighbors
from capt.pretrain.retrieval.options import EncodeOptions, RerankSettings
from capt.pretrain.retrieval.rankings import SearchCorpus, bm25_rankings
from capt.pretrain.retrieval.rerank_evaluate import evaluate_reranker, read_trec_run
from capt.pretrain.retrieval.rerankers import RunScorer, load_reranker, score_pairs
from tests.finetune import write_encoder
from tests.support import Capt
from tests.unit.retrieval.toy import ToyScorer, write_beir, write_sentence_folder


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder with random weights, as sentence-transformers saves it."""
    from sentence_transformers import CrossEncoder

    source = write_encoder(tmp_path_factory.mktemp("rerank") / "bert", "BertForSequenceClassification", num_labels=1)
    folder = source.with_name("reranker")
    CrossEncoder(str(source), device="cpu", max_length=24).save_pretrained(str(folder))
    return folder


def figures(judged: dict[str, dict[str, int]], run: dict[str, dict[str, float]]) -> dict[str, float]:
    """The figures of pytrec_eval; a query without a line in the run has zeros."""
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="pytrec-eval-terrier is not installed")
    judged = {query: grades for query, grades in judged.items() if max(grades.values()) > 0}
    found = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10", "recip_rank"}).evaluate(run)
    ndcg = [found.get(query, {}).get("ndcg_cut_10", 0.0) for query in judged]
    # Its reciprocal rank has no depth: below the tenth place it is 0 here.
    rank = [found.get(query, {}).get("recip_rank", 0.0) for query in judged]
    return {"ndcg@10": np.mean(ndcg), "mrr@10": np.mean([each if each > 0.0999 else 0.0 for each in rank])}


def measured(model: Path, folder: Path, store: Path, per_query: Path | None = None, **settings: Any) -> dict[str, Any]:
    chosen = EncodeOptions(str(store)), RerankSettings(**settings)
    result = evaluate_reranker(model, [folder], *chosen, per_query=per_query)
    section: dict[str, Any] = result["sections"][0]
    return section


def candidates_of(collection: Collection, depth: int) -> dict[str, list[str]]:
    found = bm25_rankings(collection, SearchCorpus.of(collection), depth)
    return {name: ranking for (name, _), ranking in zip(collection.queries, found, strict=True)}


def test_the_figures_are_those_of_pytrec_eval_on_the_scores_of_the_library(reranker: Path, tmp_path: Path) -> None:
    """Candidates by BM25, scored by ``CrossEncoder.predict``; a relevant document beyond them is a miss."""
    from sentence_transformers import CrossEncoder

    folder = write_beir(tmp_path / "beir", documents=200, queries=30)
    (collection,) = read_collections(folder)
    texts, model = dict(collection.documents()), CrossEncoder(str(reranker), device="cpu")
    first = candidates_of(collection, 12)
    run = {}
    for query, text in collection.queries:
        scores = model.predict([(text, texts[name]) for name in first[query]], show_progress_bar=False)
        # A text that is there twice has one score: batches of other lengths move its last digits.
        alike = {texts[name]: float(score) for name, score in zip(first[query], scores, strict=True)}
        run[query] = {name: alike[texts[name]] for name in first[query]}
    section = measured(reranker, folder, tmp_path / "store", depth=12)
    theirs = figures(collection.judged, run)
    for name, value in theirs.items():
        assert section["poolers"]["reranked"][name] == pytest.approx(value, abs=1e-9)
    stage = {query: {name: -float(place) for place, name in enumerate(names)} for query, names in first.items()}
    for name, value in figures(collection.judged, stage).items():
        assert section["poolers"]["bm25"][name] == pytest.approx(value, abs=1e-9)
    difference = section["differences"]["reranked - bm25, ndcg@10"]
    expected = section["poolers"]["reranked"]["ndcg@10"] - section["poolers"]["bm25"]["ndcg@10"]
    assert difference["difference"] == pytest.approx(expected)
    assert difference["low"] < difference["difference"] < difference["high"]
    relevant = [(q, d) for q, grades in collection.judged.items() for d, grade in grades.items() if grade > 0]
    missed = sum(document not in first[query] for query, document in relevant)
    assert 0 < missed < len(relevant)
    assert f"{missed} of {len(relevant)} relevant documents are no candidates, and missed" in section["protocol"]
    assert "the first 12 of bm25" in section["protocol"]


def test_stored_runs_equal_scores_and_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of three values, so that most are equal; the run has queries without candidates, and ranks that lie."""
    folder = write_beir(tmp_path / "beir", documents=300, queries=20)
    (collection,) = read_collections(folder)
    generator = np.random.default_rng(1)
    lines, first = [], dict[str, dict[str, float]]()
    for query, _ in collection.queries[2:]:
        first[query] = {f"d{i}": float(generator.integers(0, 9)) for i in generator.permutation(300)}
        lines += [f"{query} Q0 {name} 7 {score} x" for name, score in first[query].items()]
    (tmp_path / "run.txt").write_text("\n".join(lines) + "\n")
    scorer = ToyScorer(lambda query, text: float((len(query) * len(text)) % 3))
    monkeypatch.setattr(room, "load_reranker", lambda _: scorer)
    texts, asked = dict(collection.documents()), dict(collection.queries)
    for depth in (1, 50, 10_000):
        section = measured(
            Path("toy"), folder, tmp_path / "store", candidates=str(tmp_path / "run.txt"), depth=depth,
            per_query=tmp_path / "each.jsonl",
        )  # fmt: skip
        kept = {
            query: sorted(of, key=lambda name: (of[name], name), reverse=True)[:depth] for query, of in first.items()
        }
        run = {
            query: {name: float((len(asked[query]) * len(texts[name])) % 3) for name in names}
            for query, names in kept.items()
        }
        for name, value in figures(collection.judged, run).items():
            assert section["poolers"]["reranked"][name] == pytest.approx(value, abs=1e-9), depth
        assert list(section["poolers"]) == ["reranked", "run"]
        assert f"; 2 of {len(asked)} queries have no candidates, and zeros" in section["protocol"]
    before = scorer.scored
    measured(Path("toy"), folder, tmp_path / "store", candidates=str(tmp_path / "run.txt"), depth=300)
    assert scorer.scored == before, "what is kept is not scored again"
    rows = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text().splitlines()]
    assert [row["ndcg@10"] for row in rows if row["query"] in ("q0", "q1")] == [0.0] * 4, "no candidates are a miss"
    for text, says in (
        ("q1 Q0 d1 1 5.0", "run.txt, line 1: query, Q0, document, rank, score and a name are expected"),
        ("q1 Q0 d1 1 nan x", "line 1: query, Q0, document"),
        ("q1 Q0 d1 1 5 x\nq1 Q0 d1 2 4 x", "line 2: the document 'd1' again for query 'q1'"),
        ("q1 Q0 elsewhere 1 5 x", "the document 'elsewhere' of query 'q1' is not in the corpus"),
        ("other Q0 d1 1 5 x", "none of the queries of beir is in it: it has ids such as 'other'"),
        (" \n", "no lines; a run has lines such as"),
    ):
        (tmp_path / "run.txt").write_text(text + "\n")
        with pytest.raises(DataError, match=says):
            measured(Path("toy"), folder, tmp_path / "store", candidates=str(tmp_path / "run.txt"))
    assert read_trec_run(write(tmp_path / "tabs.txt", "q1\tQ0\td1\t1\t-5e-1\tx\n\n")) == {"q1": {"d1": -0.5}}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_run_scores_as_its_folder_does(reranker: Path, tmp_path: Path) -> None:
    """Our own classifier against the library: pairs of every length up to what is cut, and copies of a pair."""
    words = ("river stone house bird tree " * 8).split()
    pairs = [(" ".join(words[: 1 + i % 4]), " ".join(words[i : i + n])) for i in range(5) for n in (1, 3, 9, 19)]
    cross, classifier = load_reranker(reranker), load_text_classifier(reranker)
    facts = {"model": "m", "tokenizer": "t", "pooling": "p", "precision": "fp32"}
    ours = RunScorer("run", classifier, facts)
    assert ours.lengths(pairs) == cross.lengths(pairs)
    assert max(cross.lengths(pairs)) == 24
    options = EncodeOptions(str(tmp_path / "store"), tokens=40)
    theirs, mine = score_pairs(cross, pairs * 2, options), score_pairs(ours, pairs, options)
    assert theirs[: len(pairs)] == theirs[len(pairs) :]
    assert len(set(theirs)) > len(pairs) / 2
    np.testing.assert_allclose(mine, theirs[: len(pairs)], atol=1e-5)
    np.testing.assert_allclose(cross.scores(pairs), theirs[: len(pairs)], atol=1e-6)
    # ("a", "b c") and ("a b", "c") are two pairs.
    apart = score_pairs(ToyScorer(lambda query, _: len(query)), [("ab", "c"), ("a", "bc")], options)
    assert apart == [2.0, 1.0]


def test_the_command_with_each_first_stage_on_one_rank_and_on_two(capt: Capt, reranker: Path, tmp_path: Path) -> None:
    folder, encoder = write_beir(tmp_path / "beir"), write_sentence_folder(tmp_path / "encoder")
    command = ["evaluate", str(reranker), "--rerank", str(folder), "--store", str(tmp_path / "store")]
    one = json.loads(capt(*command, "--depth", "20", "--json")[1])["sections"][0]
    assert set(one["poolers"]) == {"reranked", "bm25"}
    _, two, _ = capt(*command[:-1], tmp_path / "other", "--depth", "20", "--nproc", "2", "--json")
    assert json.loads(two)["sections"][0] == one
    _, dense, _ = capt(*command, "--candidates", encoder, "--depth", "20")
    assert "reranked     encoder" in dense
    assert "reranked - encoder, ndcg@10" in dense
    for words, says in (
        (["evaluate", str(encoder), *command[2:]], "a 'SentenceTransformer'; give the folder or hub id of a cross-enc"),
        (["evaluate", str(reranker), "--depth", "5"], "--depth has no meaning without --rerank"),
        ([*command, "--bm25"], "--bm25 has no meaning with --rerank"),
    ):
        code, _, failed = capt(*words)
        assert (code, says in failed) == (2, True), failed


def test_neighbors_are_ordered_by_the_reranker(reranker: Path, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    encoder = write_sentence_folder(tmp_path / "encoder")
    lines = [f"the {a} sings and the {b} opens" for a in ("river", "bird", "tree") for b in ("door", "king", "queen")]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n")
    given = {"text": [tmp_path / "lines.txt"], "top": 4, "store": tmp_path / "store"}
    (found,) = neighbors(encoder, ["the bird"], **given, rerank=reranker)
    scores = CrossEncoder(str(reranker), device="cpu").predict([("the bird", line) for line in lines])
    order = np.argsort(-scores)[:4]
    assert [each.text for each in found] == [lines[i] for i in order]
    assert [each.similarity for each in found] == pytest.approx(scores[order].tolist(), abs=1e-6)
    with pytest.raises(CheckpointError, match=r"no such folder; give the folder or hub id of a cross-encoder"):
        neighbors(encoder, ["the bird"], **given, rerank=tmp_path / "nothing")
