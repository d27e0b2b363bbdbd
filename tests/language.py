"""A small language job on generated English-like text, shared by tests that need the whole task."""

from __future__ import annotations

import itertools
import random
import types
from pathlib import Path
from typing import Any
from unittest import mock

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


def random_steps(name: str, overrides: list[str], steps: int) -> list[dict[str, float]]:
    """Train a shipped job on random tokens of RoBERTa's vocabulary, without text, tokenizer, network or checkpoints.

    Windows are full, as nearly all of a text are, and every step has the same ones. Returns what each logged step says
    of its speed.
    """
    import torch

    from capt.pretrain.base import distributed
    from capt.pretrain.config.load import load_job
    from capt.pretrain.engine.callbacks.performance import Throughput
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.engine.loop import Callback, Run, train
    from capt.pretrain.engine.task import Progress, StepMetrics
    from capt.pretrain.language.batches import LanguageBatch
    from capt.pretrain.language.task import LanguageTask

    job: Any = load_job(name, [*overrides, f"schedule.max_steps={steps}", "schedule.warmup_steps=0"])
    world, length, vocabulary = distributed.world_size(), job.data.sequence_length, 50_265
    slots = round(0.15 * (length - 2))
    data = types.SimpleNamespace(
        job=job, model_config=job.model.for_tokenizer(vocabulary, 1), source=None,
        corruptor=types.SimpleNamespace(slots=slots), train=range(10**6),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(distributed.rank())

    def batch(first: int, n: int) -> LanguageBatch:
        tokens = torch.randint(5, vocabulary, (n, length), generator=generator)
        tokens[:, 0], tokens[:, -1] = 0, 2
        positions = (1 + torch.rand(n, length - 2, generator=generator).argsort(1)[:, :slots]).sort(1)[0]
        labels, ids = tokens.gather(1, positions), torch.arange(first, first + n)
        return LanguageBatch(tokens, tokens.scatter(1, positions, 4), positions, labels, ids, padded=False)

    class Reports(Callback):
        rows: list[dict[str, float]] = []  # noqa: RUF012

        def after_step(self, run: Run, report: StepMetrics) -> None:
            if "seconds_per_step" in report:
                self.rows.append({key: float(value) for key, value in report.items()})

    with mock.patch("capt.pretrain.language.task.prepare", return_value=data):
        task = LanguageTask(job, job.run.dir)
    engines = build_engines(task.build_modules(), job, task.optimizers())
    parts, share = job.accumulation(world), job.batch.global_ // world
    step = [batch(part * share // parts, share // parts) for part in range(parts)]
    with mock.patch.object(task, "build_batches", return_value=itertools.repeat(step)):
        train(Run(job, job.run.dir, task, engines, Progress()), [Throughput(), reports := Reports()])
    return reports.rows
