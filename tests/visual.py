"""Small files of VQA, GQA and NLVR2 with their region stores, shared by tests of fine-tuning on pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.vision_language import CLASSES, COLOURS, make_pictures, write_small_store

ENCODER = {
    "size": "custom", "language_layers": 1, "vision_layers": 1, "cross_layers": 2, "hidden": 32, "heads": 2,
    "ffn": 48, "max_positions": 24, "initializer_range": 0.1,
}  # fmt: skip


def things_of(count: int) -> list[list[tuple[str, str]]]:
    """Colour and class of each region of the pictures of a small store."""
    found = []
    for picture in make_pictures(count):
        assert picture.objects is not None
        assert picture.attributes is not None
        pairs = zip(picture.attributes.ids, picture.objects.ids, strict=True)
        found.append([(COLOURS[colour], CLASSES[thing]) for colour, thing in pairs])
    return found


def write_questions(path: Path, first: int, count: int, *, gqa: bool = False) -> Path:
    """LXMERT's JSON: what colour a thing has (scores 1.0, and 0.3 for another colour), three questions a picture."""
    rows = []
    for number, things in list(enumerate(things_of(first + count)))[first:]:
        for k in range(3):
            colour, thing = things[k % len(things)]
            other = COLOURS[(number + k) % len(COLOURS)]
            label = {colour: 1.0} if gqa else {other: 0.3, colour: 1.0}
            key: Any = number * 10 + k
            rows.append({"question_id": str(key) if gqa else key, "img_id": f"picture{number}",
                         "sent": f"what colour is the {thing}", "label": label})  # fmt: skip
    path.write_text(json.dumps(rows))
    return path


def write_pairs(path: Path, first: int, count: int, *, labels: bool = True) -> Path:
    """Write LXMERT's JSON of NLVR2: whether a thing is in the left picture."""
    rows, all_things = [], things_of(first + count + 1)
    for number in range(first, first + count):
        for k in range(2):
            thing = CLASSES[(number + 3 * k) % len(CLASSES)]
            label = int(any(thing == name for _, name in all_things[number]))
            row = {
                "identifier": f"dev-{number}-{k}-0",
                "sent": f"a {thing} is in the left picture",
                "uid": f"u{number}{k}",
            }
            row |= {"img0": f"picture{number}", "img1": f"picture{number + 1}"}
            rows.append({**row, "label": label} if labels else row)
    path.write_text(json.dumps(rows))
    return path


def write_words(folder: Path) -> Path:
    """A tokenizer of BERT's kind that knows the words of all these files."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CLASSES, *COLOURS]
    words += ["what", "colour", "is", "the", "a", "in", "left", "picture"]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(words)) + "\n")
    return folder


def visual_mapping(folder: Path, task: str = "vqa", **changes: Any) -> dict[str, Any]:
    """A job mapping with everything small; files and store are written at the first call in ``folder``."""
    home = folder / task
    train, held_out = home / "train.json", home / "validation.json"
    store = folder / "pictures"
    if not home.exists():
        home.mkdir(parents=True)
        if not store.exists():
            write_small_store(store, 30)
        for path, first, count in ((train, 0, 20), (held_out, 20, 8)):
            if task == "nlvr2":
                write_pairs(path, first, count)
            else:
                write_questions(path, first, count, gqa=task == "gqa")
    mapping: dict[str, Any] = {
        "task": {"type": "visual"},
        "run": {"dir": str(folder / f"run-{task}"), "log_every": 1, "tensorboard": False, "threads": 1},
        "data": {
            "task": task, "regions": str(store), "train": [str(train)], "validation": [str(held_out)],
            "cache": str(folder / "cache"), "minimum_answers": 1,
        },
        "tokenizer": {"path": str(write_words(folder / "words"))},
        "model": {"init": "scratch", "encoder": ENCODER, "dropout": 0.0, "attention_dropout": 0.0},
        "batch": {"global": 8, "micro": 4},
        "schedule": {"epochs": 2},
        "optimizer": {"lr": 3e-3},
        "engine": {"zero_stage": 0},
        "checkpoint": {"best": "accuracy"},
    }  # fmt: skip
    for key, value in changes.items():
        mapping[key] = {**mapping.get(key, {}), **value} if isinstance(value, dict) else value
    return mapping
