"""Rows that a job trains and validates on, its answers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capt.finetune.visual.config import TASKS, VisualData, VisualJob
from capt.finetune.visual.data import (
    Splits,
    answer_table,
    data_digest,
    group_of,
    read_rows,
    read_splits,
    split_off,
    without_missing,
)
from capt.finetune.visual.task import VisualFineTuning
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.load import job_from_mapping, load_job
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.data.examples import Example
from tests.families.pictures.vision_language.data.forms import gqa_question
from tests.visual import visual_mapping, write_pairs, write_questions


def _job(folder: Path, task: str = "vqa", **changes: Any) -> VisualJob:
    job = job_from_mapping(visual_mapping(folder, task, **changes), "test")
    assert isinstance(job, VisualJob)
    return job


def test_recipes_are_those_of_lxmert() -> None:
    for task, rate in (("vqa", 5e-5), ("gqa", 1e-5), ("nlvr2", 5e-5)):
        job = load_job(task, ["model.init=x", "data.train=a", "data.validation=b"])
        assert isinstance(job, VisualJob)
        assert (job.data.task, job.optimizer.lr, job.batch.global_) == (task, rate, 32)
        assert (job.schedule.epochs, job.schedule.warmup_ratio, job.schedule.type) == (4, 0.1, "linear")
        assert (job.optimizer.clip, job.optimizer.weight_decay, job.data.sequence_length) == (5.0, 0.01, 20)
        assert (job.run.seed, job.checkpoint.best) == (9595, "accuracy")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"validation": []}}, "data.validation is missing.*data.validation_share=0.1"),
        ({"model": {"augment": "permute"}}, "augment is none in every job now, and here 'permute'"),
        ({"model": {"encoder": {"init": "x"}}}, "model.encoder.init: not used here"),
        ({"checkpoint": {"best": "acuracy"}}, "validation reports no 'acuracy'"),
    ],
)
def test_jobs_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _job(tmp_path, **changes)
    with pytest.raises(ConfigError, match="statements, which are true or false"):
        _job(tmp_path, "nlvr2", data={"answers": "table.json"})
    assert _job(tmp_path, model={"augment": "none"}) == _job(tmp_path), "as runs of release 0.1.0 have it"


def test_a_share_for_validation_holds_whole_groups(tmp_path: Path) -> None:
    """Statements about the same pictures: a group on both sides would be a leak."""
    task = TASKS["nlvr2"]
    path = write_pairs(tmp_path / "pairs.json", 0, 50)
    content = json.loads(path.read_text())
    for number, row in enumerate(content):
        row["identifier"] = f"dev-{number // 2}-{number % 2}-0"
    path.write_text(json.dumps(content))
    rows = read_rows([path], task, "data.train")
    splits = split_off(rows, task, 0.1)
    assert len(splits.train) == 90
    assert len(splits.validation) == 10
    groups = [{group_of(row, task) for row in part} for part in splits]
    assert not groups[0] & groups[1]
    again = split_off(rows[::-1], task, 0.1)
    assert {row.id for row in again.validation} == {row.id for row in splits.validation}
    assert [row.id for row in splits.train] == [row.id for row in rows if row in splits.train], "in their order"
    wide = split_off(rows, task, 0.99)
    assert len(wide.train) == 2, "a group is left to train on"
    with pytest.raises(DataError, match="all rows belong together"):
        split_off(rows[:2], task, 0.5)


@pytest.mark.parametrize(
    ("task", "id_", "pictures", "group"),
    [("nlvr2", "dev-850-1-0", ("a", "b"), "dev-850"), ("gqa", "7", ("p",), "p")],
)
def test_groups(task: str, id_: str, pictures: tuple[str, ...], group: str) -> None:
    assert group_of(Example(id_, pictures, "text"), TASKS[task]) == group


def test_rows_of_another_task_or_without_labels_are_refused(tmp_path: Path) -> None:
    questions = write_questions(tmp_path / "q.json", 0, 3)
    pairs = write_pairs(tmp_path / "p.json", 0, 3)
    bare = write_pairs(tmp_path / "bare.json", 0, 3, labels=False)
    with pytest.raises(DataError, match=r"data\.train: row dev-0-0-0 has 2 pictures; VQA has 1"):
        read_rows([pairs], TASKS["vqa"], "data.train")
    one = TASKS["nlvr2"]._replace(pictures=1)  # a statement about a picture, as a task of somebody else may have it
    with pytest.raises(DataError, match="row 0 belongs to another task; a row of NLVR2 is a statement"):
        read_rows([questions], one, "data.train")
    assert len(read_rows([bare], TASKS["nlvr2"], "--data")) == 6
    job = _job(tmp_path, "nlvr2", data={"train": [str(bare)]})
    with pytest.raises(DataError, match="6 of 6 rows have no label, such as dev-0-0-0"):
        read_splits(job.data)
    twice = [str(questions), str(questions)]
    with pytest.raises(DataError, match="occurs twice"):
        read_splits(_job(tmp_path, data={"validation": twice}).data)


def test_the_answer_table_is_counted_or_given(tmp_path: Path) -> None:
    data = _job(tmp_path).data
    splits = read_splits(data)
    table = answer_table(data, splits)
    assert table is not None
    assert set(table.answers) == {"red", "green", "blue", "white"}
    rare = data.model_copy(update={"minimum_answers": 1000})
    with pytest.raises(DataError, match=r"data\.minimum_answers"):
        answer_table(rare, splits)
    gqa = data.model_copy(update={"task": "gqa", "minimum_answers": 1000})
    assert answer_table(gqa, splits) is not None, "GQA takes all answers"
    given = tmp_path / "table.json"
    given.write_text(json.dumps(["blue", "red"]))
    assert answer_table(data.model_copy(update={"answers": given}), splits).answers == ("blue", "red")  # type: ignore[union-attr]
    given.write_text(json.dumps(["zebra"]))
    with pytest.raises(DataError, match=r"table\.json: it has no answer of any question in data\.train"):
        answer_table(data.model_copy(update={"answers": given}), splits)
    assert answer_table(_job(tmp_path, "nlvr2").data, splits) is None


def test_a_digest_stands_for_the_data(tmp_path: Path) -> None:
    data = _job(tmp_path).data
    splits, store = read_splits(data), RegionStore.open(Path(str(data.regions)))
    table = answer_table(data, splits)
    whole = data_digest(splits, store, table)
    assert whole == data_digest(read_splits(data), store, table)
    assert whole != data_digest(Splits(splits.train[1:], splits.validation), store, table)
    assert whole != data_digest(splits, store, None)
    limited: VisualData = data.model_copy(update={"max_train": 7})
    assert len(read_splits(limited).train) == 7


def test_a_store_that_is_not_as_it_was_imported_is_not_trained_on(tmp_path: Path) -> None:
    mapping = visual_mapping(tmp_path)
    features = Path(mapping["data"]["regions"]) / "features.npy"
    content = bytearray(features.read_bytes())
    content[-1] ^= 64
    features.write_bytes(content)
    with pytest.raises(DataError, match=r"features.npy is damaged: expected SHA-256 .*; import the store again"):
        VisualFineTuning(job_from_mapping(mapping, "test"), tmp_path / "run")


def test_questions_of_which_none_counts_are_no_validation_set(tmp_path: Path) -> None:
    _job(tmp_path, "gqa")
    for name in ("train", "validation"):
        question = gqa_question("no", balanced=name == "train")
        (tmp_path / f"{name}.json").write_text(json.dumps({f"{name}1": question}))
    files = {name: [str(tmp_path / f"{name}.json")] for name in ("train", "validation")}
    data = _job(tmp_path, "gqa", data=files).data
    with pytest.raises(DataError, match=r"data.validation: no question is balanced.*name other files"):
        read_splits(data)


def test_rows_of_both_splits_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = _job(tmp_path).data
    rows = len(read_splits(data).validation)
    caplog.clear()
    read_splits(data.model_copy(update={"validation": data.train}))
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    train = read_rows(data.train, TASKS["vqa"], "data.train")
    pictures = len({name for row in train for name in row.pictures})
    assert rows
    assert f"{len(train)} of {len(train)} questions and {pictures} of {pictures} pictures are in both" in message


def test_rows_about_pictures_that_the_store_lacks_can_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = _job(tmp_path).data
    assert data.regions is not None
    store, splits = RegionStore.open(data.regions), read_splits(data)
    elsewhere = [row._replace(pictures=("elsewhere",)) for row in splits.train[:3]]
    kept = without_missing(Splits([*elsewhere, *splits.train[3:]], splits.validation), store)
    assert kept == Splits(splits.train[3:], splits.validation)
    assert "data.train: 3 rows LEFT OUT, whose pictures are not in the store: 'elsewhere'" in caplog.text
    with pytest.raises(DataError, match=r"data\.validation: 1 picture not in the region store"):
        without_missing(Splits(splits.train, elsewhere), store)
