"""Two pictures and soft targets ``[n, answers]``: what the shared fine-tuning needs of a task, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capt.finetune.batches import Batch
from capt.finetune.predictions import write_checked
from capt.finetune.task import FineTuningTask, Identity
from tests.toy_finetune.config import ToyJob


class Inputs(NamedTuple):
    pictures: tuple[Tensor, Tensor]
    scale: float


class Rows:
    def __init__(self, count: int, seed: int) -> None:
        draws = np.random.default_rng(seed)
        self.pictures = draws.normal(size=(2, count, 5)).astype(np.float32)
        difference = self.pictures[0] - self.pictures[1]
        self.targets = (difference[:, :3] > 0).astype(np.float32) * np.float32([1.0, 0.6, 0.3])
        self.lengths = draws.integers(3, 9, size=count)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, numbers: np.ndarray) -> Batch[Inputs]:
        left, right = (torch.from_numpy(side[numbers]) for side in self.pictures)
        return Batch(Inputs((left, right), 2.0), {"soft": torch.from_numpy(self.targets[numbers])})


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, pictures: tuple[Tensor, Tensor], scale: float) -> Tensor:
        return self.out(scale * (pictures[0] - pictures[1]))


class SoftTargets:
    metric = "accuracy"

    def loss(self, outputs: Tensor, labels: Mapping[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, labels["soft"])

    def row_results(self, outputs: Tensor, batch: Batch[Inputs]) -> dict[str, Tensor]:
        return {"answer": outputs.argmax(1), "probability": outputs.sigmoid().amax(1)}

    def metrics(self, results: Mapping[str, np.ndarray], rows: Rows) -> dict[str, float]:
        return {"accuracy": float(rows.targets[np.arange(len(rows)), results["answer"]].mean())}


class ToyTask(FineTuningTask):
    def __init__(self, job: ToyJob, run_dir: Path) -> None:
        identity = {"task": Identity(f"toy-{job.rows}", "rows")}
        super().__init__(job, "toy", Rows(job.rows, 1), {"": Rows(23, 2)}, SoftTargets(), identity=identity)

    def build_model(self) -> Pair:
        return Pair()

    def flops_per_row(self, length: float) -> float:
        return 30.0


def dump(results: Mapping[str, Any], out: Path, wanted: int) -> Path:
    def write(file: IO[bytes]) -> None:
        file.write(json.dumps([{"id": i, "answer": int(a)} for i, a in enumerate(results["answer"])]).encode())

    def check(path: Path) -> list[str]:
        count = len(json.loads(path.read_text()))
        return [] if count == wanted else [f"{count} answers; there are {wanted} questions"]

    return write_checked(out, write, check)


TASK = ToyTask
