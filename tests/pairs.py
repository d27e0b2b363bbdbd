"""A small job of pairs on generated text, shared by tests that need the whole task."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.base.overlap import text_hash
from capt.pretrain.retrieval.store import VectorIdentity, VectorStore
from tests.finetune import sentence, write_encoder


def write_pairs(path: Path, count: int = 60, *, positives: int = 1, negatives: int = 0, seed: int = 0) -> Path:
    """Queries, and documents of the same words in another order; rows have up to ``negatives`` other sentences."""
    generator = random.Random(seed)
    lines = []
    for number in range(count):
        query = f"{sentence(generator, 8)} {number}"
        words = query.split()
        row = {
            "query": query,
            "pos": [" ".join([*generator.sample(words, len(words)), "x" * i]).strip() for i in range(positives)],
            "neg": [
                f"{sentence(generator, 12)} {number}" for _ in range(generator.randint(min(1, negatives), negatives))
            ],
        }
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


def pairs_mapping(folder: Path, **changes: Any) -> dict[str, Any]:
    """A job mapping with everything small; ``changes`` are merged section by section."""
    if not (folder / "encoder").exists():
        write_encoder(folder / "encoder")
    if not (folder / "pairs.jsonl").exists():
        write_pairs(folder / "pairs.jsonl")
    mapping: dict[str, Any] = {
        "task": {"type": "capt_pairs"},
        "run": {"dir": str(folder / "run"), "log_every": 1, "tensorboard": False, "threads": 1},
        "data": {
            "files": [str(folder / "pairs.jsonl")],
            "validation_fraction": 0.15,
            "sequence_length": 24,
            "cache": str(folder / "cache"),
        },
        "model": {"init": str(folder / "encoder"), "dropout": 0.0, "attention_dropout": 0.0},
        "batch": {"global": 8, "micro": 2},
        "schedule": {"max_steps": 6},
        "optimizer": {"lr": 3e-3},
        "validate": {"every": 0, "samples": 9},
        "checkpoint": {"every": 3},
        "loader": {"workers": 0},
    }
    for key, value in changes.items():
        mapping[key] = {**mapping.get(key, {}), **value} if isinstance(value, dict) else value
    return mapping


def two_sources(folder: Path) -> dict[str, Any]:
    """The section ``data`` of a job with two sources, one of them with several positives and hard negatives."""
    first = write_pairs(folder / "first.jsonl", 40)
    second = write_pairs(folder / "second.jsonl", 30, positives=3, negatives=3, seed=1)
    prompts = {"query": "the ", "document": "a house "}
    return {
        "files": [],
        "sources": [
            {"name": "first", "files": [str(first)], "weight": 2.0, "prompts": prompts},
            {"name": "second", "files": [str(second)], "negatives": 2, "query_length": 16, "temperature": 0.1},
        ],
    }


def every_text(*files: Path) -> list[str]:
    """All texts of files of pairs, or of texts alone, each once."""
    found: dict[str, None] = {}
    for path in files:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            texts = [row["text"]] if "text" in row else [row["query"], *row["pos"], *row["neg"]]
            found.update(dict.fromkeys(texts))
    return list(found)


def write_vectors(
    store: Path, texts: Sequence[str], width: int, *, prompt: str = "", seed: int = 0, model: str = "a teacher"
) -> VectorStore:
    """A store with random vectors of texts."""
    vectors = VectorStore(store, VectorIdentity(model, "a tokenizer", prompt, 24, "mean", width))
    rows = np.random.default_rng(seed).standard_normal((len(texts), width)).astype(np.float32)
    vectors.add([text_hash(text) for text in texts], rows)
    vectors.close()
    return vectors


def taught_by(store: Path, losses: dict[str, Any]) -> dict[str, Any]:
    """Changes that make a job of pairs one with a teacher's vectors."""
    return {"distillation": {"vectors": str(store), **losses}}


def every_form(folder: Path, *, mixed: bool) -> dict[str, Any]:
    """Changes that make a job of all kinds of sources and losses: scores, one column, a teacher, prompts of rows."""
    generator = random.Random(4)
    texts = [f"{sentence(generator, 8)} {number}" for number in range(120)]
    scored = [
        {"sentence1": text, "sentence2": " ".join(generator.sample(text.split(), len(text.split()))), "score": i % 6}
        for i, text in enumerate(texts[:40])
    ]
    taught = [
        {"query": text, "pos": [f"{text} x"], "neg": [sentence(generator, 9) for _ in range(3)], "pos_scores": [1.5],
         "neg_scores": [generator.random() for _ in range(3)], "prompt": ("the house ", "a ")[i % 2]}
        for i, text in enumerate(texts[40:80])
    ]  # fmt: skip
    rows = {"scored": scored, "alone": [{"text": text} for text in texts[80:]], "taught": taught}
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, each)) + "\n")
    files = {name: {"name": name, "files": [str(folder / f"{name}.jsonl")]} for name in rows}
    sources = [
        {**files["scored"], "temperature": 0.1},
        {**files["alone"], "view": "corrupted"},
        {**files["taught"], "negatives": 2, "temperature": 0.07, "weight": 2.0, "query_length": 16},
    ]
    return {
        "data": {"files": [], "batches": "mixed" if mixed else "single", "sources": sources},
        "mlm": {"weight": 0.1},
        "distillation": {"weight": 0.5, "temperature": 2.0},
        "contrast": {"matryoshka": [32, 8], "queue": 24, "precisions": ["float", "int8", "binary"]},
    }
