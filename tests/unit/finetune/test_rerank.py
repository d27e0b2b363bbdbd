"""Rerankers: each loss against the literal formula, groups as they are drawn, and what is refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from capt.finetune.load import FineTuned
from capt.finetune.rerank import evaluate
from capt.finetune.rerank.batches import assemble
from capt.finetune.rerank.data import Splits, read_splits
from capt.finetune.rerank.groups import CandidateList, CandidateRows
from capt.finetune.rerank.losses import LOSSES
from capt.finetune.rerank.objective import RerankObjective
from capt.finetune.rerank.task import RerankTraining
from capt.pretrain.base.errors import DataError
from capt.pretrain.config.load import job_from_mapping
from capt.tokenizer.encode import load_tokenizer
from tests.finetune import write_encoder, write_vocabulary
from tests.rerank import literal_loss, ragged_rows, write_rows


def _job(folder: Path, **changes: Any) -> Any:
    mapping: dict[str, Any] = {
        "task": {"type": "rerank"},
        "run": {"dir": str(folder / "run")},
        "data": {"train": str(folder / "pairs.jsonl"), "cache": str(folder / "cache"), "validation_fraction": 0.0},
        "model": {"init": str(folder / "encoder")},
    }
    for key, value in changes.items():
        mapping[key] = {**mapping.get(key, {}), **value}
    return job_from_mapping(mapping, source="test")


def _splits(folder: Path, rows: list[dict[str, Any]], length: int = 32, **changes: Any) -> Splits:
    write_rows(folder / "pairs.jsonl", rows)
    if not (folder / "tokens").exists():
        write_vocabulary(folder / "tokens")
    return read_splits(_job(folder, **changes), load_tokenizer(folder / "tokens"), length, types=False)


@pytest.mark.parametrize("kind", LOSSES)
def test_each_loss_is_the_literal_formula_for_ragged_groups_in_any_order(tmp_path: Path, kind: str) -> None:
    """Groups of 1 to 32, several positives in some, and their order is not that of their numbers."""
    generator = np.random.default_rng(0)
    temperature = 0.7 if LOSSES[kind].scaled else 1.0
    objective = RerankObjective(_job(tmp_path, loss={"type": kind, "temperature": temperature}))
    names, sizes = [3, 0, 2, 1], [2, 32, 7, 4]
    if not LOSSES[kind].needs & {"positive", "negative"}:  # others leave a group of one out
        names, sizes = [*names, 4], [*sizes, 1]
    groups = np.repeat(names, sizes)
    positive = generator.random(len(groups)) < 0.3
    for place in np.unique(groups, return_index=True)[1]:
        positive[place : place + 2] = [True, False][: len(groups) - place]
    s, t = generator.normal(size=(2, len(groups))) * 3
    none = np.zeros_like(groups)
    scores, literal = (torch.from_numpy(s.copy()).requires_grad_() for _ in range(2))
    losses = objective.losses(scores, CandidateList(groups, none, none, positive, t, t, none))
    of_queries = [groups == group for group in names]
    expected = torch.stack([
        literal_loss(kind, literal[here], torch.from_numpy(t[here]), positive[here].tolist(), temperature)
        for here in of_queries
    ])  # fmt: skip
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    weights = torch.tensor([1.0, -2.0, 3.0, 0.5, -1.0], dtype=torch.float64)[: len(names)]
    for each in (losses, expected):
        (each * weights).sum().backward()
    torch.testing.assert_close(scores.grad, literal.grad, rtol=1e-10, atol=1e-12)


def test_every_pair_of_a_step_is_on_one_rank_once_and_ranks_have_as_many_passes(tmp_path: Path) -> None:
    train = _splits(tmp_path, ragged_rows(9, 31), data={"negatives": 32}).train
    candidates = train.draw(np.arange(9), np.zeros(9, dtype=np.int64))
    # The largest group has 32 pairs of 32 tokens: below that the step takes two passes.
    for budget in (40, 300, 1024, 4096):
        for world in (1, 2, 4):
            steps = [assemble(train, candidates, 9, (9, budget), world, rank) for rank in range(world)]
            assert len({len(step.parts) for step in steps}) == 1
            one_pass = steps[0].order is None
            assert one_pass == (budget >= 1024)
            found: list[int] = []
            for rank, step in enumerate(steps):
                order = None if step.order is None else step.order.reshape(world, -1)[rank]
                for part in step.parts:
                    shape = part.inputs.tokens.shape
                    assert shape[0] == 1 or shape.numel() <= budget
                    lengths = candidates.lengths[part.places]
                    assert sorted(torch.cat([group.rows for group in part.groups]).tolist()) == list(range(shape[0]))
                    assert all(group.longest == lengths[group.rows].max() for group in part.groups)
                    counted = np.full(len(part.places), part.counts)
                    if order is not None:
                        own, order = order[: len(part.places)], order[len(part.places) :]
                        counted = own >= 0
                        assert (own[counted] == part.places[counted]).all()
                    found += part.places[counted].tolist()
            assert sorted(found) == list(range(len(candidates)))


def test_negatives_are_drawn_anew_from_a_range_of_ranks(tmp_path: Path) -> None:
    rows = [{"query": f"query {i}", "pos": [f"good {i}"], "neg": [f"bad {i} {j}" for j in range(10)]} for i in range(3)]
    for draw, data in (("turns", {"ranks": [2, 8]}), ("random", {"ranks": [2, 8]})):
        train = _splits(tmp_path, rows, data={"negatives": 2, "draw": draw, **data}).train
        # Texts are numbered as they come: a positive, then its negatives.
        drawn = [train.draw(np.array([1]), np.array([visit], dtype=np.int64)).documents.tolist() for visit in range(30)]
        assert all(each[0] == 11 for each in drawn)
        assert {number - 12 for each in drawn for number in each[1:]} == set(range(2, 8))
        assert all(len(set(each)) == 3 for each in drawn)
        assert drawn[0] != drawn[1]
        again = train.draw(np.array([2, 1]), np.array([5, 7], dtype=np.int64))
        assert again.documents[3:].tolist() == drawn[7], "it depends on the row and the visit alone"


def test_a_document_that_another_row_gives_to_the_query_is_no_negative(tmp_path: Path) -> None:
    texts = [("a query", "one", ["Two", "three"]), ("a query", "two", ["four"]), ("b", "five", ["two"])]
    rows = [{"query": query, "pos": [positive], "neg": negatives} for query, positive, negatives in texts]
    train = _splits(tmp_path, rows).train
    assert [len(train.draw(np.array([i]), np.array([0]))) for i in range(3)] == [2, 2, 2]


def test_pairs_with_grades_are_groups_and_their_grades_are_gains(tmp_path: Path) -> None:
    rows = [{"query": f"q {i % 3}", "document": f"d {i}", "score": i % 4} for i in range(12)]
    train = _splits(tmp_path, rows, data={"negatives": 9, "positives": 9}).train
    found = train.draw(np.arange(3), np.zeros(3, dtype=np.int64))
    for group in range(3):  # of its positives the visits take turns
        assert sorted(found.gains[found.groups == group][:3].tolist()) == [1, 2, 3]
    assert found.gains[3::4].tolist() == [0, 0, 0]
    assert found.positive.tolist() == [True, True, True, False] * 3
    assert found.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_a_teachers_raw_scores_of_pairs_are_the_targets_as_they_are(tmp_path: Path) -> None:
    """Logits, which are no similarities: of no range, and above 0 those of positives."""
    given = [12.5, -11.25, 22.0, -0.5]
    rows = [{"query": f"q {i % 2}", "document": f"d {i}", "score": score} for i, score in enumerate(given)]
    train = _splits(tmp_path, rows, loss={"type": "mse"}, data={"positives": 9}).train
    found = train.draw(np.arange(2), np.zeros(2, dtype=np.int64))
    assert sorted(found.teacher[found.positive].tolist()) == [12.5, 22.0]
    assert sorted(found.teacher.tolist()) == sorted(given)


def test_grades_that_are_no_positives_are_gains_and_no_first_hit(tmp_path: Path) -> None:
    """The order is d 1, d 3, d 0 for the first query; the second has no positive and no part in the figures."""
    rows = [{"query": "q", "document": f"d {i}", "score": i} for i in (0, 1, 3)]
    rows += [{"query": "none", "document": f"d {i}", "score": i} for i in (0, 1)]
    job = {"data": {"positive_above": 2}, "loss": {"type": "mse"}}
    held_out = CandidateRows(_splits(tmp_path, rows, **job).train)
    scores = np.where(held_out.candidates.gains == 1, 5.0, held_out.candidates.gains)
    found = RerankObjective(_job(tmp_path, **job)).metrics({"scores": scores}, held_out)
    assert found["mrr@10"] == 0.5
    assert found["ndcg@10"] == pytest.approx((1 + 3 / np.log2(3)) / (3 + 1 / np.log2(3)))
    # Of equal scores the positive is last.
    equal = RerankObjective(_job(tmp_path, **job)).metrics({"scores": np.zeros(5)}, held_out)
    assert equal["mrr@10"] == pytest.approx(1 / 3)


def test_ten_thousand_candidates_of_a_query_are_a_step_of_small_passes(tmp_path: Path) -> None:
    words = ("stone", "house", "river")
    many = {"query": "a query", "pos": ["good"], "neg": [f"{words[i % 3]} {i} " * (1 + i % 20) for i in range(9_999)]}
    train = _splits(tmp_path, [many, *ragged_rows(3, 3)], data={"negatives": 20_000}).train
    candidates = train.draw(np.arange(4), np.zeros(4, dtype=np.int64))
    steps = [assemble(train, candidates, 4, (4, 4096), 4, rank) for rank in range(4)]
    assert max(part.inputs.tokens.numel() for step in steps for part in step.parts) <= 4096
    assert np.unique(steps[0].order[steps[0].order >= 0]).tolist() == list(range(len(candidates)))
    tokens = [sum(part.inputs.tokens.numel() for part in step.parts) for step in steps]
    assert max(tokens) < 1.01 * min(tokens), "no rank has more to do than the others"
    scores = torch.linspace(-3, 3, len(candidates), dtype=torch.float64)
    first = RerankObjective(_job(tmp_path)).losses(scores, candidates)[0]
    own = torch.from_numpy(candidates.groups == 0)
    torch.testing.assert_close(first, scores[own].logsumexp(0) - scores[own & torch.from_numpy(candidates.positive)][0])


def test_the_prompt_of_a_row_is_an_encoders(tmp_path: Path) -> None:
    """A search gives a reranker the query alone: so does training."""
    rows = ragged_rows(3, 3)
    plain = _splits(tmp_path, rows).train
    prompted = _splits(tmp_path, [{**row, "prompt": "the river: "} for row in rows]).train
    assert list(prompted.texts) == list(plain.texts)


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([{"query": f"q{i}", "pos": [f"a{i}"], "neg": []} for i in range(3)], {}, "infonce needs: capt mine"),
        ([{"query": f"q{i}", "pos": [f"a{i}"]} for i in range(3)], {"loss": {"type": "bce"}}, "query has a negative"),
        ([{"query": f"q{i}", "document": f"d{i}", "score": 0} for i in range(2)]
         + [{"query": "q3", "document": "d3", "score": -1}], {}, "no query has a positive"),
        (ragged_rows(3, 3), {"data": {"ranks": [90, 99]}}, "data.ranks may leave none"),
        ([{k: x for k, x in row.items() if "scores" not in k} for row in ragged_rows(3, 3)], {"loss": {"type": "kl"}},
         "needs a teacher's score of every candidate"),
    ],
)  # fmt: skip
def test_what_no_loss_can_use_is_refused_in_a_line(
    tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        _splits(tmp_path, rows, **changes)
    assert "\n" not in str(caught.value)


def test_a_group_of_one_is_left_out_with_a_word_and_kept_by_a_loss_of_single_pairs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*ragged_rows(3, 3), {"query": "alone", "pos": ["one"], "neg": [], "pos_scores": [1.0], "neg_scores": []}]
    with caplog.at_level(logging.WARNING):
        assert len(_splits(tmp_path, rows).train) == 3
    assert "1 query without a negative left out" in caplog.text
    assert len(_splits(tmp_path, rows, loss={"type": "bce"}).train) == 4
    unanswered = [{"query": "none", "document": f"d{i}", "score": 0} for i in range(2)]
    answered = [{"query": "q", "document": f"d{i}", "score": i} for i in range(2)]
    assert len(_splits(tmp_path, [*unanswered, *answered]).train) == 1
    assert "1 query without a positive left out" in caplog.text
    # Its grade makes it a negative, and of that rank none is drawn.
    graded = [{"query": f"q{i % 4}", "document": f"d{i}", "score": int(i % 4 > 0)} for i in range(8)]
    graded = [{"query": "none", "document": "d", "score": 0}, *graded]
    graded += [{"query": "many", "document": f"m{i}", "score": 0} for i in range(3)]
    assert len(_splits(tmp_path, graded, loss={"type": "bce"}, data={"ranks": [2, 9]}).train) == 4
    assert "2 queries without a candidate left out" in caplog.text


def test_a_run_without_held_out_queries_has_no_best_checkpoint(tmp_path: Path) -> None:
    """The usual share of few queries holds out none."""
    write_encoder(tmp_path / "encoder")
    write_rows(tmp_path / "pairs.jsonl", ragged_rows(40, 3))
    for fraction, best in ((0.0, None), (0.3, "ndcg@10")):
        task = RerankTraining(_job(tmp_path, data={"validation_fraction": fraction}), tmp_path / "run")
        assert task.job.checkpoint.best == best
        assert ("--data FILE" in task.next_steps(tmp_path)[0]) == (best is None)


def test_an_evaluation_reads_files_without_scores_and_refuses_other_queries_than_were_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run by a teacher's scores; its model likes short pairs."""

    class Shortest(torch.nn.Module):
        reads_types = False

        def forward(self, tokens: torch.Tensor, types: None, padded: bool) -> torch.Tensor:
            return -(tokens != 1).sum(1, keepdim=True).float()

    rows = ragged_rows(40, 3)
    changes: dict[str, Any] = {
        "data": {"validation_fraction": 0.3, "sequence_length": 32}, "loss": {"type": "kl"}
    }  # fmt: skip
    digest = _splits(tmp_path, rows, **changes).digest
    checkpoint = tmp_path / "step-3"
    shutil.copytree(tmp_path / "tokens", checkpoint / "tokenizer")
    trained = FineTuned(checkpoint, Shortest(), _job(tmp_path, **changes))
    monkeypatch.setattr(evaluate, "load_fine_tuned", lambda *_: trained)
    monkeypatch.setattr(evaluate, "read_metadata", lambda _: SimpleNamespace(task={"rows": digest}))
    held_out = evaluate.command(tmp_path)
    assert held_out["rows"]["queries"] < 40
    assert {"loss", "ndcg@10", "stored/ndcg@10"} <= held_out["metrics"].keys()
    plain = write_rows(
        tmp_path / "plain.jsonl", [{key: row[key] for key in ("query", "pos", "neg")} for row in rows]
    )  # fmt: skip
    found = evaluate.command(tmp_path, data=plain)
    assert found["rows"] == {"queries": 40, "dev": sum(1 + len(row["neg"]) for row in rows)}
    assert found["metrics"].keys() == {"ndcg@10", "mrr@10"}
    write_rows(tmp_path / "pairs.jsonl", [{**row, "query": row["query"] + " again"} for row in rows])
    with pytest.raises(DataError, match=r"pairs\.jsonl: changed since .*step-3 was trained, .* --data FILE"):
        evaluate.command(tmp_path)
