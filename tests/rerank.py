"""Small queries with candidates, and the losses of rerankers as literal formulas, shared by tests of rerankers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.finetune import sentence


def ragged_rows(count: int, negatives: int, seed: int = 0) -> list[dict[str, Any]]:
    """Queries with 1 to ``negatives`` scored negatives; the first has all of them, the second one."""
    generator = random.Random(seed)
    found = []
    for number in range(count):
        query = f"{sentence(generator, 4)} {number}"
        size = (negatives, 1)[number] if number < 2 else generator.randint(1, negatives)
        texts = [f"{sentence(generator, 40)} {number} {i}" for i in range(size)]
        found.append({
            "query": query, "pos": [f"{query} {sentence(generator)}"], "neg": texts, "pos_scores": [5.0],
            "neg_scores": [generator.uniform(-4, 4) for _ in texts],
        })  # fmt: skip
    return found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of FlagEmbedding's form."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def literal_loss(kind: str, s: Tensor, t: Tensor, positive: list[bool], tau: float) -> Tensor:
    """The equation of a loss for the candidates of one query, candidate by candidate."""
    every = range(len(s))
    p, n = [i for i in every if positive[i]], [i for i in every if not positive[i]]
    total = s.new_zeros(())
    if kind == "infonce":
        for i in p:
            total = total - torch.log(
                (s[i] / tau).exp() / ((s[i] / tau).exp() + sum((s[j] / tau).exp() for j in n))
            ) / len(p)  # fmt: skip
    elif kind == "bce":
        for i in every:
            total = total + torch.log1p((-s[i] if positive[i] else s[i]).exp()) / len(s)
    elif kind == "mse":
        for i in every:
            total = total + (s[i] - t[i]) ** 2 / len(s)
    elif kind == "margin_mse":
        for i in p:
            for j in n:
                total = total + ((s[i] - s[j]) - (t[i] - t[j])) ** 2 / (len(p) * len(n))
    else:
        ours, theirs = ([(x / tau).exp() / sum((y / tau).exp() for y in values) for x in values] for values in (s, t))
        for a, b in zip(theirs, ours, strict=True):
            total = total + a * torch.log(a / b)
    return total
