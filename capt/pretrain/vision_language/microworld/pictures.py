"""A split of pictures: their regions, captions, and questions in the formats of LXMERT, COCO, VQA v2 and GQA."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from capt.pretrain.base.randomness import generator_for
from capt.pretrain.regions.picture import Labels, Picture
from capt.pretrain.vision_language.microworld.questions import ANSWERS, Form, Question, ask, kind_of
from capt.pretrain.vision_language.microworld.scenes import (
    CLASSES,
    COLOURS,
    HEIGHT,
    WIDTH,
    Scene,
    captions,
    draw_scene,
    random_for,
)

# JSON files that are written entry by entry, so that a world of any size needs no memory.


class JsonWriter:
    """Writes the entries of one JSON list or object."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._empty = True

    def add(self, entry: Any, key: str | None = None) -> None:
        """Append an entry, in an object under ``key``."""
        self._file.write("\n" if self._empty else ",\n")
        self._file.write(json.dumps(entry) if key is None else f"{json.dumps(key)}: {json.dumps(entry)}")
        self._empty = False


@contextmanager
def json_list(path: Path, within: dict[str, Any] | None = None, key: str = "") -> Iterator[JsonWriter]:
    """Write a list to ``path``: alone, or as the last entry ``key`` of the object ``within``."""
    start, end = ("[", "\n]\n") if within is None else (f"{_open(within)}{json.dumps(key)}: [", "\n]}\n")
    with path.open("w", encoding="utf-8") as file:
        file.write(start)
        yield JsonWriter(file)
        file.write(end)


@contextmanager
def json_object(path: Path) -> Iterator[JsonWriter]:
    """Write an object to ``path``."""
    with path.open("w", encoding="utf-8") as file:
        file.write("{")
        yield JsonWriter(file)
        file.write("\n}\n")


def _open(within: dict[str, Any]) -> str:
    """An object without its closing brace, ready for one more entry."""
    text = json.dumps(within)[:-1]
    return f"{text}, " if within else text


# A picture as a line of LXMERT's feature files.


def tsv_row(picture: Picture) -> str:
    """The ten fields of a picture with labels, with the end of the line.

    ``img_id, img_h, img_w, objects_id, objects_conf, attrs_id, attrs_conf, num_boxes, boxes, features``; arrays are
    base64 of little-endian int64 (classes) and float32.
    """
    assert picture.objects is not None
    assert picture.attributes is not None
    arrays = [
        (picture.objects.ids, "<i8"),
        (picture.objects.scores, "<f4"),
        (picture.attributes.ids, "<i8"),
        (picture.attributes.scores, "<f4"),
    ]
    labels = [_encoded(values, kind) for values, kind in arrays]
    fields = [picture.id, str(picture.height), str(picture.width), *labels, str(len(picture.boxes))]
    return "\t".join([*fields, _encoded(picture.boxes, "<f4"), _encoded(picture.features, "<f4")]) + "\n"


def _encoded(values: np.ndarray, kind: str) -> str:
    return b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode("ascii")


# What a detector would have made of a scene: features that depend on class, colour and size, and are noisy.


Vectors = Float32[np.ndarray, "_ size"]


def picture(name: str, scene: Scene, seed: int, number: int, size: int, noise: float, stream: str = "scene") -> Picture:
    """The regions of a scene, the surest first.

    The features of a thing are ``a_class + b_colour + c_size + s e`` with fixed vectors a, b, c and ``e`` from N(0, I).
    Its noise level ``s`` is ``noise`` times a factor between 0.5 and 1.5, and the detector's confidence falls with it:
    ``1 / (1 + s^2)``. The vectors depend on ``size`` alone, so that worlds of different seeds look alike.

    Args:
        name: of the picture.
        scene: what it shows.
        seed: of the world.
        number: of the scene in its stream; the noise depends on seed, stream and number alone.
        size: of the features.
        noise: 0 gives every thing of a class, colour and size the same features.
        stream: what the scene was drawn from.
    """
    rng = generator_for(f"microworld/{stream}/features", seed, 0, number)
    levels = (noise * rng.uniform(0.5, 1.5, len(scene))).astype(np.float32)
    order = np.argsort(levels, kind="stable")
    things, levels = [scene[i] for i in order], levels[order]
    kinds, colours, sizes = (np.array(column, dtype=np.int64) for column in list(zip(*things, strict=True))[:3])
    of_kind, of_colour, of_size = _vectors(size)
    spread = levels[:, None] * rng.standard_normal((len(things), size), dtype=np.float32)
    features = of_kind[kinds] + of_colour[colours] + of_size[sizes] + spread
    boxes = np.array([thing.box for thing in things], dtype=np.float32)
    return Picture(name, WIDTH, HEIGHT, features, boxes, _labels(kinds, levels), _labels(colours, levels))


def _labels(ids: Int64[np.ndarray, " n"], levels: Float32[np.ndarray, " n"]) -> Labels:
    return Labels(ids, (1 / (1 + levels**2)).astype(np.float32))


@lru_cache(maxsize=8)
def _vectors(size: int) -> tuple[Vectors, Vectors, Vectors]:
    rng = generator_for("microworld/vectors", 0, 0, size)
    kinds, colours, sizes = (rng.standard_normal((n, size), dtype=np.float32) for n in (len(CLASSES), len(COLOURS), 2))
    return kinds, colours, sizes


QUESTIONS = 6
"""Number of questions of each sort (VQA, GQA) about a picture."""
NAMES = {"train": "train2014", "validation": "val2014", "test": "test2015"}
"""Splits, and COCO's names of theirs, which are part of the names of pictures."""
INFO = {"description": "Synthetic microworld: no picture exists, every answer is computed.", "version": "1.0"}
_ANNOTATORS, _DISAGREE, _MOST_DISAGREE = 10, 0.04, 3  # so that the right answer always scores 1.0


class Recipe(NamedTuple):
    """The settings that decide the content of a world, its size apart."""

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
            # All files of a picture draw from one generator, so their order in this loop is part of the data.
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
