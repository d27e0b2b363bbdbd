"""One split of pictures: their regions, captions, and questions in the formats of LXMERT, COCO, VQA v2 and GQA."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from pretrain.vision_language.microworld.draws import random_for
from pretrain.vision_language.microworld.features import picture
from pretrain.vision_language.microworld.questions import ANSWERS, Form, Question, ask, kind_of
from pretrain.vision_language.microworld.scenes import draw_scene
from pretrain.vision_language.microworld.sentences import captions
from pretrain.vision_language.microworld.tables import JsonWriter, json_list, json_object
from pretrain.vision_language.microworld.tsv import tsv_row

QUESTIONS = 6
"""Number of questions of each sort (VQA, GQA) about a picture."""
NAMES = {"train": "train2014", "validation": "val2014", "test": "test2015"}
"""Splits, and COCO's names of theirs, which are part of the names of pictures."""
INFO = {"description": "Synthetic microworld: no picture exists, every answer is computed.", "version": "1.0"}
_ANNOTATORS, _DISAGREE, _MOST_DISAGREE = 10, 0.04, 3  # so that the right answer always scores 1.0


class Recipe(NamedTuple):
    """What decides the content of a world, its size apart."""

    seed: int
    feature_size: int
    noise: float


def picture_name(split: str, number: int) -> str:
    """The name of picture ``number``, as in COCO."""
    return f"COCO_{NAMES[split]}_{number:012d}"


def write_pictures(out: Path, split: str, numbers: range, recipe: Recipe) -> Iterator[int]:
    """Write everything about the pictures ``numbers`` of a split, one picture after another; yields their numbers."""
    info = {"info": INFO, "data_type": "mscoco", "data_subtype": NAMES[split]}
    with ExitStack() as stack:
        tsv = stack.enter_context((out / "pictures" / f"{split}.tsv").open("w", encoding="utf-8"))
        pretraining = stack.enter_context(json_list(out / "pretraining" / f"{split}.json"))
        described = stack.enter_context(
            json_list(out / "captions" / f"captions_{NAMES[split]}.json", {"info": INFO}, "annotations")
        )
        vqa = out / "vqa"
        asked = stack.enter_context(json_list(vqa / f"{split}_questions.json", info, "questions"))
        answered = stack.enter_context(json_list(vqa / f"{split}_annotations.json", info, "annotations"))
        gqa = stack.enter_context(json_object(out / "gqa" / f"{split}_questions.json"))
        for number in numbers:
            scene, name = draw_scene(recipe.seed, number), picture_name(split, number)
            rng = random_for("sentences", recipe.seed, number)
            tsv.write(tsv_row(picture(name, scene, recipe.seed, number, recipe.feature_size, recipe.noise)))
            sentences, questions = captions(scene, rng), ask(scene, rng, QUESTIONS)
            others = [question for question in ask(scene, rng, QUESTIONS + 1) if question.form != "count"]
            pretraining.add(_pretraining(name, sentences, questions, others))
            for k, sentence in enumerate(sentences):
                described.add({"image_id": number, "id": number * 10 + k, "caption": sentence})
            for k, question in enumerate(questions):
                identity = {"image_id": number, "question_id": number * 1000 + k}
                asked.add({**identity, "question": question.text})
                answered.add({**identity, **_annotation(question, rng)})
            _write_gqa(gqa, number, others, everything=split != "train")
            yield number


def write_answers(path: Path) -> None:
    """The table of all answers, in the form of LXMERT's ``all_ans.json``."""
    path.write_text(json.dumps([{"ans": answer, "dsets": ["vqa", "gqa"]} for answer in sorted(ANSWERS)], indent=1))


def _pretraining(name: str, sentences: list[str], vqa: list[Question], gqa: list[Question]) -> dict[str, Any]:
    """An entry of LXMERT's pretraining file."""
    asked = {"vqa": vqa, "gqa": gqa}
    texts = {key: [question.text for question in questions] for key, questions in asked.items()}
    labels = {key: [{question.answer: 1.0} for question in questions] for key, questions in asked.items()}
    return {"img_id": name, "sentf": {"mscoco": sentences, **texts}, "labelf": labels}


def _annotation(question: Question, rng: Random) -> dict[str, Any]:
    """Ten annotators, of whom at most three say something else of the same kind."""
    alike = [answer for answer in ANSWERS if kind_of(answer) == question.kind and answer != question.answer]
    wrong = [i for i in rng.sample(range(_ANNOTATORS), _ANNOTATORS) if rng.random() < _DISAGREE][:_MOST_DISAGREE]
    answers = [
        {
            "answer": rng.choice(alike) if i in wrong else question.answer,
            "answer_confidence": "maybe" if i in wrong else "yes",
            "answer_id": i + 1,
        }
        for i in range(_ANNOTATORS)
    ]
    return {
        "question_type": question.type,
        "answer_type": question.kind,
        "multiple_choice_answer": question.answer,
        "answers": answers,
    }


_GQA_TYPES: dict[Form, tuple[str, str, str]] = {
    "colour": ("query", "attr", "color"),
    "colour is": ("verify", "attr", "verifyAttr"),
    "count": ("query", "global", "count"),
    "exist": ("verify", "obj", "existAttr"),
    "name": ("query", "obj", "categoryThat"),
    "outermost": ("query", "rel", "place"),
    "beside": ("query", "rel", "relO"),
    "side": ("verify", "rel", "relVerify"),
    "both": ("logical", "obj", "existAnd"),
    "more": ("compare", "obj", "more"),
}


def _write_gqa(gqa: JsonWriter, number: int, questions: list[Question], everything: bool) -> None:
    """Questions of a picture, which are the balanced ones; with ``everything`` also those that they entail."""
    found = {question.text: question for question in questions}
    for question in questions:
        found |= {other.text: other for other in _closure(question) if other.text not in found}
    ids = {text: f"{number}{k:03d}" for k, text in enumerate(found)}
    balanced = {question.text for question in questions}
    for text, question in found.items():
        if text in balanced or everything:
            entailed = [ids[text], *(ids[other.text] for other in _closure(question))]
            gqa.add(_gqa(question, number, entailed, text in balanced), key=ids[text])


def _closure(question: Question) -> Iterator[Question]:
    for entailed in question.entailed:
        yield entailed
        yield from _closure(entailed)


def _gqa(question: Question, number: int, entailed: list[str], balanced: bool) -> dict[str, Any]:
    structural, semantic, detailed = _GQA_TYPES[question.form]
    return {
        "imageId": str(number),
        "question": question.text,
        "answer": question.answer,
        "fullAnswer": question.answer,
        "isBalanced": balanced,
        "types": {"structural": structural, "semantic": semantic, "detailed": detailed},
        "groups": {"global": question.form, "local": f"{number}-{question.form}"},
        "entailed": list(dict.fromkeys(entailed)),
        "equivalent": [entailed[0]],
        "semantic": [],
        "semanticStr": "",
        "annotations": {"question": {}, "answer": {}, "fullAnswer": {}},
    }
