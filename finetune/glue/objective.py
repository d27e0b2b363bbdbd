"""What the classifier's outputs mean on GLUE: loss, predictions and metrics."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor

from capt.finetune.batches import Batch, TextInputs, TextRows
from capt.finetune.evaluation import RowResults
from capt.finetune.glue.tasks import GlueTask
from capt.finetune.metrics import compute_metrics
from capt.pretrain.data.sts_files import MAX_SCORE


class GlueObjective:
    """Cross entropy of classes, or squared error of scores, and the metrics of one task
    (`capt.finetune.evaluation`)."""

    def __init__(self, task: GlueTask) -> None:
        self.task = task

    @property
    def metric(self) -> str:
        """The metric that selects models."""
        return self.task.metric

    def loss(self, outputs: Float[Tensor, "n outputs"], labels: Num[Tensor, " n"]) -> Float[Tensor, ""]:
        """Mean cross entropy; for scores the mean squared error of score / 5, as fairseq trains STS-B."""
        if self.task.regression:
            return F.mse_loss(outputs[:, 0], labels / MAX_SCORE)
        return F.cross_entropy(outputs, labels)

    def row_results(self, outputs: Float[Tensor, "n outputs"], batch: Batch[TextInputs]) -> dict[str, Tensor]:
        """The ``logits`` of each row: GLUE's tasks have three classes at most."""
        return {"logits": outputs}

    def predictions(self, results: RowResults) -> Num[np.ndarray, " n"]:
        """Classes (int64), or scores (float32) back on the scale of 0 to 5 and clipped to it."""
        logits = results["logits"]
        if self.task.regression:
            return np.clip(MAX_SCORE * logits[:, 0], 0.0, MAX_SCORE).astype(np.float32)
        classes: np.ndarray = logits.argmax(1).astype(np.int64)
        return classes

    def metrics(self, results: RowResults, rows: TextRows) -> dict[str, float]:
        """``loss``, the task's metrics, ``degenerate`` and ``baseline`` (`capt.finetune.metrics.compute_metrics`)."""
        assert rows.labels is not None, "dev_rows refuses a split without labels"
        loss = self.loss(torch.from_numpy(results["logits"]), torch.from_numpy(rows.labels))
        return {"loss": float(loss), **compute_metrics(self.task.metrics, self.predictions(results), rows.labels)}
