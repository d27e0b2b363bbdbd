"""Every row of the real files goes through readers and label builders."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from capt.pretrain.vision_language.data.answers import build_table, coverage, load_table
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.gqa import read_gqa_questions
from capt.pretrain.vision_language.data.read import read_examples

pytestmark = pytest.mark.realdata

VQA = {"train": 16_000, "valid": 8_977, "test": 2_962}
OTHERS = {  # rows, pictures
    "gqa/testdev_balanced.questions_with_pseudo_labels.json.gz": (12_578, 398),
    "nlvr2/dev.json.gz": (6_982, 8_102),
    "nlvr2/test1.json.gz": (6_967, 8_082),
    "captions/Flickr8k.token.txt.gz": (40_460, 8_092),
    "captions/captions_val2014_fakecap_results.json": (1_000, 1_000),
}
TABLES = {
    "all_ans.json.gz": 9_500,
    "vqa/trainval_label2ans.json": 3_129,
    "vqa/trainval_ans2label.json": 3_129,
    "gqa/trainval_label2ans.json": 1_842,
    "gqa/trainval_ans2label.json": 1_842,
}
_NAMES = ("v2_mscoco_train2014_annotations", "v2_OpenEnded_mscoco_train2014_questions")


@cache
def official(folder: Path, split: str) -> list[Example]:
    """VQA's questions with annotations."""
    return read_examples([folder / f"vl/vqa/{name}.{split}.json.gz" for name in _NAMES])


@pytest.mark.parametrize("split", VQA)
def test_soft_labels_of_vqa_are_lxmerts(split: str, data_folder: Path) -> None:
    table = load_table(data_folder / "vl/lxmert/vqa/trainval_label2ans.json")
    ours = official(data_folder, split)
    theirs = read_examples([data_folder / f"vl/lxmert/vqa/{split}.json.gz"])
    assert len(ours) == len(theirs) == VQA[split]
    for own, other in zip(ours, theirs, strict=True):
        assert own._replace(answers=None, answer=None) == other._replace(answers=None)
        inside = {answer: score for answer, score in (own.answers or {}).items() if answer in table.index}
        assert inside == other.answers, own.id
        assert table.scores(own.answers or {}) == {table.index[answer]: score for answer, score in inside.items()}


def test_answers_outside_the_table_are_as_many_as_is_said(data_folder: Path) -> None:
    table = load_table(data_folder / "vl/lxmert/vqa/trainval_label2ans.json")
    found = {split: coverage(official(data_folder, split), table) for split in VQA}
    assert {split: counts.uncovered for split, counts in found.items()} == {"train": 324, "valid": 199, "test": 54}
    assert {split: counts.questions for split, counts in found.items()} == VQA
    examples = [example for split in VQA for example in official(data_folder, split)]
    assert len(examples) == 27_939
    built = build_table(examples, 9)
    assert len(built) == 255
    assert set(built.answers) <= set(table.index), "an answer that is frequent in a part is so in the whole"


@pytest.mark.parametrize("name", OTHERS)
def test_rows_and_pictures(name: str, data_folder: Path) -> None:
    examples = read_examples([data_folder / "vl" / name])
    pictures = {picture for example in examples for picture in example.pictures}
    assert (len(examples), len(pictures)) == OTHERS[name]
    assert len({example.id for example in examples}) == len(examples)
    assert all(example.text.strip() for example in examples)
    if name.startswith("nlvr"):
        counts = Counter(example.truth for example in examples)
        assert set(counts) == {True, False}
        assert 0.45 < counts[True] / len(examples) < 0.6


def test_gqa_without_gold_answers_has_none(data_folder: Path) -> None:
    path = data_folder / "vl/gqa/testdev_balanced.questions_with_pseudo_labels.json.gz"
    assert {example.answers for example in read_examples([path])} == {None}, "a model's answers are no labels"
    assert len([question for question in read_gqa_questions(path) if question.balanced]) == 12_578


@pytest.mark.parametrize("name", TABLES)
def test_answer_tables(name: str, data_folder: Path) -> None:
    table = load_table(data_folder / "vl/lxmert" / name)
    assert len(table) == len(table.index) == TABLES[name]
    if "ans2label" in name:
        assert table == load_table(data_folder / "vl/lxmert" / name.replace("ans2label", "label2ans"))
    if name.startswith("vqa"):
        assert table.answers[0] == ""
