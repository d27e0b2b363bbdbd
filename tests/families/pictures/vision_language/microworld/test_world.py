"""Every sentence of a microworld is true, every answer right, and its files are those of the official formats."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.finetune.visual.dumps import check_predictions
from capt.pretrain.base.errors import DataError
from capt.pretrain.regions.importing import import_regions
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.data.answers import load_table
from capt.pretrain.vision_language.data.read import read_examples
from capt.pretrain.vision_language.microworld.generate import SPLITS, World, write_world
from capt.pretrain.vision_language.microworld.scenes import CLASSES, COLOURS, HEIGHT, WIDTH, draw_scene
from tests.families.pictures.vision_language.microworld import literal

WORLD = World(pictures=100, seed=3, feature_size=16, noise=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("microworld") / "world"
    write_world(out, WORLD)
    return out


@pytest.fixture(scope="module")
def store(folder: Path) -> RegionStore:
    out = folder.parent / "store"
    import_regions(out, [*sorted(folder.glob("pictures/*.tsv")), *sorted(folder.glob("nlvr2/*.tsv"))], workers=1)
    return RegionStore.open(out)


def _pictures(folder: Path) -> dict[str, literal.Picture]:
    return {
        name: picture
        for path in (*folder.glob("pictures/*.tsv"), *folder.glob("nlvr2/*.tsv"))
        for name, picture in literal.read_tsv(path)
    }


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_every_answer_of_vqa_and_gqa_is_what_its_words_say(folder: Path) -> None:
    by_number = {int(name.rpartition("_")[2]): p for name, p in _pictures(folder).items() if name.startswith("COCO")}
    checked = Counter[str]()
    for split in SPLITS:
        questions = _json(folder / "vqa" / f"{split}_questions.json")["questions"]
        annotations = _json(folder / "vqa" / f"{split}_annotations.json")["annotations"]
        assert [q["question_id"] for q in questions] == [a["question_id"] for a in annotations]
        for question, annotation in zip(questions, annotations, strict=True):
            right = literal.answer(question["question"], by_number[question["image_id"]])
            assert annotation["multiple_choice_answer"] == right, question
            said = [answer["answer"] for answer in annotation["answers"]]
            assert len(said) == 10
            assert said.count(right) >= 7
            assert question["question"].lower().startswith(annotation["question_type"])
            checked[annotation["answer_type"]] += 1
        for question in _json(folder / "gqa" / f"{split}_questions.json").values():
            right = literal.answer(question["question"], by_number[int(question["imageId"])])
            assert question["answer"] == right, question
            checked["gqa"] += 1
    assert min(checked[kind] for kind in ("yes/no", "number", "other", "gqa")) > 50


def test_entailed_questions_of_held_back_pictures_are_asked_and_follow(folder: Path) -> None:
    for split in ("validation", "test"):
        questions = _json(folder / "gqa" / f"{split}_questions.json")
        entailing = 0
        for key, question in questions.items():
            assert key in question["entailed"]
            entailing += len(question["entailed"]) > 1
            assert {questions[other]["imageId"] for other in question["entailed"]} == {question["imageId"]}
        assert entailing > 10
        assert {q["isBalanced"] for q in questions.values()} == {True, False}
    assert all(q["isBalanced"] for q in _json(folder / "gqa" / "train_questions.json").values())


def test_captions_are_true(folder: Path) -> None:
    pictures, checked = _pictures(folder), 0
    for split in SPLITS:
        for entry in _json(folder / "pretraining" / f"{split}.json"):
            for caption in entry["sentf"]["mscoco"]:
                assert literal.caption_holds(caption, pictures[entry["img_id"]]), (entry["img_id"], caption)
                checked += 1
            for sort, labels in entry["labelf"].items():
                asked = entry["sentf"][sort]
                assert [{literal.answer(q, pictures[entry["img_id"]]): 1.0} for q in asked] == labels
    assert checked == 5 * WORLD.pictures


def test_statements_about_two_pictures_are_balanced_and_as_true_as_labelled(folder: Path) -> None:
    pictures = _pictures(folder)
    for split in SPLITS:
        truths = defaultdict(list)
        for line in (folder / "nlvr2" / f"{split}.json").read_text().splitlines():
            row = json.loads(line)
            prefix, number, pair, zero = row["identifier"].split("-")
            left, right = (pictures[f"{prefix}-{number}-{pair}-img{side}"] for side in (0, 1))
            held = literal.statement_holds(row["sentence"], left, right)
            assert row["label"] == str(held), row
            truths[row["sentence"], f"{prefix}-{number}--{zero}"].append(held)
        assert all(sorted(held) == [False, False, True, True] for held in truths.values())


def test_yes_and_no_are_balanced(folder: Path) -> None:
    answers = Counter(
        annotation["multiple_choice_answer"]
        for split in SPLITS
        for annotation in _json(folder / "vqa" / f"{split}_annotations.json")["annotations"]
        if annotation["answer_type"] == "yes/no"
    )
    share = answers["yes"] / answers.total()
    assert abs(share - 0.5) < 4 * (0.25 / answers.total()) ** 0.5  # four standard errors
    assert set(answers) == {"yes", "no"}


def test_every_loader_reads_its_file_and_every_picture_is_in_the_store(folder: Path, store: RegionStore) -> None:
    table = load_table(folder / "answers.json")
    for split in SPLITS:
        files = {
            "pretraining": [folder / "pretraining" / f"{split}.json"],
            "captions": sorted(folder.glob(f"captions/*{'val' if split == 'validation' else split}*.json")),
            "vqa": [folder / "vqa" / f"{split}_{part}.json" for part in ("questions", "annotations")],
            "gqa": [folder / "gqa" / f"{split}_questions.json"],
            "nlvr2": [folder / "nlvr2" / f"{split}.json"],
        }
        for what, paths in files.items():
            examples = read_examples(paths)
            assert len(examples) >= len(WORLD.numbers[split]), what
            assert (store.rows([name for example in examples for name in example.pictures]) >= 0).all()
            for example in examples:
                assert len(example.pictures) == (2 if what == "nlvr2" else 1)
                assert (example.truth is not None) == (what == "nlvr2")
                assert set(example.answers or ()) <= set(table.answers)
                assert (example.answers is not None) == (what in ("vqa", "gqa") or "#vqa" in str(example.id)
                                                         or "#gqa" in str(example.id))  # fmt: skip


def test_perfect_predictions_pass_the_validators_and_score_one(folder: Path, tmp_path: Path) -> None:
    vqa = [folder / "vqa" / f"test_{part}.json" for part in ("questions", "annotations")]
    gqa = _json(folder / "gqa" / "test_questions.json")
    rows = [json.loads(line) for line in (folder / "nlvr2" / "test.json").read_text().splitlines()]
    dumps: dict[str, tuple[str, list[Path]]] = {
        "vqa.json": (
            json.dumps(
                [
                    {"question_id": a["question_id"], "answer": a["multiple_choice_answer"]}
                    for a in _json(vqa[1])["annotations"]
                ]
            ),
            vqa,
        ),
        "gqa.json": (
            json.dumps([{"questionId": key, "prediction": q["answer"]} for key, q in gqa.items()]),
            [folder / "gqa" / "test_questions.json"],
        ),
        "nlvr2.csv": (
            "".join(f"{row['identifier']},{row['label']}\n" for row in rows),
            [folder / "nlvr2" / "test.json"],
        ),
    }
    for name, (text, data) in dumps.items():
        (tmp_path / name).write_text(text)
        checked = check_predictions(tmp_path / name, data)
        assert checked.problems == []
        assert checked.questions > 0
        assert checked.scores
        scores = {**checked.scores, "distribution": 1 - checked.scores.get("distribution", 0.0)}
        assert all(score == 1.0 for score in scores.values()), (name, checked.scores)


def test_regions_lie_in_the_picture_and_tell_class_and_colour(folder: Path, store: RegionStore) -> None:
    assert (store.manifest.object_classes, store.manifest.attribute_classes) == (10, 6)
    rows = np.arange(len(store))
    regions = store.regions(rows)
    boxes = regions.boxes[regions.present]
    assert boxes.min() >= 0
    assert boxes.max() <= 1
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert regions.object_ids is not None
    assert regions.object_scores is not None
    scores = regions.object_scores[regions.present]
    assert ((scores > 0.5) & (scores <= 1)).all()
    features, kinds = regions.features[regions.present].astype(np.float32), regions.object_ids[regions.present]
    half = len(kinds) // 2
    centres = np.stack([features[:half][kinds[:half] == kind].mean(0) for kind in range(10)])
    nearest = ((features[half:, None] - centres) ** 2).sum(-1).argmin(1)
    assert (nearest == kinds[half:]).mean() > 0.8  # classes can be told by features; colours blur them


def test_a_picture_depends_on_seed_and_number_alone(folder: Path, tmp_path: Path) -> None:
    write_world(tmp_path / "again", WORLD)
    for path in sorted(folder.rglob("*.*")):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(folder)).read_bytes(), path.name
    write_world(tmp_path / "less", World(pictures=20, seed=3, feature_size=16))
    lines = (folder / "pictures" / "train.tsv").read_text().splitlines()
    fewer = (tmp_path / "less" / "pictures" / "train.tsv").read_text().splitlines()
    assert fewer == lines[: len(fewer)]
    assert draw_scene(3, 1) != draw_scene(4, 1)


def test_boxes_do_not_overlap_and_stay_within_the_picture() -> None:
    for number in range(300):
        scene = draw_scene(7, number)
        assert 3 <= len(scene) <= 8
        for thing in scene:
            left, top, right, bottom = thing.box
            assert 0 <= left < right <= WIDTH
            assert 0 <= top < bottom <= HEIGHT
            for other in scene:
                x1, y1, x2, y2 = other.box
                assert other is thing or right <= x1 or x2 <= left or bottom <= y1 or y2 <= top


def test_the_folder_says_that_it_is_synthetic_and_is_never_overwritten(folder: Path) -> None:
    assert (folder / "README.md").read_text().startswith("# Synthetic microworld")
    assert _json(folder / "microworld.json")["synthetic"] is True
    names = [(folder / f"{kind}.txt").read_text().split() for kind in ("objects", "attributes")]
    assert names == [list(CLASSES), list(COLOURS)]
    with pytest.raises(DataError, match="already exists and is not empty"):
        write_world(folder, WORLD)


@pytest.mark.parametrize("pictures", [3, 9, 10, 11, 25])
def test_splits_divide_the_pictures(pictures: int) -> None:
    numbers = World(pictures=pictures).numbers
    assert [number for split in SPLITS for number in numbers[split]] == list(range(1, pictures + 1))
    assert all(numbers.values())
