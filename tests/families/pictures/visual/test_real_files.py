"""Result files of every real question: written, accepted by the validators, and scored."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from capt.finetune.visual.dumps import check_predictions
from capt.finetune.visual.gqa import check_gqa, write_gqa
from capt.finetune.visual.nlvr import write_nlvr
from capt.finetune.visual.vqa import write_vqa
from capt.pretrain.vision_language.data.gqa import read_gqa_questions
from capt.pretrain.vision_language.data.read import read_examples

pytestmark = pytest.mark.realdata


@pytest.mark.parametrize(
    ("split", "rows", "accuracy"),  # what the official evaluator gives for these files
    [("train", 16_000, 0.24869375), ("valid", 8_977, 0.20847722), ("test", 2_962, 0.22366644)],
)
def test_vqa_with_the_most_frequent_answer(
    split: str, rows: int, accuracy: float, data_folder: Path, tmp_path: Path
) -> None:
    names = ("OpenEnded_mscoco_train2014_questions", "mscoco_train2014_annotations")
    paths = [data_folder / f"vl/vqa/v2_{name}.{split}.json.gz" for name in names]
    given, known = (json.loads(gzip.decompress(path.read_bytes())) for path in paths)  # the check reads all with care
    ((answer, _),) = Counter(row["multiple_choice_answer"] for row in known["annotations"]).most_common(1)
    assert answer == "yes"
    ids = [row["question_id"] for row in given["questions"]]
    out = write_vqa(dict.fromkeys(ids, answer), tmp_path / "o.json", ids)
    checked = check_predictions(out, paths)
    assert (checked.task, checked.questions, checked.problems) == ("vqa", rows, [])
    assert checked.scores["accuracy"] == pytest.approx(accuracy, abs=5e-9)
    assert checked.scores["accuracy_yes_no"] > 0.55
    if split != "test":  # the smallest says as much
        return
    assert check_predictions(out, paths[:1]).scores == {}
    lxmert = check_predictions(out, [data_folder / f"vl/lxmert/vqa/{split}.json.gz"])
    assert lxmert.problems == []
    assert lxmert.scores["accuracy"] == pytest.approx(checked.scores["accuracy"], abs=2e-3)


def test_gqa(data_folder: Path, tmp_path: Path) -> None:
    path = data_folder / "vl/gqa/testdev_balanced.questions_with_pseudo_labels.json.gz"
    questions = read_gqa_questions(path)
    out = write_gqa({question.id: "yes" for question in questions}, tmp_path / "o.json", questions)
    assert check_gqa(out, questions) == []
    assert check_predictions(out, [path])[:5] == ("gqa", 12_578, 12_578, 0, [])


@pytest.mark.parametrize(
    ("name", "rows", "majority"),
    [
        ("nlvr2/dev.json.gz", 6_982, 0.5086),  # the published score of a model that did not learn
        ("nlvr2/test1.json.gz", 6_967, 0.5107),
    ],
)
def test_nlvr_with_the_most_frequent_label(
    name: str, rows: int, majority: float, data_folder: Path, tmp_path: Path
) -> None:
    path = data_folder / "vl" / name
    examples = read_examples([path])
    ((label, _),) = Counter(example.truth for example in examples).most_common(1)
    predictions = {str(example.id): bool(label) for example in examples}
    checked = check_predictions(write_nlvr(predictions, tmp_path / "o.csv", predictions), [path])
    assert (checked.task, checked.questions, checked.problems) == ("nlvr2", rows, [])
    assert checked.scores["accuracy"] == pytest.approx(majority, abs=5e-5)
    assert checked.scores["consistency"] < 0.3
