"""Rows of one text whose views are two spans of it: drawn from the row and its visit, without prompts, long enough."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from capt.launcher.cli import app
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.randomness import generator_for
from capt.pretrain.base.verification import Verifier, all_ranks
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.data.views import Spans, crop
from capt.pretrain.pairs.config import PairJob
from capt.pretrain.pairs.reader import RowsReader
from capt.pretrain.pairs.task import PairTask
from tests.finetune import sentence
from tests.pairs import pairs_mapping


def _task(folder: Path, texts: list[dict[str, Any]], *, model: dict[str, Any] | None = None, **data: Any) -> PairTask:
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    mapping = pairs_mapping(folder, model=model or {})
    mapping["data"] |= {"files": [str(folder / "texts.jsonl")], "view": "crop", "sequence_length": 40, **data}
    job = job_from_mapping(mapping, "test")
    assert isinstance(job, PairJob)
    return PairTask(job, folder / "run")


def _texts(count: int) -> list[dict[str, Any]]:
    generator = random.Random(0)
    return [{"text": f"{sentence(generator, 30)} {number}"} for number in range(count)]


def test_both_views_are_spans_of_the_row_in_any_micro_batch(tmp_path: Path) -> None:
    task = _task(tmp_path, _texts(40))
    (pairs,) = task.sources
    found: dict[int, list[tuple[int, list[int], list[int]]]] = {1: [], 4: []}
    for parts, rows in found.items():
        for world in (1, 2):
            for rank in range(world):
                for batch in task.step_assembler(8, parts // world or 1, world, rank)(40, 5):
                    views, n = batch.tokens.split(batch.lengths.tolist()), len(batch.ids)
                    rows += [
                        (int(batch.ids[i]), views[i].tolist(), views[n + i].tolist()) for i in range(n)
                    ]  # fmt: skip
                    assert batch.keys.equal(batch.query_keys), "both are of one instance"
    assert sorted(found[1]) == sorted(found[4])
    assert len({row for row, *_ in found[1]}) == 8
    visit = 40 // len(pairs)
    for row, *views in found[1]:
        text = pairs.queries.tokens(pairs.query[[row]])[0].tolist()
        cuts = crop(len(text) - 2, Spans(), len(text), generator_for("views/pairs", task.job.run.seed, visit, row))
        assert views == [[text[0], *text[1:-1][cut], text[-1]] for cut in cuts]


def test_texts_too_short_for_two_spans_are_left_out_or_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = [{"text": "the"}, {"text": "a house"}, *_texts(30)]
    with caplog.at_level("INFO"):
        task = _task(tmp_path, texts, validation_fraction=0.0)
    tokens = [len(ids) for ids in task.tokenizer.encode_batch([row["text"] for row in texts])]
    short = sum(number < 16 for number in tokens)
    assert 2 <= short < 10
    assert task.samples == 32 - short
    assert f"{short} texts of fewer than 16 tokens are left out (spans.short=skip)" in caplog.text
    whole = _task(tmp_path, texts, validation_fraction=0.0, spans={"short": "whole"})
    assert whole.samples == 32
    first, second = whole.sources[0].spans(*np.zeros((3, 1), dtype=np.int64), 1)
    assert first[0].tolist() == second[0].tolist() == whole.sources[0].queries.tokens(np.zeros(1, np.int64))[0].tolist()
    half = _task(tmp_path, texts, validation_fraction=0.5)
    _, held_out = RowsReader(half.job, half.tokenizer, 512, Verifier(half.job.data.cache, all_ranks())).train()
    lengths = [rows.queries.lengths(rows.query) - 2 for rows in held_out]
    assert min(int(each.min()) for each in lengths) >= 16, "a shorter one would be found by itself"
    short_texts = [{"text": f"the {number}"} for number in range(16)]
    with pytest.raises(DataError, match=r"no text is long enough: two spans of spans.least 8 take 16 tokens \(data"):
        _task(tmp_path, short_texts, validation_fraction=0.0)
    # All of them whole: dropout tells the views apart, as long as there is any.
    every = _task(tmp_path, short_texts, validation_fraction=0.0, spans={"short": "whole"}, model={"dropout": 0.1})
    assert every.samples == 16
    with pytest.raises(ConfigError, match=r"views of all texts are the same: set model\.dropout above 0"):
        _task(tmp_path, short_texts, validation_fraction=0.0, spans={"short": "whole"})


def test_both_views_are_shown_as_they_are_read(tmp_path: Path) -> None:
    task = _task(tmp_path, _texts(20))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(task.job.model_dump(mode="json", by_alias=True, exclude={"model": {"encoder"}})))
    result = CliRunner().invoke(app, ["data", "inspect", "--job", str(path), "--json"], catch_exceptions=False)
    (source,) = json.loads(result.stdout)
    expected = []
    for start in (0, 8):
        for batch in task.step_assembler(8, 1, 1, 0)(start, 0):
            texts, n = [task.tokenizer.decode(x.tolist(), skip_special=False) for x in batch.tokens.split(
                batch.lengths.tolist())], len(batch.ids)  # fmt: skip
            expected += [list(both) for both in zip(texts[:n], texts[n:], strict=True)]
    assert source["views"] == expected[:10]
    shown = CliRunner().invoke(app, ["data", "inspect", "--job", str(path), "--samples", "2"], catch_exceptions=False)
    assert "data.view crop: both views of the first samples" in shown.stdout
    assert all(view in shown.stdout for both in expected[:2] for view in both)
    assert expected[2][0] not in shown.stdout


def test_spans_are_of_one_text_without_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="spans of a text have no prompt"):
        _task(tmp_path, _texts(20), prompts={"query": "the "})
    with pytest.raises(ConfigError, match=r"data\.spans applies to spans, and data\.view is dropout"):
        _task(tmp_path, _texts(20), view="dropout", spans={"gap": 2})
    with pytest.raises(DataError, match="source pairs has the view crop, of one text alone"):
        _task(tmp_path, [{"query": f"the {i}", "pos": ["a house"]} for i in range(20)])
