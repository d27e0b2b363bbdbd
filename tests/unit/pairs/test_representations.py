"""A representation of a text is one file and one row: trained, validated, searched with and exported like a vector."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from capt.pretrain import registry
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.contrast import ContrastStats
from capt.pretrain.contrast.similarity import similarity_nce
from capt.pretrain.convert.dispatch import convert
from capt.pretrain.pairs import representations
from capt.pretrain.pairs.evaluate import command as evaluate_pairs
from capt.pretrain.pairs.task import PairTask
from capt.pretrain.retrieval.data import read_collections
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.evaluate import evaluate
from capt.pretrain.retrieval.index_build import build_index
from capt.pretrain.retrieval.neighbors import neighbors
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RetrievalSettings
from capt.pretrain.retrieval.search import Scoring
from tests.pairs import every_form, pairs_mapping, write_pairs
from tests.runs import rows_of, validations
from tests.support import run_ranks
from tests.toy_representation import Options, max_sim
from tests.unit.retrieval.toy import write_beir


def _entries(group: str) -> dict[str, str]:
    """The entry points of another distribution."""
    found = {"tokens": "tests.toy_representation:TOKENS", "wrong": "tests.toy_representation:max_sim"}
    return found if group == representations.GROUP else {}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_point_values", _entries)


def _train(mapping: dict[str, Any]) -> int:
    from capt.pretrain.engine.run import run_job

    registry.entry_point_values = _entries
    return run_job(job_from_mapping(mapping, "test"))


def _mapping(folder: Path, **changes: Any) -> dict[str, Any]:
    model = {"representation": "tokens", "representation_options": {"vectors": 12}, "projection": 8}
    return pairs_mapping(folder, **{"model": model, **changes})


def _literal(query: np.ndarray, document: np.ndarray, vectors: int = 12) -> float:
    """MaxSim of two texts, a token at a time."""
    q, d = ([row for row in rows.reshape(vectors, -1).astype(np.float64) if row.any()] for rows in (query, document))
    return float(np.mean([max(float(token @ other) for other in d) for token in q]))


def test_it_trains_validates_searches_and_exports(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", 60, negatives=2)
    beir = write_beir(tmp_path / "beir", 40, 6)
    validate = {"every": 12, "samples": 9, "retrieval": {"folders": [str(beir)]}}
    job = _mapping(tmp_path, data={"negatives": 2}, schedule={"max_steps": 12}, validate=validate)
    losses = []
    for name, micro, world in (("cached", 2, 2), ("run", 8, 1)):
        job = {**job, "run": {**job["run"], "dir": str(tmp_path / name)}, "batch": {"global": 8, "micro": micro}}
        assert run_ranks(_train, world, job) == [0] * world
        losses.append(
            [row["loss/pairs"] for row in rows_of(tmp_path / name) if "loss/pairs" in row and "split" not in row]
        )
    assert losses[0] == pytest.approx(losses[1], rel=2e-4), "one contrast over the whole step, over all ranks"
    before, after = validations(tmp_path / "run")
    assert after["loss/pairs"] < before["loss/pairs"]
    assert {"recall/to_document", "mrr/to_query", "ndcg@10"} <= after.keys()
    assert "uniformity" not in after
    # What the run measured is what its checkpoint measures, and a search is that of the definition.
    held_out = write_pairs(tmp_path / "held_out.jsonl", 12, seed=5)
    (section,) = evaluate_pairs(tmp_path / "run", data=[held_out])["sections"]
    assert "representation tokens" in section["protocol"]
    options, encoder = EncodeOptions(str(tmp_path / "store")), load_text_encoder(tmp_path / "run", EncoderOptions())
    (section,) = evaluate(tmp_path / "run", [beir], options, EncoderOptions(), RetrievalSettings())["sections"]
    assert section["poolers"]["full"]["ndcg@10"] == pytest.approx(after["ndcg@10"], abs=1e-9)
    assert section["scores"] is not None
    with pytest.raises(ConfigError, match=r"a text is no vector \(model.representation=tokens\), and --dims cuts them"):
        evaluate(tmp_path / "run", [beir], options, EncoderOptions(), RetrievalSettings(dims="4"))
    with pytest.raises(ConfigError, match=r"a text is no vector.* the index keeps vectors"):
        build_index([tmp_path / "pairs.jsonl"], tmp_path / "run", tmp_path / "index")
    (collection,) = read_collections(beir, None)
    texts = list(dict.fromkeys(text for _, text in collection.documents()))
    rows, asked = encoder.encode(texts, "document"), texts[3]
    (query,) = encoder.encode([asked], "query")
    expected = sorted(texts, key=lambda text: -_literal(query, rows[texts.index(text)]))[:5]
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    (found,) = neighbors(tmp_path / "run", [asked], text=[tmp_path / "lines.txt"], top=5, store=tmp_path / "store")
    assert [each.text for each in found] == expected
    assert found[1].similarity == pytest.approx(_literal(query, rows[texts.index(expected[1])]), abs=1e-6)
    out = convert(tmp_path / "run", tmp_path / "out", to="token-vectors")
    assert json.loads((out / "config.json").read_text()) == {"representation": "tokens", "vectors": 12}
    with pytest.raises(ConfigError, match=r"'sentence-transformers' is unknown; .* token-vectors"):
        convert(tmp_path / "run", tmp_path / "st", to="sentence-transformers")


def test_a_job_is_refused_what_its_representation_cannot_do(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": {"representation": "dens"}}, "unknown representation 'dens'; did you mean 'dense'"),
        ({"model": {"representation": "wrong"}}, "is not a Representation"),
        (
            {"model": {"representation": "tokens", "representation_options": {"vector": 3}}},
            "representation_options.vector",
        ),
        ({"model": {"representation_options": {"vectors": 3}}}, "representation_options.vectors of dense"),
        ({"contrast": {"queue": 24}}, "contrast.queue=24 applies to vectors, and model.representation=tokens is none"),
        ({"contrast": {"matryoshka": [8]}}, "contrast.matryoshka"),
        ({"contrast": {"directions": "gte"}}, "contrast.directions=gte"),
        ({"contrast": {"hardness_in_batch": 1.0}}, "contrast.hardness_in_batch"),
        ({"contrast": {"temperature": {"type": "learned"}}}, "contrast.temperature.type=learned"),
        ({"data": {"negatives": 1}, "distillation": {"weight": 1.0}}, "distillation.weight=1"),
        ({"data": {"loss": "cosine"}}, "data.loss=cosine applies to vectors"),
        ({"checkpoint": {"best": "uniformity"}}, "uniformity"),
    ]
    for changes, fault in cases:
        with pytest.raises((ConfigError, ValueError), match=fault):
            job_from_mapping(_mapping(tmp_path, **changes), "test")
    scored = every_form(tmp_path, mixed=False)["data"]["sources"][:1]
    job = job_from_mapping(_mapping(tmp_path, data={"files": [], "sources": scored}), "test")
    with pytest.raises(ConfigError, match=r"data\.loss=cosent applies to vectors"):
        PairTask(job, tmp_path / "run")


def test_the_loss_is_that_of_the_definition() -> None:
    """Rows of several vectors, some of fewer tokens; own and shared hard negatives; copies of a document."""
    torch.manual_seed(0)
    q, d, h = (normalize(torch.randn(n, 3, 4, dtype=torch.float64), dim=2) for n in (5, 5, 4))
    q[1, 2], d[2, 1:] = 0, 0
    rows = [each.flatten(1).requires_grad_() for each in (q, d, h)]
    ids, owners, options = torch.tensor([7, 8, 7, 9, 5]), torch.tensor([0, 0, 3, -1]), Options(vectors=3)

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        return max_sim(a, b, options)

    def one(a: Tensor, b: Tensor) -> Tensor:
        tokens, others = ([row for row in each.view(3, 4) if row.any()] for each in (a, b))
        best = [max((x @ y for y in others), key=lambda cosine: float(cosine.detach())) for x in tokens]
        return torch.stack(best).mean() / 0.3

    for hard in ("all", "own"):
        terms = []
        for i in range(5):
            others = [one(rows[0][i], rows[1][j]) for j in range(5) if ids[j] != ids[i]]
            others += [one(rows[0][i], rows[2][k]) for k in range(4) if hard == "all" or owners[k] == i]
            terms.append(torch.stack([one(rows[0][i], rows[1][i]), *others]).logsumexp(0) - one(rows[0][i], rows[1][i]))
        expected = torch.stack(terms).mean()
        stats = ContrastStats()
        loss = similarity_nce(
            rows[0], rows[1], similarity, temperature=0.3, negatives=rows[2], negative_owners=owners, ids=ids,
            stats=stats, hard_negatives=hard,
        )  # fmt: skip
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        for ours, theirs in zip(torch.autograd.grad(loss, rows), torch.autograd.grad(expected, rows), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)
        assert stats.positive_probability == pytest.approx(
            float(torch.stack(terms).detach().neg().exp().mean()), rel=1e-10
        )
    with pytest.raises(ConfigError, match="no learned temperature"):
        similarity_nce(rows[0], rows[1], similarity, temperature=torch.tensor(0.3, requires_grad=True))


def test_a_ranking_is_the_same_in_any_blocks() -> None:
    rng = np.random.default_rng(0)
    queries, documents = (rng.standard_normal((n, 12)).astype(np.float32) for n in (7, 300))
    scoring = Scoring(similarity=lambda a, b: max_sim(a, b, Options(vectors=3)))
    order, found = rng.permutation(300), []
    for step in (300, 11):
        best = scoring.best(scoring.rows(queries), 9, order)
        for start in range(0, 300, step):
            best.update(start, documents[start : start + step])
        found.append(best.result())
    assert (found[0].numbers == found[1].numbers).all()
    rows, columns = np.repeat(np.arange(7), 9), found[0].numbers.ravel()
    assert np.allclose(scoring.pairs(queries, documents, rows, columns), found[0].scores.ravel(), atol=1e-6)
    literal = [_literal(queries[0], each, 3) for each in documents]
    assert math.isclose(found[0].scores[0, 0], max(literal), abs_tol=1e-6)
