"""Batches of questions and statements against literal loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from capt.finetune.visual.data import row_set
from capt.finetune.visual.rows import PictureRows, SoftTargets
from capt.finetune.visual.task import VisualFineTuning
from capt.pretrain.base.errors import DataError
from capt.pretrain.config.load import job_from_mapping
from tests.visual import visual_mapping


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def _task(folder: Path, name: str, **changes: object) -> VisualFineTuning:
    return VisualFineTuning(job_from_mapping(visual_mapping(folder, name, **changes), "test"), folder / "run")


def _rows(task: VisualFineTuning) -> PictureRows:
    assert isinstance(task.train, PictureRows)
    return task.train


@pytest.mark.parametrize("name", ["vqa", "nlvr2"])
def test_a_batch_holds_each_sentence_with_its_pictures_in_order(folder: Path, name: str) -> None:
    task = _task(folder, name)
    rows, store = _rows(task), task.store
    numbers = np.array([7, 0, 33])
    batch = rows.batch(numbers)
    inputs = batch.inputs
    for place, number in enumerate(numbers):
        example = rows.examples[number]
        ids = [task.tokenizer.special.bos, *task.tokenizer.encode_batch([example.text])[0], task.tokenizer.special.eos]
        assert inputs.tokens[place, : len(ids)].tolist() == ids
        assert (inputs.tokens[place, len(ids) :] == task.tokenizer.special.pad).all()
        assert len(example.pictures) == inputs.features.shape[1] == (2 if name == "nlvr2" else 1)
        size = len(ids)
        for k, picture in enumerate(example.pictures):
            alone = store.regions(store.rows([picture]))
            count = alone.features.shape[1]
            size += count
            assert torch.equal(inputs.features[place, k, :count], torch.from_numpy(alone.features[0]))
            assert torch.equal(inputs.boxes[place, k, :count], torch.from_numpy(alone.boxes[0]))
            there = count if inputs.present is None else int(inputs.present[place, k].sum())
            assert there == count
        assert rows.lengths[number] == size
        if name == "vqa":
            assert task.answers is not None
            expected = [example.answers.get(text, 0.0) for text in task.answers.answers]  # type: ignore[union-attr]
            np.testing.assert_allclose(batch.labels[place].numpy(), expected)
        else:
            assert int(batch.labels[place]) == int(bool(example.truth))


def test_soft_targets_equal_the_dictionaries() -> None:
    answers = [{"red": 0.3, "blue": 1.0}, {}, {"out of the table": 1.0, "no": 0.9}, {"blue": 0.6}]
    index = {"blue": 0, "no": 1, "red": 2, "yes": 3}
    targets = SoftTargets.of(answers, index)
    literal = np.array([[row.get(text, 0.0) for text in index] for row in answers], dtype=np.float32)
    np.testing.assert_array_equal(targets.dense(np.arange(4)), literal)
    np.testing.assert_array_equal(targets.dense(np.array([3, 0])), literal[[3, 0]])
    for chosen in ([0, 0, 0, 0], [2, 3, 1, 0], [3, 3, 3, 3]):
        expected = [literal[row, answer] for row, answer in enumerate(chosen)]
        np.testing.assert_array_equal(targets.scores_of(np.array(chosen)), expected)


def test_absent_pictures_are_named(folder: Path) -> None:
    task = _task(folder, "vqa")
    rows = [row._replace(pictures=("nowhere",)) for row in _rows(task).examples[:2]]
    with pytest.raises(DataError, match=r"data\.train: 1 picture not in the region store .*: 'nowhere'"):
        row_set(rows, task.job.data, task.tokenizer, task.store, task.answers, "data.train")
