"""A small language job on generated English-like text, shared by tests that need the whole task."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

_TEXT = """
the a this that of in on under over river stone house old new small green door opens closes near far child
reads writes book letter light dark night morning walks runs slowly quickly with without and or but because
while water fire wind sings sleeps bird tree road leads home away city village market bread milk king queen
"""
_WORDS = _TEXT.split()


def write_corpus(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """Sentences from a fixed vocabulary; a blank line between documents."""
    generator = random.Random(seed)
    texts = []
    for _ in range(documents):
        lines = [
            " ".join(generator.choices(_WORDS, k=generator.randint(6, 14))).capitalize() + "."
            for _ in range(generator.randint(3, 9))
        ]
        texts.append("\n".join(lines))
    path.write_text("\n\n".join(texts) + "\n")
    return path


def language_mapping(folder: Path, **changes: Any) -> dict[str, Any]:
    """A job mapping with everything small; ``changes`` are merged section by section."""
    text = folder / "text.txt"
    if not text.exists():
        write_corpus(text)
    mapping: dict[str, Any] = {
        "task": {"type": "capt_language"},
        "run": {"dir": str(folder / "run"), "log_every": 1, "tensorboard": False, "threads": 1},
        "data": {
            "files": [str(text)], "sequence_length": 32, "workers": 1, "cache": str(folder / "cache"),
            "validation_fraction": 0.1,
        },
        "tokenizer": {"vocab_size": 420, "type": "bpe"},
        "model": {"size": "custom", "layers": 2, "hidden": 32, "heads": 2, "ffn": 48, "max_positions": 32,
                  "dropout": 0.0, "attention_dropout": 0.0},
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
