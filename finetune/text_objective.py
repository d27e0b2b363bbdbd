"""What a classifier's outputs mean on labelled texts: loss, predictions and metrics."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor

from capt.finetune.batches import Batch, TextInputs, TextRows
from capt.finetune.evaluation import RowResults
from capt.finetune.metrics import compute_metrics
from capt.finetune.text_task import TextTask


class TextObjective:
    """Cross entropy of classes, of each label, or squared error of scores; and the task's metrics (`Objective`)."""

    def __init__(self, task: TextTask) -> None:
        self.task = task

    @property
    def metric(self) -> str:
        """The metric that selects models."""
        return self.task.metrics[0]

    def loss(self, outputs: Float[Tensor, "n outputs"], labels: Num[Tensor, "n ..."]) -> Float[Tensor, ""]:
        """Mean cross entropy, over rows and labels where a row has several labels.

        For scores the mean squared error of (score - offset) / scale: score / 5 for STS-B, as fairseq trains it.
        """
        if self.task.kind == "regression":
            return F.mse_loss(outputs[:, 0], (labels - self.task.offset) / self.task.scale)
        if self.task.kind == "multi_label":
            return F.binary_cross_entropy_with_logits(outputs, labels)
        return F.cross_entropy(outputs, labels)

    def row_results(self, outputs: Float[Tensor, "n outputs"], batch: Batch[TextInputs]) -> dict[str, Tensor]:
        """The ``logits`` of each row."""
        return {"logits": outputs}

    def predictions(self, results: RowResults) -> Num[np.ndarray, "n ..."]:
        """Classes (int64), labels as 0 or 1 (int64, a column each), or scores (float32) within the task's bounds."""
        logits = results["logits"]
        predicted: np.ndarray
        if self.task.kind == "regression":
            lowest, highest = self.task.bounds or (-np.inf, np.inf)
            predicted = np.clip(self.task.scale * logits[:, 0] + self.task.offset, lowest, highest).astype(np.float32)
        elif self.task.kind == "multi_label":
            predicted = (logits > 0).astype(np.int64)
        else:
            predicted = logits.argmax(1).astype(np.int64)
        return predicted

    def metrics(self, results: RowResults, rows: TextRows) -> dict[str, float]:
        """``loss``, the task's metrics, ``degenerate`` and ``baseline`` (`capt.finetune.metrics.compute_metrics`)."""
        labels = rows.labels
        assert labels is not None, "a data set without labels is refused where it is read"
        loss = self.loss(torch.from_numpy(results["logits"]), torch.from_numpy(labels))
        gold = labels.astype(np.int64) if self.task.kind == "multi_label" else labels
        measured = compute_metrics(self.task.metrics, self.predictions(results), gold, scale=self.task.scale)
        return {"loss": float(loss), **measured}
