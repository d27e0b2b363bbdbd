"""A loss of pairs is one file and one row: what it needs is asked of the rows, the rest follows from the row."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import normalize

from capt.pretrain import registry
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.pairs import losses
from capt.pretrain.pairs.config import PairContrast, PairJob
from capt.pretrain.pairs.data_config import PairData
from capt.pretrain.pairs.loss import PairTerm
from capt.pretrain.pairs.losses import LOSSES, find_loss
from capt.pretrain.pairs.task import PairTask
from capt.pretrain.pairs.views import PairViews, Part, parts_of
from tests.pairs import every_form, pairs_mapping
from tests.toy_loss import MARGIN, SCORED, Options


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "scored", SCORED)
    entries = {"margin": "tests.toy_loss:MARGIN", "wrong": "tests.toy_loss:margin"}
    monkeypatch.setattr(registry, "entry_point_values", lambda group: entries if group == losses.GROUP else {})


def test_a_loss_is_found_by_its_name() -> None:
    assert find_loss("margin") is MARGIN
    with pytest.raises(ConfigError, match=r"data\.loss: unknown loss 'cosnt'; did you mean 'cosent'"):
        find_loss("cosnt")
    with pytest.raises(ConfigError, match="is not a PairLoss"):
        find_loss("wrong")
    with pytest.raises(ValidationError, match="unknown loss 'cosnt'"):
        PairData(files=["x"], loss="cosnt")
    for loss, options, fault in (
        ("margin", {"sclae": 2}, r"source pairs: loss_options\.sclae of the loss margin: Extra"),
        ("cosent", {"scale": 2}, r"source pairs: loss_options\.scale of the loss cosent"),
        ("margin", {"scale": 2}, r"the loss margin compares the documents of a row with each other; set data\.neg"),
    ):
        with pytest.raises(ConfigError, match=fault):
            list(PairData(files=["x"], loss=loss, loss_options=options).each())


def test_a_part_of_a_step_is_computed_by_the_function_of_its_row() -> None:
    torch.manual_seed(0)
    s, d, h = (normalize(torch.randn(n, 6, dtype=torch.float64), dim=1) for n in (4, 4, 5))
    owners, teacher, hard = torch.tensor([0, 0, 1, 2, 3]), torch.randn(4).double(), torch.randn(5).double()
    views = PairViews(
        s, d, torch.arange(4), 0.2, negatives=h, owners=owners, teacher=teacher, negative_teacher=hard,
        parts=(Part("margin", 1.0, (0,), settings=Options(scale=0.5)),),
    )  # fmt: skip
    term = PairTerm(PairContrast(queue=8), 6, 4)
    terms = [
        (float(s[i] @ d[i] - s[i] @ h[k]) - 0.5 * float(teacher[i] - hard[k])) ** 2
        for k, i in enumerate(owners.tolist())
    ]
    assert float(term.loss(views, step=0)) == pytest.approx(sum(terms) / 5, rel=1e-12)
    assert list(term.take_losses()) == ["loss/margin"]
    assert term.queue is not None
    assert len(term.queue) == 0, "of a contrast alone"


def test_sources_of_one_contrast_with_other_options_are_parts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOSSES, "margin", dataclasses.replace(MARGIN, contrasts=True))
    (rows,) = _task(tmp_path, loss="margin").sources
    sources = [
        dataclasses.replace(rows, source=rows.source.model_copy(update={"loss_options": {"scale": scale}}))
        for scale in (2.0, 3.0, 2.0)
    ]
    parts = parts_of(sources, [2, 3, 4])
    assert [(part.sources, part.settings) for part in parts] == [((0, 2), Options(scale=2)), ((1,), Options(scale=3))]


def _task(folder: Path, *, teacher: bool = True, **source: Any) -> PairTask:
    mapping = pairs_mapping(folder, **every_form(folder, mixed=False))
    if not teacher:
        path = folder / "taught.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("\n".join(json.dumps({k: v for k, v in row.items() if "score" not in k}) for row in rows))
    mapping["data"]["sources"] = [{**each, **source} for each in mapping["data"]["sources"] if each["name"] == "taught"]
    mapping["distillation"] = {"weight": 0.0}
    job = job_from_mapping(json.loads(json.dumps(mapping)), "test")
    assert isinstance(job, PairJob)
    return PairTask(job, folder / "run")


def test_what_a_loss_needs_is_asked_of_the_rows(tmp_path: Path) -> None:
    task = _task(tmp_path, loss="margin")
    (batch,) = [task.step_assembler(8, 1, 1, 0)(0, 0)]
    assert bool(batch[0].teacher.isfinite().all())
    with pytest.raises(DataError, match="source taught: the loss margin needs a teacher's scores"):
        _task(tmp_path, teacher=False, loss="margin")
    with pytest.raises(DataError, match="no score, and source taught has the loss scored"):
        _task(tmp_path, loss="scored")


def test_validation_reports_the_figures_of_a_loss(tmp_path: Path) -> None:
    mapping = pairs_mapping(tmp_path, **every_form(tmp_path, mixed=False))
    mapping["data"]["sources"][0]["loss"] = "scored"
    mapping["checkpoint"] = {"best": "pearson", "every": 3}
    job = job_from_mapping(mapping, "test")
    assert "pearson" in job.metric_names()
    assert isinstance(job, PairJob)
    task = PairTask(job, tmp_path / "run")
    assert dict(task.pools.figures) == dict(SCORED.figures)
