"""A job of pairs through its real entry: resume, ledger, other world sizes, export, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import UserError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.reliability.ledger.check import check
from tests.pairs import pairs_mapping, two_sources, write_pairs
from tests.runs import rows_of
from tests.support import run_ranks, stopped_at, train_job, train_seen


def _rows(run_dir: Path, split: str | None = None) -> list[dict[str, float]]:
    keys = ("step", "loss", "loss/pairs", "grad_norm", "tokens", "recall/to_document", "mrr/to_query")
    return [{key: row[key] for key in keys if key in row} for row in rows_of(run_dir) if row.get("split") == split]


def test_the_baseline_comes_first_and_the_ledger_counts_every_row(tmp_path: Path) -> None:
    """Two sources, hard negatives, a queue, micro-batches by length, a stop between two checkpoints."""
    job = pairs_mapping(
        tmp_path, data=two_sources(tmp_path), contrast={"queue": 24}, schedule={"max_steps": 9}, validate={"every": 3}
    )
    assert [code for code, _ in run_ranks(train_seen, 2, stopped_at(job, 5))] == [75, 75]
    assert [code for code, _ in run_ranks(train_seen, 2, job, True)] == [0, 0]
    assert [row["step"] for row in _rows(tmp_path / "run", "validation")] == [0, 3, 6, 9]
    report = check(tmp_path / "run")
    assert not report.faults
    assert sum(epochs.used * (1 + epochs.last - epochs.first) for epochs in report.epochs) == 9 * 8


@pytest.mark.parametrize("cls", ["RobertaForMaskedLM", "BertModel"])
def test_the_export_is_read_by_sentence_transformers_and_starts_another_job(tmp_path: Path, cls: str) -> None:
    """Every family goes the same way, with adapters too; a run starts a next stage, with its pooling."""
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers import SentenceTransformer

    from capt.pretrain.convert.dispatch import convert
    from capt.pretrain.pairs.evaluate import command
    from tests.finetune import write_encoder

    model_keys: dict[str, Any] = {"pooling": "last"}
    if cls == "BertModel":
        pytest.importorskip("peft", reason="peft (the extra lora) is not installed")
        model_keys["lora"] = {"rank": 4, "targets": ["query", "value", "dense"]}
    write_encoder(tmp_path / "encoder", cls)
    prompts = {"query": "the ", "document": "a house "}
    job = pairs_mapping(tmp_path, data={"prompts": prompts}, model=model_keys, schedule={"max_steps": 3})
    assert run_ranks(train_seen, 1, job)[0][0] == 0
    convert(tmp_path / "run", tmp_path / "out", to="sentence-transformers")
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
    assert model.prompts == prompts
    one, same = model.encode_query(["river"]), model.encode(["the river"])
    assert np.allclose(one, same, atol=1e-6)
    held_out = write_pairs(tmp_path / "held_out.jsonl", 12, seed=5)
    (section,) = command(tmp_path / "run", data=[held_out])["sections"]
    assert section["metrics"]["validation_samples"] == 12
    assert section["protocol"].startswith("12 of 12 pairs, each query against the first documents of all")
    assert re.search(r"queries 'the ' and up to 2\d tokens", section["protocol"])
    assert 0 <= section["metrics"]["recall/to_document"] <= section["metrics"]["mrr/to_document"] <= 1
    assert "before training" in (tmp_path / "out" / "README.md").read_text()
    for init in ("run", "out"):
        run = {**job["run"], "dir": str(tmp_path / f"second-{init}")}
        model_section = {**job["model"], "init": str(tmp_path / init), "pooling": "auto"}
        assert run_ranks(train_seen, 1, {**job, "run": run, "model": model_section})[0][0] == 0
        first = _rows(tmp_path / f"second-{init}", "validation")[0]
        last = _rows(tmp_path / "run", "validation")[-1]
        assert first["mrr/to_query"] == pytest.approx(last["mrr/to_query"], abs=1e-5), "the next stage begins there"
        assert "pooling: last" in (tmp_path / f"second-{init}" / "config.yaml").read_text()


def test_the_card_of_a_cut_export_has_its_columns_their_scores_and_a_use_that_is_right(tmp_path: Path) -> None:
    """Rows of fewer columns are unit rows again, so that a dot product of them is a cosine in any tool."""
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from capt.pretrain.convert.card import About
    from capt.pretrain.convert.dispatch import convert

    job = pairs_mapping(
        tmp_path, contrast={"matryoshka": [32, 8], "precisions": ["float", "binary"]}, schedule={"max_steps": 3}
    )
    assert run_ranks(train_seen, 1, job)[0][0] == 0
    uses = {}
    for name, assignments in (("whole", []), ("cut", ["truncate_dim=8"])):
        out = tmp_path / name
        convert(
            tmp_path / "run", out, to="sentence-transformers", assignments=assignments, about=About(location=str(out))
        )
        card = (out / "README.md").read_text()
        assert re.search(r"recall/to_document/8\W+[01]\.\d{4} \(before training [01]\.\d{4}\)", card)
        assert ("the first 8 of 32" in card) == (name == "cut")
        (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        shown: list[Any] = []
        values: dict[str, Any] = {"print": shown.append}
        exec(code, values)
        uses[name] = values["queries"], values["documents"], np.asarray(shown[0])
    queries, documents, cosines = uses["cut"]
    assert queries.shape == (1, 8)
    for found, whole in ((queries, uses["whole"][0]), (documents, uses["whole"][1])):
        first = whole[:, :8]
        assert np.allclose(found, first / np.linalg.norm(first, axis=1, keepdims=True), atol=1e-6)
    assert np.allclose(cosines, queries @ documents.T, atol=1e-6)


def _pairs(*rows: dict[str, Any]) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


_MANY = [{"query": f"question {i}", "pos": [f"answer {i}"]} for i in range(20)]


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        (_pairs(*_MANY[:5]), {}, r"source pairs: \d pairs do not fill a step.*set batch.global to"),
        (_pairs(*({"query": f"q {i}", "pos": ["one text"]} for i in range(20))), {}, "one text"),
        (_pairs(*_MANY), {"data": {"negatives": 2}}, "negatives is 2, and no row has a negative"),
        (_pairs(*_MANY), {"data": {"prompts": {"query": "the river " * 40}}}, "the prompt 'the river .* has .* tokens"),
        (_pairs(*_MANY), {"data": {"sequence_length": 600}}, "more than the encoder's 64 positions"),
        (_pairs(*({**row, "neg": [f"no {i}"][: i % 2]} for i, row in enumerate(_MANY))),
         {"data": {"files": [], "sources": [{"name": "a", "files": ["@"], "in_batch": False, "negatives": 1}]}},
         r"pairs.jsonl.*1: no negative, and source a has in_batch false"),
        (_pairs(*({"query": f"text {i}", "pos": []} for i in range(20))), {}, "document|set model.dropout above 0"),
        (_pairs(*({"query": f"q {i % 4}", "pos": [f"d {i % 5}"]} for i in range(20))),
         {"data": {"validation_fraction": 0.0}},
         "every document of its 20 pairs is a known positive of every query, so that no query has a negative"),
        (_pairs(*({**row, "neg": [f"no {i}"]} for i, row in enumerate(_MANY))),
         {"data": {"negatives": 1}, "distillation": {"weight": 1.0}}, "no source has a teacher's scores"),
        (_pairs(*_MANY), {"batch": {"global": 8, "micro_tokens": 9}, "data": {"validation_fraction": 0.0}},
         r"a row may have (\d+) tokens, and batch.micro_tokens is 9: set batch.micro_tokens=\1 or more"),
        (_pairs({**_MANY[0], "neg": ["no"], "pos_scores": [1], "neg_scores": [0]},
                *({**row, "neg": [f"no {i}"]} for i, row in enumerate(_MANY[1:]))),
         {"data": {"negatives": 1, "validation_fraction": 0.0}, "distillation": {"weight": 1.0}},
         r"pairs.jsonl.*2: pos_scores or neg_scores are missing, which other rows of source pairs have.*distill"),
    ],
)  # fmt: skip
def test_pairs_that_teach_nothing_are_refused_with_the_remedy(
    tmp_path: Path, text: str, changes: dict[str, Any], said: str
) -> None:
    (tmp_path / "pairs.jsonl").write_text(text)
    from capt.pretrain.pairs.task import PairTask

    mapping = pairs_mapping(tmp_path, **changes)
    for source in mapping["data"].get("sources", []):
        source["files"] = [str(tmp_path / "pairs.jsonl")]
    job = job_from_mapping(mapping, "test")
    with pytest.raises(UserError, match=said):
        PairTask(job, tmp_path / "run")


def _belongs_to_all(others: list[dict[str, Any]]) -> dict[str, Any]:
    return {"query": "what is there", "pos": [text for row in others for text in row["pos"]]}


@pytest.mark.parametrize(
    ("rows", "batch", "said"),
    [
        (_MANY, 1, "batch.global=1 compares a query with no other pair and has no negative.*set batch.global to 2"),
        ([*_MANY[:3], *({"query": "one", "pos": [f"part {i}"]} for i in range(3))], 2,
         r"step \d+: none of its 2 queries has a negative.*raise batch.global \(2\), set data.negatives above 0"),
        ([*({**row, "neg": ["no"]} for row in _MANY[:5]), _MANY[5]], 1, "1 row of 6 have no hard negative"),
    ],
)  # fmt: skip
def test_steps_without_a_negative_are_refused_on_all_ranks(
    tmp_path: Path, rows: list[dict[str, Any]], batch: int, said: str
) -> None:
    (tmp_path / "pairs.jsonl").write_text(_pairs(*rows))
    data = {"validation_fraction": 0.0, "negatives": int("neg" in rows[0])}
    job = pairs_mapping(tmp_path, data=data, batch={"global": batch, "micro": 1}, schedule={"max_steps": 40})
    for code in run_ranks(train_job, batch, job):
        assert re.search(said, str(code)), code


def test_steps_before_the_queue_is_read_are_said_where_they_have_no_negative(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(_pairs(*_MANY))
    job = pairs_mapping(
        tmp_path, data={"validation_fraction": 0.0}, batch={"global": 1, "micro": 1}, contrast={"queue": 8},
        schedule={"max_steps": 3},
    )  # fmt: skip
    assert run_ranks(train_job, 1, job) == [0]
    assert [row["loss"] == 0 for row in rows_of(tmp_path / "run") if "loss" in row] == [True, False, False]
    assert (tmp_path / "run" / "log" / "rank-0.log").read_text().count("step 1: 1 of 1 query have no negative") == 1


def test_a_query_to_which_every_document_belongs_is_said_once_and_what_is_left_out_is_in_the_metrics(
    tmp_path: Path,
) -> None:
    """Its positives but one are not drawn in a step, and are no negatives of it all the same."""
    (tmp_path / "pairs.jsonl").write_text(_pairs(*_MANY[:19], _belongs_to_all(_MANY[:19])))
    job = pairs_mapping(
        tmp_path, data={"validation_fraction": 0.0}, batch={"global": 20, "micro": 10}, schedule={"max_steps": 4}
    )
    assert run_ranks(train_job, 2, job) == [0, 0]
    shares = [row["contrast/left_out"] for row in rows_of(tmp_path / "run") if "contrast/left_out" in row]
    assert len(shares) == 4
    # A step is an epoch. Of 380 candidates the query's 19, and of one pair the document that the query has drawn.
    assert {round(share * 380, 9) for share in shares} == {20}
    log = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    assert log.count("1 of 20 queries have no negative") == 1


def test_the_epochs_of_each_source_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from capt.pretrain.pairs.task import PairTask

    sources = [
        {"name": name, "files": [str(tmp_path / f"{name}.jsonl")], "weight": w} for name, w in (("few", 1), ("many", 3))
    ]
    for name, rows in (("few", _MANY[:8]), ("many", _MANY[:16])):
        (tmp_path / f"{name}.jsonl").write_text(_pairs(*rows))
    data = {"files": [], "sources": sources, "validation_fraction": 0.0}
    mapping = pairs_mapping(tmp_path, data=data, schedule={"max_steps": 20}, batch={"global": 8})
    with caplog.at_level(logging.INFO):
        PairTask(job_from_mapping(mapping, "test"), tmp_path / "run")
    assert "source few: 5.0 epochs in 20 steps" in caplog.text
    assert "source many: 7.5 epochs in 20 steps" in caplog.text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"files": []}, "data names no pairs"),
        ({"sources": [{"name": "a", "files": ["x"]}]}, "both set"),
        ({"files": [], "sources": [{"name": "a", "files": ["x"], "weight": 0}]}, "all weights are 0"),
        ({"files": [], "sources": [{"name": "a", "files": ["x"]}] * 2}, "name of several sources"),
        ({"files": ["nowhere.jsonl"]}, "nowhere.jsonl does not exist"),
        ({"corpus": "nowhere.tsv"}, "source pairs: corpus: nowhere.tsv does not exist"),
        ({"form": "idz"}, "source pairs: form: there is no form 'idz'; did you mean 'ids'"),
        ({"form": "ids"}, "source pairs: form=ids needs the texts of the documents"),
        ({"files": [], "sources": [{"name": "a", "files": ["x"], "in_batch": False}]}, "in_batch false leaves no neg"),
        (
            {"batches": "mixed", "@contrast": {"cached": False}},
            "data.batches mixed has one contrast over the whole step",
        ),
        (
            {"@batch": {"global": 8, "micro_tokens": 100}, "@contrast": {"cached": False}},
            "batch.micro_tokens divides a step by its texts",
        ),
        ({"@distillation": {"weight": 1.0}}, "set data.negatives above 0"),
    ],
)
def test_sources_that_cannot_be_meant_are_refused_before_the_start(
    tmp_path: Path, data: dict[str, Any], said: str
) -> None:
    sections = {key[1:]: data[key] for key in data if key.startswith("@")}
    data = {key: value for key, value in data.items() if not key.startswith("@")}
    with pytest.raises(UserError, match=said):
        job_from_mapping(pairs_mapping(tmp_path, data=data, **sections), "test").check_inputs()


def test_the_lines_before_a_start_say_that_tokens_divide_a_step(tmp_path: Path) -> None:
    job = job_from_mapping(pairs_mapping(tmp_path, batch={"global": 8, "micro_tokens": 4096}), "test")
    assert "micro-batches: of at most 4,096 tokens, in place of batch.micro" in job.check_inputs()


def test_a_share_that_comes_to_no_pair_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from capt.pretrain.pairs.task import PairTask

    PairTask(job_from_mapping(pairs_mapping(tmp_path, data={"validation_fraction": 1e-9}), "test"), tmp_path / "run")
    assert "validation is off: data.validation_fraction 1e-09 of 60 pairs comes to no pair" in caplog.text


@pytest.mark.parametrize("negatives", [0, 1])
def test_negatives_that_are_not_used_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, negatives: int) -> None:
    from capt.pretrain.pairs.task import PairTask

    mapping = pairs_mapping(tmp_path, data={"negatives": negatives, "validation_fraction": 0.0})
    (tmp_path / "pairs.jsonl").write_text(_pairs(*({**row, "neg": [f"no {i}"]} for i, row in enumerate(_MANY))))
    for run in ("one", "two"):  # the second one finds the rows in the cache
        caplog.clear()
        PairTask(job_from_mapping(mapping, "test"), tmp_path / run)
        said = "source pairs: 20 hard negatives of the rows are not used; data.negatives is 0, and says" in caplog.text
        assert said == (negatives == 0)


def test_other_pairs_or_another_batch_of_sources_are_refused_at_a_resume(tmp_path: Path) -> None:
    job = pairs_mapping(tmp_path, data=two_sources(tmp_path), checkpoint={"every": 1})
    assert run_ranks(train_seen, 1, stopped_at(job, 1))[0][0] == 75
    assert "take turns by whole batches" in str(
        run_ranks(train_seen, 1, {**job, "batch": {"global": 4, "micro": 2}}, True)
    )
    for changed in ({"weight": 7.0}, {"name": "other"}):  # both decide which rows come when
        first, second = job["data"]["sources"]
        data = {**job["data"], "sources": [{**first, **changed}, second]}
        assert "trained on other pairs" in str(run_ranks(train_seen, 1, {**job, "data": data}, True))
    write_pairs(tmp_path / "first.jsonl", 40, seed=9)
    assert "trained on other pairs" in str(run_ranks(train_seen, 1, job, True))
