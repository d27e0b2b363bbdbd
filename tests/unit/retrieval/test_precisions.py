"""Vectors in int8 and in bits: the codes of sentence-transformers, exact search over them, the figures of trec_eval."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers.util.quantization as theirs

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.files import read_json, write_json
from capt.pretrain.retrieval import encode, rankings
from capt.pretrain.retrieval import evaluate as evaluation
from capt.pretrain.retrieval import store as stores
from capt.pretrain.retrieval.data import read_collections
from capt.pretrain.retrieval.encode import embed, rows_of, stored_vectors
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RetrievalSettings
from capt.pretrain.retrieval.precisions import HammingTopK, QuantizedScoring
from capt.pretrain.retrieval.quantize import Ranges, bits_of, signs_of
from capt.pretrain.retrieval.search import TopK, unit_rows
from capt.pretrain.retrieval.store import RANGES, VectorIdentity, Vectors, VectorStore
from tests.support import run_ranks
from tests.unit.retrieval.toy import ToyEncoder, write_beir

DIM = 12


def measured(
    data: Path, store: Path, patch: pytest.MonkeyPatch, dtype: Any = "fp32", dim: int = DIM, **settings: Any
) -> dict[str, dict[str, float]]:
    patch.setattr(evaluation, "load_text_encoder", lambda *_: ToyEncoder(dim))
    result = evaluation.evaluate(
        Path("toy"), [data], EncodeOptions(str(store), dtype), EncoderOptions(), RetrievalSettings(**settings)
    )  # fmt: skip
    return dict(result["sections"][0]["poolers"])


def test_codes_are_those_of_sentence_transformers() -> None:
    """Also outside of the calibration, where a code must not wrap around, and where a dimension is constant."""
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((400, 21)).astype(np.float32)
    rows[:, 3], rows[5, 4] = 0.25, 0.0
    ranges = Ranges.joined([Ranges.of([rows[:50], rows[50:90]], 21), Ranges.of([], 21), Ranges.of([rows[90:200]], 21)])
    assert ranges.count == 200
    expected = theirs.quantize_embeddings(rows, "int8", calibration_embeddings=rows[:200])
    assert (ranges.codes(rows) == expected).all()
    assert ranges.outside(rows) == int(((rows < rows[:200].min(0)) | (rows > rows[:200].max(0))).sum()) > 0
    assert (ranges.codes(ranges.restored(expected)) == expected).all()
    assert np.abs(ranges.restored(ranges.codes(rows[:200])) - rows[:200]).max() < ranges.steps.max() * 0.501
    assert (bits_of(rows) == theirs.quantize_embeddings(rows, "ubinary")).all()
    assert (signs_of(bits_of(rows), 21) == np.where(rows > 0, 1, -1)).all()
    again = Ranges.read(ranges.record(), 21, "r")
    assert (again.codes(rows) == expected).all()


@pytest.mark.parametrize("dim", [5, 64, 130])
def test_hamming_search_counts_every_bit(dim: int) -> None:
    """In blocks of any size, with fewer documents than are asked for, and many equal distances."""
    generator = np.random.default_rng(dim)
    q, d = (generator.standard_normal((n, dim)).astype(np.float32) for n in (70, 300))
    d[200:] = d[:100]
    order = generator.permutation(300)
    scores = (np.sign(q) @ np.sign(d).T).astype(int)
    for k in (7, 400):
        best = HammingTopK(bits_of(q), k, order, dim)
        for start in (0, 1, 120):
            best.update(start, bits_of(d[start : {0: 1, 1: 120}.get(start, 300)]))
        found = best.result()
        for i in range(70):
            expected = sorted(range(300), key=lambda j: (-scores[i, j], order[j]))[:k]
            assert found.numbers[i, : len(expected)].tolist() == expected
            assert found.scores[i, : len(expected)].tolist() == scores[i, expected].tolist()
            assert (found.numbers[i, len(expected) :] == -1).all()


def test_products_of_int8_are_exact() -> None:
    """Neighbouring integers, which products in half precision or with TF32's 11 bits of a sum would make equal."""
    q = np.full((1, 1024), 127, np.float32)
    d = np.full((4, 1024), 127, np.float32)
    d[1, 5], d[2, 5:7] = 126, 126
    best = TopK(q, 4, np.arange(4)[::-1].copy())
    best.update(0, d)
    assert best.result().numbers.tolist() == [[3, 0, 1, 2]]
    assert best.result().scores[0].tolist() == [127.0 * 127 * 1024] * 2 + [127.0 * (127 * 1024 - n) for n in (1, 2)]


def test_figures_are_those_of_sentence_transformers_and_trec_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's codes and dequantized candidates of the same vectors, ranked and measured by pytrec_eval."""
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="pytrec-eval-terrier is not installed")
    folder = write_beir(tmp_path / "beir", documents=700, queries=30)
    ours = measured(folder, tmp_path / "store", monkeypatch, precision="float,int8,binary", rescore=2)
    assert list(ours) == ["full", "int8", "int8 x2", "binary", "binary x2"]
    plain = measured(folder, tmp_path / "store", monkeypatch)
    assert ours["full"] == plain["full"], "the float column stays"
    (collection,) = read_collections(folder)
    options, encoder = EncodeOptions(str(tmp_path / "store")), ToyEncoder(DIM)
    names, texts = zip(*collection.documents(), strict=True)
    asked = [text for _, text in collection.queries]
    q = unit_rows(rows_of(embed(encoder, asked, "query", options), asked))
    d = unit_rows(rows_of(embed(encoder, texts, "document", options), texts))
    ranges = np.stack([d.min(0), d.max(0)])
    codes = [theirs.quantize_embeddings(x, "int8", ranges=ranges).astype(np.int64) for x in (q, d)]
    bits = [np.unpackbits(theirs.quantize_embeddings(x, "ubinary"), axis=1, count=DIM).astype(int) for x in (q, d)]
    candidates = {
        "int8": theirs._dequantize_embeddings(codes[1], "int8", ranges),
        "binary": bits[1].astype(np.float64),
    }
    first = {"int8": codes[0] @ codes[1].T, "binary": -(bits[0][:, None] != bits[1]).sum(2)}
    judged = {query: of for query, of in collection.judged.items() if max(of.values()) > 0}
    for name in first:
        runs: dict[str, dict[str, dict[str, float]]] = {name: {}, f"{name} x2": {}}
        for number, (query, _) in enumerate(collection.queries):
            scores = first[name][number]
            best = sorted(range(len(names)), key=lambda i: (scores[i], names[i]), reverse=True)[:200]
            runs[name][query] = {names[i]: float(scores[i]) for i in best[:100]}
            again = candidates[name] @ q[number].astype(np.float64)
            again = np.round(again, 6)  # copies of a text have one score, whatever the order of a sum
            best.sort(key=lambda i: (again[i], names[i]), reverse=True)
            runs[f"{name} x2"][query] = {names[i]: float(again[i]) for i in best[:100]}
        for system, run in runs.items():
            found = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10", "recall.100", "map_cut.100"}).evaluate(run)
            for figure, measure in (
                ("ndcg@10", "ndcg_cut_10"),
                ("recall@100", "recall_100"),
                ("map@100", "map_cut_100"),
            ):
                expected = np.mean([found[query][measure] for query in judged])
                assert ours[system][figure] == pytest.approx(expected, abs=1e-9), (system, figure)
    assert len({tuple(each.values()) for each in ours.values()}) == 5, "precisions differ"
    cut = measured(folder, tmp_path / "store", monkeypatch, precision="int8", dims="7", rescore=2)
    assert list(cut) == ["int8", "int8 x2", "7 int8", "7 int8 x2"]
    assert cut["7 int8"] != cut["int8"]


def test_a_store_of_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A quarter and a 32nd; the ranges of the first texts stay; the figures are those of the same codes in memory."""
    folder = write_beir(tmp_path / "beir", documents=300, queries=20)
    (collection,) = read_collections(folder)
    texts = [text for _, text in collection.documents()]
    distinct, dim = len(set(texts)), 64
    for dtype, size in (("int8", dim), ("binary", dim // 8)):
        store = tmp_path / dtype
        kept = measured(folder, store, monkeypatch, dtype, dim)
        assert list(kept) == [dtype]
        assert kept == measured(folder, tmp_path / "fp32", monkeypatch, dim=dim, precision=dtype)
        (rows,) = [path for path in store.rglob("*.rows") if read_json(path.parent / "identity.json")["dtype"] == dtype]
        assert rows.stat().st_size == distinct * size
    again = ToyEncoder(dim)
    vectors = embed(again, texts, "document", EncodeOptions(str(tmp_path / "int8"), "int8"))
    assert not again.encoded, "nothing is encoded twice"
    exact = unit_rows(np.stack([again._vector(text) for text in texts]))
    assert np.abs(rows_of(vectors, texts) - exact).max() < vectors.ranges.steps.max()  # type: ignore[union-attr]
    path = Path(str(vectors.folder)) / RANGES
    before = path.read_bytes()
    others = [f"zebra {i} zebra" for i in range(40)]
    with caplog.at_level(logging.WARNING):
        embed(again, others, "document", EncodeOptions(str(tmp_path / "int8"), "int8"))
    assert "lie outside of the ranges of int8, which come from 300 texts" in caplog.text
    assert path.read_bytes() == before
    with caplog.at_level(logging.WARNING):
        embed(again, others, "document", EncodeOptions(str(tmp_path / "few"), "int8"))
    assert "the ranges of int8 come from 40 texts alone" in caplog.text
    faults: list[Any] = [{"low": [0.0] * dim}, [], {"vectors": 3, "low": [1.0] * dim, "high": [0.0] * dim}]
    for fault in faults:
        write_json(path, fault)
        with pytest.raises(DataError, match=r"ranges\.json: not the ranges of 64 dimensions in int8"):
            embed(again, texts, "document", EncodeOptions(str(tmp_path / "int8"), "int8"))
    path.unlink()
    with pytest.raises(DataError, match=r"no ranges\.json, without which its numbers say nothing: remove the folder"):
        embed(again, texts, "document", EncodeOptions(str(tmp_path / "int8"), "int8"))


def test_of_two_that_begin_a_store_one_calibrates_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one writes its ranges while the first one does."""
    identity = ToyEncoder().identity("document", "int8")
    first, second = (VectorStore(tmp_path, identity) for _ in range(2))
    rows = np.random.default_rng(0).standard_normal((2, 9, DIM)).astype(np.float32)
    slow, other = (Ranges.of([part], DIM) for part in rows)
    write = stores.write_json

    def interrupted(path: Path, value: Any) -> None:
        monkeypatch.setattr(stores, "write_json", write)
        second.calibrate(other)
        write(path, value)

    monkeypatch.setattr(stores, "write_json", interrupted)
    first.calibrate(slow)
    (path,) = tmp_path.rglob(f"*{RANGES}*")
    assert read_json(path) == other.record()
    for each in (first, second):
        assert each.ranges is not None
        assert each.ranges.record() == other.record()


def _opened_late(options: EncodeOptions, identity: VectorIdentity) -> Vectors:
    """Rank 1 opens the store after another process has calibrated it, and rank 0 before."""
    found = stored_vectors(options, identity)
    distributed.barrier()
    if distributed.rank():
        found.calibrate(Ranges.of([np.eye(DIM, dtype=np.float32), -np.eye(DIM, dtype=np.float32)], DIM))
    return found


def _raced(folder: Path) -> int:
    encode.stored_vectors = _opened_late
    store = embed(ToyEncoder(), [f"word {i}" for i in range(40)], "document", EncodeOptions(str(folder), "int8"))
    assert store.ranges is not None
    assert len(store) == 40
    return store.ranges.count


def test_ranks_that_open_a_store_before_and_after_its_ranges_take_the_same(tmp_path: Path) -> None:
    assert run_ranks(_raced, 2, tmp_path) == [2 * DIM] * 2


def test_what_cannot_be_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_beir(tmp_path / "beir")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("fp32", {"precision": "int4"}, "--precision int4: unknown; did you mean .int8"),
        ("fp32", {"precision": "int8,int8"}, "names int8 twice"),
        ("fp32", {"rescore": 4}, "--rescore 4 applies to a quantized search"),
        ("int8", {"precision": "float"}, "--precision float: --dtype int8 keeps vectors in int8 alone"),
        ("binary", {"dims": "4"}, "--dims 4: --dtype binary keeps vectors in binary alone"),
        ("fp32", {"precision": "int8", "fusion": True}, "--precision must name float as well"),
    ]
    for dtype, settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            measured(folder, tmp_path / "store", monkeypatch, dtype, **settings)
    assert not (tmp_path / "store").exists()


def test_two_ranks_find_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges, codes, both searches and what is scored again."""
    folder = write_beir(tmp_path / "beir", documents=300, queries=20)
    settings: dict[str, Any] = {"precision": "int8,binary", "rescore": 2}
    alone = measured(folder, tmp_path / "one", monkeypatch, **settings)
    # More than there are cost no more than all.
    asked, search = list[int](), rankings.search
    monkeypatch.setattr(rankings, "search", lambda *given: asked.append(given[3]) or search(*given))
    whole, more = (measured(folder, tmp_path / "one", monkeypatch, **{**settings, "rescore": n}) for n in (3, 1000))
    assert max(asked) == 300
    assert list(whole.values()) == list(more.values())
    kept = measured(folder, tmp_path / "one", monkeypatch, "int8", rescore=2)
    (ranges,) = (tmp_path / "one").rglob(RANGES)
    for both, codes, record in run_ranks(_measured, 2, str(folder), str(tmp_path / "two"), settings):
        assert both == alone
        assert codes == kept
        assert record == read_json(ranges)


def _measured(folder: str, store: str, settings: dict[str, Any]) -> tuple[object, object, object]:
    with pytest.MonkeyPatch.context() as patch:
        both = measured(Path(folder), Path(store), patch, **settings)
        codes = measured(Path(folder), Path(store), patch, "int8", rescore=2)
    (ranges,) = Path(store).rglob(RANGES)
    return both, codes, read_json(ranges)


def test_scores_of_pairs_are_those_of_the_search() -> None:
    generator = np.random.default_rng(1)
    rows = generator.standard_normal((6, 20)).astype(np.float32)
    for scoring in (
        QuantizedScoring(True, None, "binary", 20),
        QuantizedScoring(True, None, "int8", 20, Ranges.of([rows], 20)),
    ):
        compared = scoring.rows(rows)
        best = scoring.best(compared, 6, np.arange(6))
        best.update(0, compared)
        found = best.result()
        for query in range(6):
            pairs = scoring.pairs(compared, compared, np.full(6, query), found.numbers[query])
            assert (pairs == found.scores[query]).all()
