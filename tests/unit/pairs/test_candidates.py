"""Queries, documents and scored candidates in three tables, and what of the candidates is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.load import job_from_mapping, load_job
from capt.pretrain.pairs.forms import Counts, Pair
from capt.pretrain.pairs.inspect import is_pairs
from capt.pretrain.pairs.selection import Selection
from capt.pretrain.pairs.task import PairTask
from tests.finetune import sentence, write_encoder
from tests.runs import losses, training_rows
from tests.support import run_ranks, stopped_at, train_job
from tests.unit.pairs.written import Rows, read, write_json, write_parquet, write_table

KINDS: dict[str, Callable[[Path, Rows], Path]] = {".jsonl": write_json, ".csv": write_table, ".parquet": write_parquet}


def write_candidates(
    folder: Path, suffix: str = ".parquet", *, queries: int = 12, candidates: int = 9, split: str | None = None
) -> Rows:
    """Three tables of random sentences; a document is a candidate of several queries. Returns the rows of scores."""
    rng = random.Random(3)
    texts = [f"{sentence(rng, 9)} {number}" for number in range(queries + candidates)]
    rows: list[dict[str, Any]] = []
    for number in range(queries):
        ids = [f"d{number}", *(f"d{i}" for i in rng.sample([i for i in range(len(texts)) if i != number], candidates))]
        best = rng.choice((0.8, 0.6, -2.0))
        rows.append(
            {
                "query_id": number,
                "document_ids": ids,
                "scores": [best, *(round(best - abs(best) * rng.uniform(-0.05, 0.6), 4) for _ in ids[1:])],
            }
        )
    tables: dict[str, Rows] = {
        "queries": [{"query_id": i, "query": f"the {texts[i]}"} for i in range(queries)],
        "documents": [{"document_id": f"d{i}", "document": text} for i, text in enumerate(texts)],
        "scores": [{**row, **({name: json.dumps(row[name]) for name in ("document_ids", "scores")}
                              if suffix == ".csv" else {})} for row in rows],
    }  # fmt: skip
    for name, table in tables.items():
        path = folder / f"{name}{suffix}" if split is None else folder / name / f"{split}-00000-of-00001{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        KINDS[suffix](path, table)
    return rows


def _text(folder: Path, name: str) -> str:
    rows = map(json.loads, (folder / "documents.jsonl").read_text().splitlines())
    return next(str(row["document"]) for row in rows if row["document_id"] == name)


@pytest.mark.parametrize("below", [None, 0.95])
@pytest.mark.parametrize("stored", [None, 7])
def test_the_first_document_is_the_positive_and_the_first_that_pass_are_kept(
    tmp_path: Path, below: float | None, stored: int | None
) -> None:
    """Against the published loop; the same from every kind of file, and from a split in folders."""
    rows = write_candidates(tmp_path / "a", ".jsonl")
    expected, few = [], 0
    for row in rows:
        best, kept = row["scores"][0], []
        for name, score in zip(row["document_ids"][1:], row["scores"][1:], strict=True):
            limit = best if below is None else below * best if best > 0 else (2 - below) * best
            if (below is None or score < limit) and (stored is None or len(kept) < stored):
                kept.append((_text(tmp_path / "a", name), score))
        if stored is not None and len(kept) < stored:
            few += 1
            continue
        queries = map(json.loads, (tmp_path / "a" / "queries.jsonl").read_text().splitlines())
        (query,) = (each["query"] for each in queries if each["query_id"] == row["query_id"])
        positive = _text(tmp_path / "a", row["document_ids"][0])
        expected.append(Pair(query, (positive,), tuple(t for t, _ in kept), (best,), tuple(score for _, score in kept)))
    assert expected
    assert (few > 0) == (stored is not None and below is not None)
    selection = Selection(negatives_below=below, stored_negatives=stored)
    for suffix in KINDS:
        write_candidates(tmp_path / suffix, suffix)
        write_candidates(tmp_path / f"split{suffix}", suffix, split="fiqa")
        for folder, split in ((tmp_path / suffix, "train"), (tmp_path / f"split{suffix}", "fiqa")):
            counts = Counts()
            assert read(folder, selection=selection, split=split, counts=counts) == expected
            assert (counts.rows, counts.few_negatives) == (len(rows), few)
            assert is_pairs(folder)
    # Rows of another form are selected alike, where a teacher has scored them.
    lines = [
        {"query": p.query, "pos": p.positives, "neg": p.negatives, "pos_scores": p.positive_scores,
         "neg_scores": p.negative_scores} for p in read(tmp_path / "a")
    ]  # fmt: skip
    assert read(write_json(tmp_path / "b.jsonl", lines), selection=selection) == expected


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "ids without scores": ("scores", {"scores": [0.5]}, "10 ids in 'document_ids' and 1 score in 'scores'"),
    "no list": ("scores", {"document_ids": "d1"}, "'document_ids' must be a list, it holds 'd1'"),
    "score is a text": ("scores", {"scores": ["x"] * 10}, "'scores' must be a number, it holds 'x'"),
    "score is missing": ("scores", {"scores": [0.5, None, *[0.1] * 8]}, "'scores' must be a number, it holds None"),
    "an unknown document": ("scores", {"document_ids": ["d1", *["no"] * 9]}, "names 'no', which the corpus does not"),
    "an unknown query": ("scores", {"query_id": 99}, "no query has the id '99'"),
    "another name": ("scores", {"query_id": None}, "a row of scores has query_id, document_ids and scores"),
    "an id twice": ("documents", {"document_id": "d1", "document": "x"}, "the id 'd1' has another text above"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tables_that_do_not_fit_are_refused_with_their_place(tmp_path: Path, fault: str) -> None:
    table, change, message = FAULTS[fault]
    write_candidates(tmp_path, ".jsonl")
    path = tmp_path / f"{table}.jsonl"
    lines = path.read_text().splitlines()
    row = {**json.loads(lines[-1]), **change}
    path.write_text("\n".join([*lines[:-1], json.dumps({k: v for k, v in row.items() if v is not None})]) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{path}, line {len(lines)}")


def test_large_scores_are_read_and_lists_of_json_are_named_by_what_is_wrong_in_them(tmp_path: Path) -> None:
    write_candidates(tmp_path, ".csv", queries=2)
    path = tmp_path / "scores.csv"
    ids = [f"d{i}" for i in range(10)]
    for scores, message in (
        ([1e308] * 10, None), ([0.5, None, *[0.1] * 8], "'scores' must be a number, it holds None"),
        ([0.5, float("nan"), *[0.1] * 8], "'scores' is nan, and not a finite number"),
    ):  # fmt: skip
        write_table(path, [{"query_id": i, "document_ids": json.dumps(ids[i:] + ids[:i]), "scores": json.dumps(scores)}
                           for i in range(2)])  # fmt: skip
        if message is None:
            assert [pair.positive_scores for pair in read(tmp_path)] == [(1e308,)] * 2
            continue
        with pytest.raises(DataError, match=message):
            read(tmp_path)


def test_folders_and_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_candidates(tmp_path, split="fiqa")
    with pytest.raises(DataError, match=r"no table of split=train; there are fiqa: choose another by data\.split"):
        read(tmp_path)
    with pytest.raises(DataError, match="no table queries; the form candidates has queries, documents, scores"):
        read(tmp_path / "documents", form="candidates")
    with pytest.raises(ConfigError, match="form=candidates looks no document up"):
        read(tmp_path, form="candidates", corpus=tmp_path)
    path = write_json(tmp_path / "a.jsonl", [{"query": "a", "pos": ["b"], "neg": ["c"]}])
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: no teacher's scores .* which negatives_below compares"):
        read(path, selection=Selection(negatives_below=0.9))


@pytest.fixture
def stages(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shipped jobs of both stages, made small, on pairs with a mark and on three tables of candidates."""
    rng = random.Random(1)
    write_encoder(tmp_path / "encoder")
    for name, count in (("small", 40), ("large", 160)):
        words = [sentence(rng, 8).split() for _ in range(count)]
        pairs = [
            {"query": f"{' '.join(each)} {i}", "document": f"{' '.join(rng.sample(each, len(each)))} {i}",
             "drop": i % 4 == 0, "duplicate": None if i % 3 else "other"} for i, each in enumerate(words)
        ]  # fmt: skip
        write_parquet(tmp_path / f"{name}-00000-of-00001.parquet", pairs)
        write_candidates(tmp_path / "candidates", queries=count // 2, split=name)
    small = {"run.log_every": 1, "run.tensorboard": False, "run.threads": 1, "data.sequence_length": 24,
             "data.cache": tmp_path / "cache", "batch.global": 8, "batch.micro": 2, "loader.workers": 0,
             "engine.precision": "fp32", "optimizer.lr": 3e-3}  # fmt: skip
    names = ("small", "large")
    weak = {
        "run.dir": tmp_path / "weak", "model.init": tmp_path / "encoder", "schedule.max_steps": 11,
        "schedule.stop_after": 9, "schedule.warmup_steps": 1, "data.where": "drop == false and duplicate is null",
        "data.sources": [{"name": name, "files": str(tmp_path / f"{name}-*.parquet")} for name in names],
    }  # fmt: skip
    hard = {
        "run.dir": tmp_path / "hard", "model.init": tmp_path / "encoder", "schedule.max_steps": 8,
        "data.negatives": 3, "data.stored_negatives": 4,
        "data.sources": [{"name": each, "files": str(tmp_path / "candidates"), "split": each} for each in names],
    }  # fmt: skip

    def mapping(name: str, changes: dict[str, Any]) -> dict[str, Any]:
        keys = [f"{key}={json.dumps(value, default=str)}" for key, value in {**small, **changes}.items()]
        return load_job(name, keys).model_dump(mode="json", by_alias=True)

    return mapping("denseon_weak", weak), mapping("denseon_hard", hard)


def test_the_open_recipe_reads_its_sources_by_their_rows(stages: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    for mapping, shares in zip(stages, (2.0, 4.0), strict=True):
        task = PairTask(job_from_mapping(mapping, "test"), tmp_path / "run")
        assert [len(pairs) for pairs in task.sources] == [20, 80]
        # 80 rows against 20: the root of their ratio, and the ratio.
        small, large = task.sample_order().weights
        assert large / small == pytest.approx(shares)
        steps = task.step_assembler(8, 4, 1, 0)
        for step in range(6):
            batches = steps(8 * step, step)
            assert len({int(source) for batch in batches for source in batch.sources}) == 1
            assert sum(len(batch.owners) for batch in batches) == (0 if shares == 2 else 3 * 8)
    assert int(task.sources[1].negatives.counts(np.arange(80)).max()) == 4


@pytest.mark.slow
def test_both_stages_of_the_open_recipe_run(stages: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    """The second stage on one rank, resumed on two, has the losses of one rank without a stop."""
    weak, hard = stages
    assert run_ranks(train_job, 1, weak) == [75]
    # The rate aims at the last step of the schedule, and not at the stop.
    assert training_rows(tmp_path / "weak")[-1]["lr"] == pytest.approx(3e-3 * (11 - 8) / 10, rel=0.4)
    hard["model"]["init"] = str(tmp_path / "weak")
    assert run_ranks(train_job, 1, {**hard, "run": {**hard["run"], "dir": str(tmp_path / "whole")}}) == [0]
    assert run_ranks(train_job, 1, stopped_at(hard, 5)) == [75]
    assert run_ranks(train_job, 2, hard, True) == [0, 0]
    expected = losses(tmp_path / "whole")
    assert len(expected) == 8
    assert losses(tmp_path / "hard") == pytest.approx(expected, rel=1e-4)
