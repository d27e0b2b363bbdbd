"""A small file of each form that the readers know, as Python values."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

QUESTIONS = {
    "data_subtype": "val2014",
    "questions": [
        {"image_id": 42, "question": "What is it?", "question_id": 42000},
        {"image_id": 7, "question": "Is it red?", "question_id": 7001},
    ],
}


def annotation(question_id: int, image_id: int, answers: list[str], common: str, kind: str = "other") -> dict[str, Any]:
    """An annotation as VQA has it."""
    given = [{"answer": a, "answer_confidence": "yes", "answer_id": i} for i, a in enumerate(answers, 1)]
    return {
        **{"question_id": question_id, "image_id": image_id, "answers": given, "multiple_choice_answer": common},
        **{"answer_type": kind, "question_type": "what is"},
    }


ANNOTATIONS = {
    "annotations": [  # in another order than the questions
        annotation(7001, 7, ["yes"] * 7 + ["no"] * 2 + ["maybe"], "yes", "yes/no"),
        annotation(42000, 42, ["The Cat"] * 3 + ["cat"] * 4 + ["dog"] * 3, "The Cat"),
    ]
}
PRETRAINING = [
    {
        "img_id": "COCO_val2014_000000000042",
        "sentf": {"mscoco": ["A cat.", "A cat sits."], "vqa": ["What is it?"]},
        "labelf": {"vqa": [{"cat": 1.0, "dog": 0.3}]},
    },
    {"img_id": "2375429", "sentf": {"vg": ["a tree"]}},
]
LXMERT_VQA = [
    {
        **{"question_id": 42000, "img_id": "COCO_val2014_000000000042", "sent": "What is it?"},
        **{"answer_type": "other", "question_type": "what is", "label": {"cat": 1, "dog": 0.9}},
    },
    {"question_id": 7001, "img_id": "COCO_val2014_000000000007", "sent": "Is it red?"},
]
LXMERT_GQA = [{"question_id": "201", "img_id": "n16", "sent": "Is it red?", "label": {"no": 1.0}}]
LXMERT_NLVR2 = [
    {
        **{"identifier": "dev-850-0-0", "img0": "dev-850-0-img0", "img1": "dev-850-0-img1", "label": 0},
        **{"sent": "Two cats.", "uid": "valid_0"},
    }
]


def gqa_question(answer: str, *, balanced: bool = True, entailed: tuple[str, ...] = ()) -> dict[str, Any]:
    """A question as GQA's official files have it."""
    return {
        **{"imageId": "n16", "question": "Is it red?", "answer": answer, "isBalanced": balanced},
        **{"entailed": list(entailed), "types": {"structural": "verify", "semantic": "attr", "detailed": "x"}},
        **{"groups": {"global": None}, "semantic": [{"operation": "select", "argument": "cat", "dependencies": []}]},
        **{"fullAnswer": "No, it is not.", "equivalent": [], "annotations": {}},
    }


GQA = {"201": gqa_question("no", entailed=("202", "201")), "202": gqa_question("yes", balanced=False)}
NLVR2 = [
    {"identifier": "dev-850-0-0", "sentence": "Two cats.", "label": "False", "left_url": "x", "right_url": "y"},
    {"identifier": "dev-850-1-0", "sentence": "Two cats.", "label": "True", "left_url": "x", "right_url": "y"},
]
COCO = {
    "images": [{"id": 42, "file_name": "COCO_val2014_000000000042.jpg"}],
    "annotations": [{"image_id": 42, "id": 5, "caption": "A cat."}],
}
COCO_RESULTS = [{"image_id": 42, "caption": "A cat."}]
FLICKR = "12_ab.jpg#0\tA cat .\n12_ab.jpg#1\tA cat sits .\n"


def write(path: Path, value: Any, *, lines: bool = False) -> Path:
    """Write a value as JSON, JSON lines or, where it is text, as it is; packed where the name says so."""
    text = value if isinstance(value, str) else json.dumps(value)
    if lines:
        text = "".join(json.dumps(row) + "\n" for row in value)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
    return path
