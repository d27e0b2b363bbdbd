"""A small vision-language job on a generated store and sentences, shared by tests that need the whole task."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.regions.picture import Labels, Picture
from capt.pretrain.regions.writer import write_store

CLASSES = ("cat", "dog", "tree", "car", "ball", "house", "boat")
COLOURS = ("red", "green", "blue", "white")
FEATURES = 11
_FRAMES = ("there is a {} {} here", "a {} {}", "we see one {} {} and more", "the picture shows a {} {} far away")


def make_pictures(count: int, *, labels: bool = True, seed: int = 0, most: int = 6) -> Iterator[Picture]:
    """Pictures of 2 to ``most`` regions, each with a class and a colour that its features tell with some noise."""
    for number in range(count):
        generator = np.random.default_rng([seed, number])
        regions = int(generator.integers(2, most + 1))
        classes = generator.integers(0, len(CLASSES), regions)
        colours = generator.integers(0, len(COLOURS), regions)
        features = generator.normal(0, 0.3, (regions, FEATURES)).astype(np.float32)
        features[np.arange(regions), classes] += 1
        features[np.arange(regions), len(CLASSES) + colours] += 1
        corners = np.sort(generator.integers(0, 100, (regions, 2, 2)), axis=1) + np.array([[[0], [1]]])
        boxes = np.stack([corners[:, 0, 0], corners[:, 0, 1], corners[:, 1, 0], corners[:, 1, 1]], axis=1)
        scores = generator.uniform(0.3, 1, (2, regions)).astype(np.float32)
        yield Picture(
            f"picture{number}", 101, 101, features, boxes.astype(np.float32),
            Labels(classes.astype(np.int64), scores[0]) if labels else None,
            Labels(colours.astype(np.int64), scores[1]) if labels else None,
        )  # fmt: skip


def write_small_store(folder: Path, count: int = 40, *, labels: bool = True, seed: int = 0) -> Path:
    """A region store of `make_pictures`, in fp32."""
    pictures = make_pictures(count, labels=labels, seed=seed)
    write_store(folder, pictures, feature_dtype="fp32", features_of={"backend": "test", "seed": seed})
    return folder


def write_sentences(path: Path, first: int = 0, count: int = 40, seed: int = 0) -> Path:
    """LXMERT's pretraining JSON about the pictures of `make_pictures`: captions, and questions with soft answers."""
    rows = []
    for number, picture in enumerate(make_pictures(first + count, seed=seed)):
        if number < first:
            continue
        assert picture.objects is not None
        assert picture.attributes is not None
        generator = random.Random(f"{seed}/{number}")
        things = [
            (COLOURS[a], CLASSES[o]) for o, a in zip(picture.objects.ids, picture.attributes.ids, strict=True)
        ]  # fmt: skip
        captions = [generator.choice(_FRAMES).format(*things[i % len(things)]) for i in range(2)]
        colour, thing = things[0]
        answers = [{colour: 1.0, generator.choice(COLOURS): 0.3}, {}]
        questions = [f"what colour is the {thing}", "what is behind the picture"]
        rows.append({"img_id": picture.id, "sentf": {"mscoco": captions, "vqa": questions}, "labelf": {"vqa": answers}})
    path.write_text(json.dumps(rows))
    return path


def vision_language_mapping(folder: Path, **changes: Any) -> dict[str, Any]:
    """A job mapping with everything small; ``changes`` are merged section by section."""
    store, train, held_out = folder / "store", folder / "train.json", folder / "validation.json"
    if not held_out.exists():
        write_small_store(store)
        write_sentences(train, 0, 30)
        write_sentences(held_out, 30, 10)
    mapping: dict[str, Any] = {
        "task": {"type": "capt_vl"},
        "run": {"dir": str(folder / "run"), "log_every": 1, "tensorboard": False, "threads": 1},
        "data": {
            "regions": str(store), "train": [str(train)], "validation": [str(held_out)], "sequence_length": 12,
            "cache": str(folder / "cache"), "minimum_answers": 1,
        },
        "objectives": {"answers": 1.0},
        "tokenizer": {"vocab_size": 380, "type": "bpe"},
        "model": {"size": "custom", "language_layers": 1, "vision_layers": 1, "cross_layers": 2, "hidden": 32,
                  "heads": 2, "ffn": 48, "max_positions": 16, "dropout": 0.0, "attention_dropout": 0.0},
        "batch": {"global": 8, "micro": 2},
        "schedule": {"max_steps": 6, "warmup_steps": 2},
        "optimizer": {"lr": 3e-3},
        "engine": {"zero_stage": 1, "precision": "fp32"},
        "contrast": {"queue": 41},
        "validate": {"every": 0, "samples": 9},
        "checkpoint": {"every": 3},
        "loader": {"workers": 0},
    }  # fmt: skip
    if changes.get("model", {}).get("size"):
        mapping["model"] = {}  # a preset brings its own layers
    for key, value in changes.items():
        mapping[key] = {**mapping.get(key, {}), **value} if isinstance(value, dict) else value
    return mapping
