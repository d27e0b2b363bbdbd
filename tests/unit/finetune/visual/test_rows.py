"""Batches of questions and statements against literal loops, and the permutation of boxes against permuted scenes."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from capt.finetune.visual.data import row_set
from capt.finetune.visual.nlvr import Permute, permuted, require_scenes
from capt.finetune.visual.rows import AugmentedRows, PictureRows, SoftTargets
from capt.finetune.visual.task import VisualFineTuning
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.regions.nlvr1 import FEATURES_OF, read_scenes
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.regions.writer import write_store
from tests.visual import visual_mapping, write_scenes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def _task(folder: Path, name: str, **changes: object) -> VisualFineTuning:
    return VisualFineTuning(job_from_mapping(visual_mapping(folder, name, **changes), "test"), folder / "run")


def _rows(task: VisualFineTuning) -> PictureRows:
    assert isinstance(task.train, PictureRows)
    return task.train


@pytest.mark.parametrize("name", ["vqa", "nlvr2", "nlvr1"])
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


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_permuting_regions_is_permuting_the_boxes_of_the_scene(tmp_path: Path, order: tuple[int, ...]) -> None:
    """The oracle is the reader of scenes on files whose boxes stand in the other order."""
    file = write_scenes(tmp_path / "scenes.json", 4)
    moved = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        boxes = row["structured_rep"]
        moved.append({**row, "structured_rep": [boxes[order.index(place)] for place in range(3)]})
    (tmp_path / "moved.json").write_text("\n".join(json.dumps(row) for row in moved))
    stores = []
    for name in ("scenes", "moved"):
        pictures = (picture for _, picture in read_scenes([tmp_path / f"{name}.json"]))
        write_store(tmp_path / name, pictures, feature_dtype="fp32", features_of=FEATURES_OF)
        stores.append(RegionStore.open(tmp_path / name))
    ours = permuted(stores[0].regions(np.arange(8)), np.tile(np.array(order), (8, 1)))
    theirs = stores[1].regions(np.arange(8))
    assert len(stores[0]) == len(stores[1]) == 8
    np.testing.assert_array_equal(ours.present, theirs.present)
    for picture in range(8):
        there = ours.present[picture]
        both = [np.concatenate([x.features[picture][there], x.boxes[picture][there]], axis=1) for x in (ours, theirs)]
        ordered = [rows[np.lexsort(np.round(rows.T, 4))] for rows in both]
        np.testing.assert_allclose(ordered[0], ordered[1], atol=1e-6)
        assert not ours.boxes[picture][~there].any()
        assert not ours.features[picture][~there].any()


def test_an_order_belongs_to_the_sample_and_all_six_come(folder: Path) -> None:
    task = _task(folder, "nlvr1", model={"augment": "permute"})
    rows = task.train
    assert isinstance(rows, AugmentedRows)
    numbers = np.array([3, 3, 8])
    one = rows.training_batch(numbers, np.array([5, 6, 900])).inputs
    two = rows.training_batch(numbers[::-1].copy(), np.array([900, 6, 5])).inputs
    assert torch.equal(one.boxes, two.boxes.flip(0))
    seen = {
        tuple(rows.training_batch(np.array([3]), np.array([sample])).inputs.boxes[0, 0, :3, 0].tolist())
        for sample in range(60)
    }
    assert len(seen) == 6
    plain = rows.batch(numbers).inputs
    assert plain.boxes[0, 0, :3, 0].tolist() == [0.0, 0.375, 0.75], "evaluation sees the boxes as they are"
    with pytest.raises(ConfigError, match="only features of scenes"):
        require_scenes(_task(folder, "vqa").store)
    other = Permute(2)(task.store.regions(np.array([3, 3, 8])), np.array([5, 6, 900]))
    assert not np.array_equal(other.boxes, one.boxes[:, 0].numpy())


def test_absent_pictures_are_named(folder: Path) -> None:
    task = _task(folder, "vqa")
    rows = [row._replace(pictures=("nowhere",)) for row in _rows(task).examples[:2]]
    with pytest.raises(DataError, match=r"data\.train: 1 picture not in the region store .*: 'nowhere'"):
        row_set(rows, task.job.data, task.tokenizer, task.store, task.answers, "data.train")
