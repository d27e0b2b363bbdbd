"""The table of picture tasks: a new row, with a module for its result file, is a whole task."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from capt.finetune.visual import config
from capt.finetune.visual.config import TASKS, VisualData, VisualTask
from capt.finetune.visual.data import answer_table, group_of, read_splits
from capt.finetune.visual.dumps import Checked, Figures, check_predictions, result_file, write_dump
from capt.finetune.visual.objective import objective_of
from capt.finetune.visual.rows import PictureRows
from capt.pretrain.vision_language.data import read
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import Document


def _toy_module() -> ModuleType:
    """Result files of a toy task: JSON lines ``[id, word]``."""
    module: Any = ModuleType("toy_results")

    def check(path: Path, documents: list[Document], task: str) -> Checked:
        rows = dict(json.loads(line) for line in path.read_text().splitlines())
        right = [rows[row.id] == max(row.answers or {}) for row in read.examples_of(documents)]
        return Checked(task, len(right), len(rows), 0, [], Figures({"accuracy": sum(right) / len(right)}))

    def write(predictions: dict[Any, str], examples: Any, files: Any, out: Path, task: str) -> Path:
        out.write_text("".join(f"{json.dumps(pair)}\n" for pair in predictions.items()))
        return out

    module.check, module.write = check, write
    return module


def _read_toy(document: Document) -> list[Example]:
    return [Example(row["toy"], (row["shown"],), row["ask"], {row["say"]: 1.0}, None) for row in document.rows]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> VisualTask:
    """A task of questions, by a row of the table, a form of file and a module."""
    task = VisualTask("toy", "Toy QA", 1, True, ("accuracy",), "toy_results")
    form = read._Form(lambda document: {"toy", "ask"} <= document.keys, _read_toy, "toy")
    monkeypatch.setitem(TASKS, "toy", task)
    monkeypatch.setitem(sys.modules, "toy_results", _toy_module())
    monkeypatch.setattr(read, "_FORMS", (form, *read._FORMS))
    return task


def test_a_toy_task_is_read_measured_written_and_checked(toy: VisualTask, tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    rows = [{"toy": f"q{i}", "shown": f"p{i}", "ask": "what?", "say": "cat" if i % 3 else "dog"} for i in range(9)]
    path.write_text(json.dumps(rows))
    data = VisualData.model_validate({"task": "toy", "train": [path], "validation_share": 0.4, "regions": "store"})
    splits = read_splits(data)
    assert len(splits.train) + len(splits.validation) == 9
    table = answer_table(data, splits)
    assert table is not None
    assert objective_of(toy).metric == "accuracy"
    examples = [*splits.train, *splits.validation]
    results = {"answer": np.array([table.index["cat"]] * 9)}
    predicted = PictureRows.__new__(PictureRows)  # the result file needs the examples alone
    object.__setattr__(predicted, "examples", examples)
    checked = check_predictions(write_dump(results, predicted, data, table, tmp_path / "out", [path]), [path])
    assert (checked.task, checked.questions, checked.scores) == ("toy", 9, {"accuracy": 6 / 9})


def test_what_is_no_task_is_one_sentence() -> None:
    with pytest.raises(ValidationError, match=r"unknown task 'vqaa'; did you mean 'vqa'"):
        VisualData.model_validate({"task": "vqaa"})


@pytest.mark.parametrize("task", config.TASKS.values(), ids=lambda task: task.key)
def test_every_task_has_its_result_file(task: VisualTask) -> None:
    needed = ("check", "write") if task.answers else ("check", "write", "scores")
    assert all(callable(getattr(result_file(task), name)) for name in needed)


@pytest.mark.parametrize(("key", "group"), [("vqa", "p"), ("gqa", "p"), ("nlvr2", "a-b")])
def test_rows_are_grouped_by_what_they_were_written_with(key: str, group: str) -> None:
    assert group_of(Example("a-b-c-d", ("p",), "text", None, None), TASKS[key]) == group
