"""What the classifier's outputs mean: loss, predictions and metrics, over whole sets and all ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor

from finetune.batches import RowSet, every_row
from finetune.glue.tasks import GlueTask
from finetune.metrics import measure
from pretrain.base.progress import ProgressCallback
from pretrain.engine import distributed
from pretrain.language.sts_files import MAX_SCORE

Logits = Float[np.ndarray, "n outputs"]


def loss_of(task: GlueTask, logits: Float[Tensor, "n outputs"], labels: Num[Tensor, " n"]) -> Float[Tensor, ""]:
    """Mean cross entropy; for scores the mean squared error of score / 5, as fairseq trains STS-B."""
    if task.regression:
        return F.mse_loss(logits[:, 0], labels / MAX_SCORE)
    return F.cross_entropy(logits, labels)


def predictions_of(task: GlueTask, logits: Logits) -> Num[np.ndarray, " n"]:
    """Classes (int64), or scores (float32) back on the scale of 0 to 5 and clipped to it."""
    if task.regression:
        return np.clip(MAX_SCORE * logits[:, 0], 0.0, MAX_SCORE).astype(np.float32)
    classes: np.ndarray = logits.argmax(1).astype(np.int64)
    return classes


def metrics_of(task: GlueTask, logits: Logits, labels: Num[np.ndarray, " n"]) -> dict[str, float]:
    """The task's metrics (`measure`) and ``loss``."""
    loss = loss_of(task, torch.from_numpy(logits), torch.from_numpy(labels))
    return {"loss": float(loss), **measure(task.metrics, predictions_of(task, logits), labels)}


@torch.no_grad()
def all_logits(
    model: Callable[..., Tensor],
    rows: RowSet,
    size: int,
    device: torch.device,
    progress: ProgressCallback | None = None,
) -> Logits:
    """Logits of every row, in order, the same on every rank; each rank computes its share.

    Args:
        model: a `Classifier` in evaluation mode, or the engine around one.
        rows: what to run it on.
        size: rows a forward pass.
        device: where the model is.
        progress: called with the rows done and their number.
    """
    mine: list[tuple[Any, Any]] = []
    done = 0
    for numbers, batch in every_row(rows, size, distributed.world_size(), distributed.rank()):
        batch = batch.to(device)
        logits = model(batch.tokens, batch.types, batch.padded)
        mine.append((numbers, logits[: len(numbers)].cpu().numpy()))
        done += len(numbers)
        if progress is not None:
            progress(done, len(rows))
    parts = list(chain(*distributed.gather_objects(mine)))
    numbers, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    out = np.empty_like(values)
    out[numbers] = values
    return out
