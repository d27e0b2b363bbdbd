"""``validate.retrieval``: the figures of ``capt evaluate --retrieval``, on any number of ranks, within its budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.config.retrieval import METRICS, RetrievalSection
from capt.pretrain.retrieval.data import read_collections
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.evaluate import evaluate
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RetrievalSettings
from capt.pretrain.retrieval.validation import part_of
from tests.language import language_mapping
from tests.pairs import pairs_mapping
from tests.runs import validations
from tests.support import run_ranks
from tests.unit.retrieval.toy import write_beir


def _run(mapping: dict[str, Any]) -> int:
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.engine.run import run_job
    from capt.pretrain.retrieval import validation

    quiet_libraries(debug=False)
    validation.TOKENS["cpu"] = 300  # several batches on each rank
    return run_job(job_from_mapping(mapping, "test"))


def _mapping(task: str, folder: Path, retrieval: dict[str, Any], **changes: Any) -> dict[str, Any]:
    validate = {"every": 1, "first": True, "samples": 8, "retrieval": retrieval}
    sections = {"validate": validate, "checkpoint": {"every": 0, "best": "ndcg@10"}, "schedule": {"max_steps": 2}}
    if task == "pairs":
        prompts = {"query": "the ", "document": "a house "}
        data = {"prompts": prompts, "query_length": 9, "validation_fraction": 0.15}
        return pairs_mapping(folder, data=data, **sections, **changes)
    return language_mapping(folder, **sections, **changes)


@pytest.mark.parametrize(("task", "stage", "pooling"), [("pairs", 3, None), ("language", 1, "mean")])
def test_the_figures_are_those_of_the_evaluation(task: str, stage: int, pooling: str | None, tmp_path: Path) -> None:
    """On one rank, on two (with ZeRO 3, where every pass is a collective), and by ``capt evaluate`` of the run."""
    sets = [write_beir(tmp_path / name, 70, 9, seed) for seed, name in enumerate(("first", "second"))]
    retrieval: dict[str, Any] = {"folders": list(map(str, sets)), **({"pooling": pooling} if pooling else {})}
    found = []
    for world in (1, 2):
        job = _mapping(task, tmp_path, retrieval)
        job["run"] = {**job["run"], "dir": str(tmp_path / f"run-{world}")}
        job["engine"] = {**job.get("engine", {}), "zero_stage": stage if world > 1 else 0}
        assert run_ranks(_run, world, job) == [0] * world
        found.append(validations(tmp_path / f"run-{world}"))
    alone, together = found
    assert [row["step"] for row in alone] == [0, 1, 2]
    for name in (name for name in alone[0] if name.split("/")[0] in METRICS):
        assert together[0][name] == pytest.approx(alone[0][name], abs=1e-9), name
    assert 0 < alone[0]["ndcg@10"] == pytest.approx((alone[0]["ndcg@10/first"] + alone[0]["ndcg@10/second"]) / 2)
    best = max(alone, key=lambda row: (row["ndcg@10"], -row["step"]))
    run, options = tmp_path / "run-1", EncodeOptions(str(tmp_path / "store"))
    if best["step"]:
        assert f"step-{best['step']:08d}" in str((run / "checkpoints" / "best").resolve())
    result = evaluate(
        run / "checkpoints" / "step-00000002",
        sets,
        options,
        EncoderOptions(pooling=pooling),
        RetrievalSettings(dims="4"),
    )
    for section in result["sections"]:
        for name in METRICS:
            measured = section["poolers"]["full"][name]

            assert alone[-1][f"{name}/{section['name']}"] == pytest.approx(measured, abs=1e-9), name


def test_a_run_of_pairs_is_read_as_its_export(tmp_path: Path) -> None:
    """Pooling, projection, prompts and the length of each side; nothing of another prompt is reused."""
    import numpy as np

    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from capt.pretrain.convert.dispatch import convert

    job = _mapping("pairs", tmp_path, {}, model={"pooling": "last", "projection": 12})
    job["checkpoint"] = {}
    assert run_ranks(_run, 1, job) == [0]
    run = load_text_encoder(tmp_path / "run", EncoderOptions())
    convert(tmp_path / "run", tmp_path / "out", to="sentence-transformers")
    exported = load_text_encoder(tmp_path / "out", EncoderOptions())
    assert run.prompts == exported.prompts
    texts = ["a", "the river runs", "a stone and a house and a tree and a bird and a door and a road"]
    assert (run.limit("query"), run.limit("document")) == (12, 31)  # three and seven tokens of prompts
    for role in ("query", "document"):
        ours, theirs = (each.encode(texts, role) for each in (run, exported))
        # the export has one length for both sides
        alike = [i for i, length in enumerate(exported.lengths(texts, role)) if length <= run.limit(role)]
        assert alike
        assert np.abs(ours - theirs)[alike].max() < 1e-5
    assert max(run.lengths(texts, "query")) == 12
    keys = {run.identity("query").key, run.identity("document").key}
    keys.add(load_text_encoder(tmp_path / "run", EncoderOptions(query_prompt="")).identity("query").key)
    keys.add(load_text_encoder(tmp_path / "run", EncoderOptions(length=13)).identity("query").key)
    assert len(keys) == 4
    with pytest.raises(ConfigError, match="pools as it was trained"):
        load_text_encoder(tmp_path / "run", EncoderOptions(pooling="mean"))


def test_a_part_holds_every_judged_document(tmp_path: Path) -> None:
    (whole,) = read_collections(write_beir(tmp_path / "beir", 200, 30))
    folders = [tmp_path / "beir"]
    answerable = [name for name, _ in whole.queries if max(whole.judged[name].values()) > 0]
    everything = part_of(whole, RetrievalSection(folders=folders))
    assert dict(everything.documents()) == dict(whole.documents())
    assert [name for name, _ in everything.queries] == answerable
    for documents in (20, 60, 150):
        part = part_of(whole, RetrievalSection(folders=folders, queries=8, documents=documents))
        names = dict(part.documents())
        judged = {name for query, _ in part.queries for name in whole.judged[query]} - {"absent"}
        assert judged <= names.keys()
        assert documents - 4 <= len(names) <= documents
        assert 0 < len(part.queries) <= 8
        shuffled = replace(whole, queries=whole.queries[::-1], documents=lambda: iter(list(whole.documents())[::-1]))
        again = part_of(shuffled, RetrievalSection(folders=folders, queries=8, documents=documents))
        assert (dict(again.documents()), set(again.queries)) == (names, set(part.queries))
    with pytest.raises(DataError, match=r"more than validate.retrieval.documents 2 are judged for one query"):
        part_of(whole, RetrievalSection(folders=folders, documents=2))


@pytest.mark.parametrize(
    ("retrieval", "changes", "says"),
    [
        ({"every": 3}, {}, r"every 3 is not a multiple of validate.every 2"),
        ({"every": 4}, {}, r"checkpoint.best ndcg@10 is needed at each validation"),
        ({"folders": ["a/x", "b/x"]}, {}, "two folders are called 'x'"),
        ({"folders": []}, {}, "validation reports no 'ndcg@10'"),
        ({"pooling": "head"}, {"contrast": {"weight": 0.0, "queue": 0}}, "trains no head"),
        ({}, {}, "no corpus.jsonl"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    retrieval: dict[str, Any], changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    validate = {"every": 2, "samples": 8, "retrieval": {"folders": [str(tmp_path)], **retrieval}}
    mapping = language_mapping(tmp_path, validate=validate, checkpoint={"best": "ndcg@10"}, **changes)
    with pytest.raises((ConfigError, DataError), match=says):
        job_from_mapping(mapping, "test").check_inputs()
